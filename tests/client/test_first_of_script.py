"""Version 0 of a script's run: a model file, and the hash of the script that the researcher means."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file

from atoll.client.first_version import build_first_version
from atoll.client.people import Person, PersonSettings, ScriptTable
from atoll.cluster.registry import hash_script
from atoll.transport.identity import Identity
from atoll.wire.errors import BadManifest, ConfigError, Unknown
from atoll.wire.job import Job, begun_from, parse_job
from atoll.wire.manifest import Manifest
from atoll.wire.tensors import views

TENSORS = {"a.weight": torch.arange(6.0).view(2, 3), "steps": torch.tensor(7)}


def person(home: Path, **scripts: ScriptTable) -> Person:
    nobody = cast(Identity, None)  # reading a file needs no identity
    return Person(home=home, identity=nobody, settings=PersonSettings(scripts=scripts))


def job(start: Path | None = None, **section: Any) -> Job:
    made = parse_job({"job": {"name": "a", "script": "train", "rounds": 1, **section}})
    return made if start is None else begun_from(made, start=start)


def test_version_0_is_the_file(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import atoll\n")
    save_file(TENSORS, tmp_path / "model.safetensors")
    who = person(tmp_path, train=ScriptTable(path=script))
    first = build_first_version(who, job(tmp_path / "model.safetensors"), tmp_path)
    manifest = Manifest.decode(first.manifest)
    assert {spec.name: spec.role for spec in manifest} == {"a.weight": "parameter", "steps": "buffer"}
    data = first.path.read_bytes()
    for name, tensor in views(manifest, data, writable=False).items():
        assert torch.equal(tensor, TENSORS[name])
    assert first.crc32 == zlib.crc32(data)
    assert first.app_hash == hash_script(script)


def test_the_hash_alone_says_which_script_is_meant(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    who = person(tmp_path, train=ScriptTable(hash="ab" * 32))
    assert build_first_version(who, job(tmp_path / "model.safetensors"), tmp_path).app_hash == "ab" * 32


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"script 'train' is not named on this machine: add \[scripts.train\] to .*user.toml"
    ):
        build_first_version(person(tmp_path), job(), tmp_path)
    known = person(tmp_path, train=ScriptTable(hash="ab" * 32))
    with pytest.raises(ConfigError, match=r"job.start is missing: .* atoll run JOB --from FILE"):
        build_first_version(known, job(), tmp_path)
    with pytest.raises(ConfigError, match=r"job.continues = "):
        build_first_version(known, job(continues="0" * 26), tmp_path)
    with pytest.raises(Unknown, match=r"gone.py cannot be read"):
        build_first_version(person(tmp_path, train=ScriptTable(path=tmp_path / "gone.py")), job(), tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no model")
    with pytest.raises(BadManifest):
        build_first_version(known, job(tmp_path / "model.safetensors"), tmp_path)
