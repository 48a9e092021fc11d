"""What simulated sites keep: the state that a round begins with, in memory or in files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from atoll.cluster.site_state import Kept
from atoll.simulations.site_states import SiteStates


def kept(value: float) -> Kept:
    return Kept(tensors={"c": torch.full((4,), value)}, values={"steps": int(value)})


@pytest.mark.parametrize("memory_bytes", [0, 16, 1 << 20])
def test_a_round_begins_with_what_the_newest_earlier_one_left(tmp_path: Path, memory_bytes: int) -> None:
    states = SiteStates(tmp_path / "states", memory_bytes)
    north, south = states.of("north"), states.of("south")
    assert north.load(1) == Kept()
    north.save(1, kept(1))
    south.save(1, kept(5))
    north.save(3, kept(3))
    assert north.load(1) == Kept()
    assert [float(north.load(before).tensors["c"][0]) for before in (2, 3, 4, 9)] == [1, 1, 3, 3]
    assert south.load(7).values == {"steps": 5}
    north.save(3, kept(4))  # the round is done again
    north.save(5, kept(6))
    assert north.load(2) == Kept()
    assert [float(north.load(before).tensors["c"][0]) for before in (4, 9)] == [4, 6]
    states.remove()
    assert not (tmp_path / "states").exists()


def test_memory_is_given_back_and_files_go_with_what_they_held(tmp_path: Path) -> None:
    states = SiteStates(tmp_path, 32)  # room for two of 16 bytes
    north = states.of("north")
    for round in range(1, 6):
        north.save(round, kept(round))
    assert len(list(tmp_path.rglob("*.safetensors"))) <= 1
    assert float(north.load(9).tensors["c"][0]) == 5


def test_what_is_kept_does_not_change_with_the_model(tmp_path: Path) -> None:
    states, tensor = SiteStates(tmp_path), torch.ones(4)
    states.of("north").save(1, Kept(tensors={"c": tensor}))
    tensor.zero_()
    assert float(states.of("north").load(2).tensors["c"].sum()) == 4
