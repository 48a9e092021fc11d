from __future__ import annotations

from pathlib import Path

import pytest
import torch

from atoll.cluster.site_state import Kept, SiteState
from atoll.wire.errors import LocalError


def kept(number: int) -> Kept:
    tensors = {"moment": torch.full((3,), float(number), dtype=torch.float64), "step": torch.tensor(number)}
    return Kept(tensors=tensors, values={"number": number, "words": ["a"]})


def number_of(state: Kept) -> int:
    return int(state.values.get("number", 0))


def test_starts_empty(tmp_path: Path) -> None:
    assert SiteState(tmp_path / "absent").load(5) == Kept()


def test_gives_back_what_was_kept(tmp_path: Path) -> None:
    SiteState(tmp_path).save(1, kept(1))
    found = SiteState(tmp_path).load(2)
    assert found.values == kept(1).values
    assert found.tensors.keys() == {"moment", "step"}
    assert torch.equal(found.tensors["moment"], torch.ones(3, dtype=torch.float64))
    assert found.tensors["step"].shape == ()


def test_a_round_done_again_begins_with_the_same_state(tmp_path: Path) -> None:
    state = SiteState(tmp_path)
    for round in (1, 2, 5, 6):  # the site was not in the cohort of 3 and 4
        before = number_of(state.load(round))
        state.save(round, kept(round))
        assert number_of(state.load(round)) == before
    assert [number_of(state.load(round)) for round in (6, 7, 100)] == [5, 6, 6]


def test_keeps_no_more_than_two_files(tmp_path: Path) -> None:
    state = SiteState(tmp_path)
    for round in range(1, 20):
        state.save(round, kept(round))
    assert len(list(tmp_path.iterdir())) == 2


def test_a_draft_is_no_state(tmp_path: Path) -> None:
    SiteState(tmp_path).save(1, kept(1))
    (tmp_path / "00000002.state.draft").write_bytes(b"half a file")
    assert number_of(SiteState(tmp_path).load(9)) == 1


def test_a_damaged_file_is_an_error_and_not_a_fresh_start(tmp_path: Path) -> None:
    SiteState(tmp_path).save(1, kept(1))
    path = next(tmp_path.iterdir())
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(LocalError, match="state of round 1 cannot be read"):
        SiteState(tmp_path).load(2)
