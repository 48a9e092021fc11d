"""What codecs with feedback carry over at a site: over rounds, restarts, and updates that did not count."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from contracts.updates import decoded
from samples.bench import Bench, MakeBench
from torch import Tensor

from atoll.cluster.open_session import open_session
from atoll.cluster.run_session import RunSession
from atoll.wire.errors import BadUpdate, LocalError

CODECS = [
    {"kind": "top_k", "fraction": 0.1},
    {"kind": "random_k", "fraction": 0.1},
    {"kind": "int4", "error_feedback": True},
]


def ignore(done: int, total: int) -> None:
    pass


def session_of(bench: Bench) -> RunSession:
    return open_session(bench.prepare("north"))


def train(bench: Bench, session: RunSession, out: str, round: int, counted_round: int) -> Tensor:
    """The values that a server reads of the update."""
    session.train(bench.train(out, round=round, counted_round=counted_round), ignore)
    return decoded(session.layout, bench.update(out))


def whole(bench: Bench, session: RunSession, round: int) -> Tensor:
    """The difference that the site trains in a round, as no codec touches it."""
    native = dataclasses.replace(bench, job=bench.job.model_copy(update={"strategy": _without_codec(bench)}))
    other = open_session(native.prepare("north", state_folder=str(bench.folder / "state-native")))
    return train(native, other, f"whole-{round}", round, 0)


def _without_codec(bench: Bench) -> object:
    return bench.job.strategy.model_copy(update={"codec": None, "optimizer": None})


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec["kind"])
def test_what_was_left_out_goes_with_the_next_update(make_bench: MakeBench, codec: dict[str, object]) -> None:
    """sum of decoded updates = sum of differences - what is carried still (base versions are all version 0 here)."""
    bench = make_bench(codec=codec, app={"dtype": "float32"})
    session = session_of(bench)
    sent = torch.zeros(session.layout.num_values, dtype=torch.float64)
    meant = torch.zeros_like(sent)
    for round in (1, 2, 3):
        sent += train(bench, session, f"update-{round}", round, round - 1)
        meant += whole(bench, session, round)
    carried = torch.cat([vector.double() for vector in carried_by(session, 3)])
    assert carried.abs().max() > 0
    torch.testing.assert_close(sent + carried, meant, rtol=0, atol=1e-6)


def carried_by(session: RunSession, round: int) -> list[Tensor]:
    assert session.carried_over is not None
    with session.carried_over.begin(99, round) as there:
        return [there.carried.before[entry.spec.name].clone() for entry in session.layout.means]


@pytest.mark.parametrize("codec", [*CODECS, {"kind": "top_k", "difference": True}], ids=lambda codec: str(codec))
def test_a_round_that_is_done_again_writes_the_same_bytes(make_bench: MakeBench, codec: dict[str, object]) -> None:
    optimizer = {"kind": "sgd", "momentum": 1.0 if codec.get("difference") else 0.0}
    bench = make_bench(
        codec=codec, app={"dropout": 0.3}, optimizer=optimizer, schedule={"kind": "rounds", "min": 1}, only=["north"]
    )
    session = session_of(bench)
    session.train(bench.train("first"), ignore)
    session.train(bench.train("second", round=2, counted_round=1), ignore)
    session.train(bench.train("again", round=2, counted_round=1), ignore)
    fresh = session_of(bench)  # as after a kill
    fresh.train(bench.train("fresh", round=2, counted_round=1), ignore)
    fresh.train(bench.train("third", round=3, counted_round=2), ignore)
    assert bench.update("second") == bench.update("again") == bench.update("fresh")
    assert len({bench.update(name) for name in ("first", "second", "third")}) == 3


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec["kind"])
def test_an_update_that_did_not_count_leaves_no_trace(make_bench: MakeBench, codec: dict[str, object]) -> None:
    """Round 2 closed without this site: round 3 writes what it would have written had round 2 never been asked for."""
    bench = make_bench(codec=codec)
    session = session_of(bench)
    session.train(bench.train("first"), ignore)
    session.train(bench.train("late", round=2, counted_round=1), ignore)
    session.train(bench.train("after", round=3, counted_round=1), ignore)
    other = open_session(bench.prepare("north", state_folder=str(bench.folder / "other")))
    other.train(bench.train("first-too", round=1), ignore)
    other.train(bench.train("after-too", round=3, counted_round=1), ignore)
    assert bench.update("after") == bench.update("after-too")
    session.train(bench.train("counted", round=4, counted_round=3), ignore)
    session.train(bench.train("as-if", round=4, counted_round=1), ignore)
    assert bench.update("counted") != bench.update("as-if")


def test_no_more_than_two_files_stay(make_bench: MakeBench) -> None:
    bench = make_bench(codec={"kind": "top_k"})
    session = session_of(bench)
    for round, counted in ((1, 0), (2, 1), (3, 1), (4, 1), (5, 4)):
        session.train(bench.train("update", round=round, counted_round=counted), ignore)
        names = sorted(path.name[:8] for path in (bench.folder / "state-north" / "carried").iterdir())
        assert names == [f"{number:08d}" for number in (counted, round) if number]


def test_a_kill_inside_a_round_leaves_what_was_there(make_bench: MakeBench) -> None:
    bench = make_bench(codec={"kind": "top_k"})
    session = session_of(bench)
    session.train(bench.train("first"), ignore)

    def kill(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session.train(bench.train("second", round=2, counted_round=1), kill)
    folder = bench.folder / "state-north" / "carried"
    assert [path.name[:8] for path in folder.iterdir()] == ["00000001"]
    (folder / ".00000002.carried.safetensors.0a1b.draft").write_bytes(b"half a file")
    session.train(bench.train("second", round=2, counted_round=1), ignore)
    assert sorted(path.name[:8] for path in folder.iterdir()) == ["00000001", "00000002"]


def test_a_damaged_file_is_an_error_and_not_a_fresh_start(make_bench: MakeBench) -> None:
    bench = make_bench(codec={"kind": "top_k"})
    session = session_of(bench)
    session.train(bench.train("first"), ignore)
    (path,) = (bench.folder / "state-north" / "carried").iterdir()
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(LocalError, match="what round 1 left cannot be read"):
        session.train(bench.train("second", round=2, counted_round=1), ignore)


def test_a_site_that_lost_its_folder_goes_on_but_not_with_difference_coding(
    make_bench: MakeBench, caplog: pytest.LogCaptureFixture
) -> None:
    bench = make_bench(codec={"kind": "top_k"})
    session_of(bench).train(bench.train("update", round=4, counted_round=3), ignore)
    assert "what round 3 left is gone" in caplog.text
    bench = difference_bench(make_bench)
    with pytest.raises(LocalError, match="the server builds on it; start the run anew"):
        session_of(bench).train(bench.train("update", round=4, counted_round=3), ignore)


def difference_bench(make_bench: MakeBench) -> Bench:
    return make_bench(
        codec={"kind": "top_k", "fraction": 0.1, "difference": True},
        optimizer={"kind": "sgd", "momentum": 1.0},
        schedule={"kind": "rounds", "min": 1},
        only=["north"],
        app={"dtype": "float32"},
    )


def test_difference_coding_sends_the_change_since_the_last_update(make_bench: MakeBench) -> None:
    """What the server has added up is what the site notes, and it comes nearer to the difference, here always the same."""
    bench = difference_bench(make_bench)
    session = session_of(bench)
    meant, added_up = whole(bench, session, 1), torch.zeros(session.layout.num_values, dtype=torch.float64)
    distances = []
    for round in range(1, 6):
        request = bench.train(f"update-{round}", round=round, counted_round=round - 1)
        session.train(dataclasses.replace(request), ignore)
        added_up += decoded(session.layout, bench.update(f"update-{round}"))
        distances.append(float((added_up - meant).norm() / meant.norm()))
    noted = torch.cat([vector.double() for vector in carried_by(session, 5)])
    torch.testing.assert_close(noted, added_up, rtol=0, atol=1e-6)
    assert distances[-1] < 0.5 * distances[0]


def test_difference_coding_needs_updates_of_one_weight(make_bench: MakeBench) -> None:
    bench = difference_bench(make_bench)
    session = session_of(bench)
    session.train(bench.train("first"), ignore)
    with pytest.raises(BadUpdate, match="weighs 8 examples, that of round 1 weighed 40") as refused:
        session.train(bench.train("second", round=2, counted_round=1, config={"steps": 1}), ignore)
    assert (refused.value.field, refused.value.value, refused.value.bound) == ("weight", "8", "40")


def test_what_is_carried_counts_against_the_bound(make_bench: MakeBench) -> None:
    bench = make_bench(codec={"kind": "top_k"}, app={"dtype": "float32"}, work={"epochs": 1, "full_batch": True})
    session = session_of(bench)
    session.train(bench.train("first"), ignore)
    reach = float(np.max([vector.abs().max() for vector in carried_by(session, 1)]))
    tight = bench.job.strategy.model_copy(update={"sum": bench.job.strategy.sum.model_copy(update={"bound": reach})})
    job = bench.job.model_copy(update={"strategy": tight})
    strict = open_session(bench.prepare("north", job=job.canonical().decode()))
    with pytest.raises(BadUpdate, match=r"carries over from earlier rounds \(error\), the bound is"):
        strict.train(bench.train("second", round=2, counted_round=1), ignore)
    assert not (bench.folder / "second").exists()
    assert not Path(bench.folder / "state-north" / "carried" / "00000002.carried.safetensors").exists()
