"""Versions of one run on disk: what is removed when newer ones are there."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.server.models import RunModels
from atoll.wire.errors import Unknown
from atoll.wire.manifest import Manifest

MANIFEST = Manifest.build([("layer.weight", "float32", (4,), "parameter")])


def models_with(folder: Path, versions: range) -> RunModels:
    """All files that a run has of each version."""
    models = RunModels(folder, "run", MANIFEST)
    models.prepare()
    for version in versions:
        with models.create(version, {}) as data:
            data[:] = bytes([version]) * len(data)
        models.optimizer_path(version).touch()
        (folder / "run" / f"{version}.download").touch()
    return models


def test_what_is_not_kept_goes_with_all_that_belongs_to_it(tmp_path: Path) -> None:
    models = models_with(tmp_path, range(1, 13))
    models.spool.touch()
    models.prune({1, 12})
    names = {f"{version}.{end}" for version in (1, 12) for end in ("safetensors", "optimizer.safetensors", "download")}
    assert {path.name for path in (tmp_path / "run").iterdir()} == names | {"spool"}


def test_of_version_0_the_model_alone_stays(tmp_path: Path) -> None:
    models = models_with(tmp_path, range(3))
    models.prune({2})
    assert models.has(0)
    assert not models.optimizer_path(0).exists()
    assert not (tmp_path / "run" / "0.download").exists()
    with models.open(0) as model:
        assert bytes(model.map[:4]) == bytes(4)


def test_a_version_that_is_gone_says_why(tmp_path: Path) -> None:
    models = models_with(tmp_path, range(3))
    models.prune({2})
    with pytest.raises(Unknown, match="no model version 1 on disk: only the newest are kept, and version 0"):
        models.open(1)
