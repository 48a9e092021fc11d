"""How data lies over sites, as numbers and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from samples.simulated import Points, points_job
from torch.utils.data import Dataset

import atoll
from atoll.simulations.preview import preview
from atoll.simulations.sites import Partition
from atoll.wire.errors import AppFailed, ConfigError


class Hospitals(Points):
    """Points that say which of four hospitals they are from."""

    def data(self, split: str) -> Dataset[Any] | None:
        found: Any = super().data(split)
        found.groups = np.arange(len(found)) % 4
        return found  # type: ignore[no-any-return]


def test_the_counts_are_those_of_the_sites_that_train(tmp_path: Path) -> None:
    partition = Partition(kind="classes", classes_each=1, seed=3)
    found = preview(points_job(), sites=6, app=Points, source={}, partition=partition)
    assert found.classes == ("0", "1", "2")
    assert found.num_classes_S.tolist() == [1] * 6
    assert found.counts_SC.sum(axis=0).tolist() == [40, 40, 40]
    assert found.distance == pytest.approx(2 / 3)
    trained = atoll.simulate(points_job(), sites=6, app=Points, source={}, partition=partition)
    assert trained.rounds[-1].weight == int(found.sizes_S.sum())
    found.save(tmp_path / "new" / "partition.png")
    assert (tmp_path / "new" / "partition.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_has_a_bar_for_each_site_and_class() -> None:
    found = preview(points_job(), sites=6, app=Points, source={})
    axes = found.plot().axes[0]
    assert [patch.get_height() for patch in axes.patches] == found.counts_SC.T.ravel().tolist()  # type: ignore[attr-defined]
    many = preview(points_job(), sites=60, app=Points, source={})
    assert len(many.plot().axes[0].collections) == len(many.classes)


def test_sites_of_data_that_names_them_are_as_many_as_there_are() -> None:
    natural = Partition(kind="natural")
    assert preview(points_job(), app=Hospitals, source={}, partition=natural).sizes_S.tolist() == [30] * 4
    result = atoll.simulate(points_job(min_sites=4), app=Hospitals, source={}, partition=natural)
    assert [entry.sites for entry in result.rounds] == [4, 4]
    with pytest.raises(ConfigError, match=r"5 sites, and the data has 4 groups"):
        atoll.simulate(points_job(), sites=5, app=Hospitals, source={}, partition=natural)
    with pytest.raises(ConfigError, match=r"partition = natural: .* give it an attribute `groups`"):
        preview(points_job(), app=Points, source={}, partition=natural)


def test_sites_with_sources_of_their_own_are_shown_as_they_are() -> None:
    sources: dict[str, dict[str, Any]] = {"north": {"num_train": 30}, "south": {"num_train": 3}}
    found = preview(points_job(), sites=sources, app=Points)
    assert (found.sites, found.sizes_S.tolist()) == (("north", "south"), [30, 3])
    with pytest.raises(AppFailed, match=r"south: data\(\"train\"\) is None"):
        preview(points_job(), sites={**sources, "south": {"num_train": None}}, app=Points)
