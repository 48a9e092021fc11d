"""What a site sends does not show its layout: the same names and bytes of one process's update, within rounding."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from samples.bench import MakeBench
from samples.parallel_sessions import given_up, ignore, play
from samples.parallel_world import World

from atoll.cluster.open_session import open_session
from atoll.wire.errors import ConfigError

HEADER = 64
TP = {"tp": 2, "tp_plan": {"0": "colwise", "3": "rowwise"}}
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"dp_replicate": 2},
    "zero 2": {"dp_shard": 2, "zero": 2},
    "fsdp": {"dp_shard": 2},
    "tp": TP,
    "pp": {"pp": 2, "pipeline": {"microbatches": 3}},
}


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World(2) as found:
        yield found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_update_is_that_of_one_process(world: World, make_bench: MakeBench, installed: Path, layout: str) -> None:
    bench = make_bench(work={"epochs": 1, "batch_size": 7})
    alone = open_session(bench.prepare("north"))
    wanted, judged = alone.train(bench.train("alone"), ignore), alone.evaluate(bench.evaluate(), ignore)
    prepare = bench.prepare("north", parallel=LAYOUTS[layout])
    answers = world.run(play, 2, installed, prepare, [bench.train("first"), bench.train("again")], bench.evaluate())
    prepared, trained, evaluated = answers[0]
    assert prepared == alone.prepared()
    assert [one.weight for one in trained] == [wanted.weight] * 2
    assert trained[0].metrics["loss"] == pytest.approx(wanted.metrics["loss"], rel=1e-12)
    assert evaluated.metrics.keys() == judged.metrics.keys()
    assert evaluated.metrics["accuracy"] == judged.metrics["accuracy"]
    assert evaluated.metrics["loss"] == pytest.approx(judged.metrics["loss"], rel=1e-12)
    assert bench.update("first") == bench.update("again")
    own, other = bench.update("first"), bench.update("alone")
    assert own[:HEADER] == other[:HEADER]
    assert len(own) == len(other)
    found, expected = values(own), values(other)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
    assert np.abs(expected).max() > 1e-3
    assert answers[1][1][0].metrics == trained[0].metrics


def test_fedprox_holds_every_slice_near_the_base(world: World, make_bench: MakeBench, installed: Path) -> None:
    bench = make_bench(work={"epochs": 1, "batch_size": 7}, rule={"kind": "fedprox", "mu": 2.0})
    world.run(play, 2, installed, bench.prepare("north", parallel=LAYOUTS["fsdp"]), [bench.train("held")], None)
    open_session(bench.prepare("north")).train(bench.train("alone"), ignore)
    held, alone = (values(bench.update(name)) for name in ("held", "alone"))
    free = make_bench(work={"epochs": 1, "batch_size": 7})  # in the same folder, which it empties
    open_session(free.prepare("north")).train(free.train("free"), ignore)
    np.testing.assert_allclose(held, alone, rtol=0, atol=1e-12)
    assert np.abs(values(free.update("free")) - held).max() > 1e-3


def test_int8_has_the_same_bytes_in_every_layout(world: World, make_bench: MakeBench, installed: Path) -> None:
    bench = make_bench(work={"steps": 2, "batch_size": 7}, codec={"kind": "int8"})
    for layout in ("ddp", "fsdp"):
        world.run(play, 2, installed, bench.prepare("north", parallel=LAYOUTS[layout]), [bench.train(layout)], None)
    open_session(bench.prepare("north")).train(bench.train("alone"), ignore)
    # The rounding follows the place in the model, not the process; a difference at a rounding edge may go either way.
    for layout in ("ddp", "fsdp"):
        different = sum(a != b for a, b in zip(bench.update(layout), bench.update("alone"), strict=True))
        assert different <= 8


def test_a_task_is_given_up_by_all_after_the_same_step(world: World, make_bench: MakeBench, installed: Path) -> None:
    bench = make_bench(work={"steps": 50, "batch_size": 7})
    prepare = bench.prepare("north", parallel=LAYOUTS["ddp"])
    first, last = world.run(given_up, 2, installed, prepare, bench.train("update"))
    assert first == last == ("Stale", 3)
    assert not (bench.folder / "update").exists()


def test_an_update_out_of_bounds_is_refused_by_all(world: World, make_bench: MakeBench, installed: Path) -> None:
    bench = make_bench(work={"steps": 1, "batch_size": 7}, sum={"bound": 1e-9})
    prepare = bench.prepare("north", parallel=LAYOUTS["fsdp"])
    with pytest.raises(AssertionError, match=r"rank 0: [\s\S]*BadUpdate[\s\S]*rank 1: [\s\S]*BadUpdate"):
        world.run(play, 2, installed, prepare, [bench.train("update")], None)


@pytest.mark.parametrize(
    ("strategy", "key"),
    [
        ({"kind": "scaffold"}, "strategy.rule"),
        ({"codec": {"kind": "top_k"}}, "strategy.codec"),
        ({"personal": {"kind": "ditto"}}, "strategy.personal"),
        ({"local": ["0.*"]}, "strategy.local"),
    ],
)
def test_what_keeps_state_at_a_site_is_refused(make_bench: MakeBench, strategy: dict[str, Any], key: str) -> None:
    bench = make_bench(**strategy)
    with pytest.raises(ConfigError, match=r"remove \[parallel\]") as refused:
        play(bench.folder, bench.prepare("north", parallel={"dp_replicate": 2}), [], None)
    assert refused.value.key == key


def values(update: bytes) -> NDArray[np.float64]:
    return np.frombuffer(update[HEADER:], dtype="<f8")
