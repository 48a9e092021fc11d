"""Loops of all kinds that join by one line: their updates are those of the same loop written by hand, in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from samples.parallel_world import World
from samples.script_loops import BATCH, Loop, Ran, build, by_hand, joined
from samples.script_run import PATIENCE_S, STEPS, ScriptRun

from atoll.cluster.messages import Cancel, Failed, Prepared, Trained

ROUNDS = 3
Start = Callable[[Loop, int], "Future[list[Ran]]"]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World(2) as world:
        yield world


@pytest.fixture
def run(tmp_path: Path) -> Iterator[ScriptRun]:
    with ScriptRun(tmp_path, build).served() as run:
        yield run


@pytest.fixture
def start(world: World, run: ScriptRun) -> Iterator[Start]:
    """Starts a loop in so many processes."""
    with ThreadPoolExecutor(1) as pool:
        yield lambda loop, size: pool.submit(world.run, joined, size, loop, run.socket, run.script)


def off(run: ScriptRun, wanted: Sequence[dict[str, torch.Tensor]]) -> float:
    """The largest difference of an update to what a loop by hand came to."""
    most = 0.0
    for number, trained in enumerate(wanted, start=1):
        base = build(number - 1).state_dict()
        for name, difference in run.difference(number).items():
            most = max(most, (difference - (trained[name] - base[name])).abs().max().item())
    return most


ALONE = {
    "sgd": Loop(),
    "adamw with a schedule": Loop(optimizer="adamw", schedules=True),
    "closures": Loop(optimizer="lbfgs"),
    "clipped closures": Loop(optimizer="lbfgs", clip=0.05),
    "several optimizers": Loop(optimizer="two", clip=0.1),
    "accumulation": Loop(accumulate=3),
    "overflow": Loop(scales=True, overflow=(0, 5)),
    "overflow of a fused optimizer": Loop(scales=True, overflow=(0, 5), optimizer="fused"),
    "clipped under a scaler": Loop(scales=True, clip=0.05),
    "clipped fused under a scaler": Loop(scales=True, clip=0.05, optimizer="fused"),
    "compiled": Loop(wrap="compile"),
}


@pytest.mark.parametrize("loop", ALONE.values(), ids=ALONE.keys())
def test_one_process_sends_what_the_loop_by_hand_comes_to(run: ScriptRun, start: Start, loop: Loop) -> None:
    ran = start(loop, 1)
    trained = run.play(ROUNDS)
    (end,) = ran.result(PATIENCE_S)
    assert end.ended == "the run is over"
    assert end.steps == ROUNDS * STEPS + (loop.overflow is not None)  # a step that was skipped does not count
    wanted = by_hand(loop, [run.base(version) for version in range(ROUNDS)], STEPS)
    assert off(run, wanted) == (0 if loop.optimizer != "fused" or loop.clip is None else pytest.approx(0, abs=1e-6))
    assert [one.weight for one in trained] == [STEPS * BATCH * loop.accumulate] * ROUNDS
    if loop.clip is not None:
        unclipped = by_hand(replace(loop, clip=None), [run.base(version) for version in range(ROUNDS)], STEPS)
        assert off(run, unclipped) > 1e-3


SPREAD = {
    "ddp": Loop(wrap="ddp"),
    "fsdp2": Loop(wrap="fsdp2"),
    "clipped after averaging, ddp": Loop(wrap="ddp", clip=0.05),
    "clipped over shards, fsdp2": Loop(wrap="fsdp2", clip=0.05),
    "adamw and accumulation, ddp": Loop(wrap="ddp", optimizer="adamw", accumulate=2, schedules=True),
    "adamw and accumulation, fsdp2": Loop(wrap="fsdp2", optimizer="adamw", accumulate=2, schedules=True),
    "clipped closures, ddp": Loop(wrap="ddp", optimizer="closure", clip=0.05),
    "clipped closures, fsdp2": Loop(wrap="fsdp2", optimizer="closure", clip=0.05),
    "overflow on one process, ddp": Loop(wrap="ddp", scales=True, overflow=(1, 5)),
    "overflow on one process, fsdp2": Loop(wrap="fsdp2", scales=True, overflow=(1, 5)),
    "several optimizers, fsdp2": Loop(wrap="fsdp2", optimizer="two", clip=0.1),
}


@pytest.mark.parametrize("loop", SPREAD.values(), ids=SPREAD.keys())
def test_two_processes_send_what_one_would(run: ScriptRun, start: Start, loop: Loop) -> None:
    ran = start(loop, 2)
    trained = run.play(ROUNDS)
    ends = ran.result(PATIENCE_S)
    assert {(end.ended, end.steps) for end in ends} == {("the run is over", ends[0].steps)}
    alone = by_hand(replace(loop, wrap="none"), [run.base(version) for version in range(ROUNDS)], STEPS)
    assert off(run, alone) < 2e-6
    assert [one.weight for one in trained] == [STEPS * BATCH * loop.accumulate] * ROUNDS
    if loop.clip is None and loop.overflow is None:  # what the comparison must notice
        other = by_hand(replace(loop, wrap="none"), [run.base(version) for version in range(ROUNDS)], STEPS - 1)
        assert off(run, other) > 1e-3


def test_processes_that_average_nothing_agree_on_an_overflow(run: ScriptRun, start: Start) -> None:
    """Without it one would make the step that the other skips, and wait for it for ever."""
    ran = start(Loop(alike=True, scales=True, overflow=(1, 2)), 2)
    run.play(2)
    first, second = ran.result(PATIENCE_S)
    assert (first.steps, first.scale) == (second.steps, second.scale) == (2 * STEPS + 1, 4.0)
    assert all(torch.equal(*pair) for pair in zip(first.weights, second.weights, strict=True))


def test_examples_may_be_counted_by_a_function(run: ScriptRun, start: Start) -> None:
    ran = start(Loop(by_callable=True, wrap="ddp"), 2)
    assert run.begin().max_weight == STEPS * 32  # the job's batch_size
    run.ask(run.train(1))
    assert run.answer(Trained).weight == STEPS * BATCH
    run.end()
    ran.result(PATIENCE_S)


def test_a_process_that_ends_early_ends_the_others_at_their_next_exchange(run: ScriptRun, start: Start) -> None:
    ran = start(Loop(alike=True, max_steps=(100, STEPS + 1)), 2)
    run.begin()
    run.ask(run.train(1))
    run.answer(Trained)
    run.ask(run.train(2))
    first, second = ran.result(PATIENCE_S)
    assert (first.steps, first.ended) == (2 * STEPS, "another process of the script has left the run")
    assert (second.steps, second.ended) == (STEPS + 1, "")


def test_without_an_agent_nothing_changes(world: World, run: ScriptRun) -> None:
    loop = Loop(clip=0.01, max_steps=5)  # which would show
    (ran,) = world.run(joined, 1, loop, None, run.script)
    (wanted,) = by_hand(replace(loop, clip=None), [_as_begun(run)], 5)
    assert (ran.steps, ran.ended) == (5, "")
    assert all(torch.equal(*pair) for pair in zip(ran.weights, wanted.values(), strict=True))


def _as_begun(run: ScriptRun) -> Path:
    return run.base(99)


def test_an_agent_that_is_started_again_gets_the_steps_that_were_made(run: ScriptRun, start: Start) -> None:
    ran = start(Loop(), 1)
    run.begin()
    run.ask(run.train(1), None)
    run.ask(run.prepare)
    run.answer(Prepared)
    run.ask(run.train(1))
    run.answer(Trained)
    run.end()
    assert ran.result(PATIENCE_S)[0].steps == STEPS
    assert off(run, by_hand(Loop(), [run.base(0)], STEPS)) == 0


def test_a_round_that_nobody_wants_any_more_is_forgotten(run: ScriptRun, start: Start) -> None:
    ran = start(Loop(), 1)
    run.begin()
    run.ask(run.train(1), Cancel(key="r1#1"), run.train(2, attempt=2))
    assert run.answer(Trained).key == "r2#2"
    run.end()
    assert ran.result(PATIENCE_S)[0].steps == 2 * STEPS
    assert not (run.folder / "update-1-1").exists()


def test_another_model_is_refused_on_both_ends(tmp_path: Path, world: World) -> None:
    with ScriptRun(tmp_path, lambda seed: torch.nn.Linear(4, 3)).served() as run, ThreadPoolExecutor(1) as pool:
        ran = pool.submit(world.run, joined, 1, Loop(), run.socket, run.script)
        run.ask(run.prepare)
        error = run.answer(Failed).to_error()
        assert "\"0.bias\" is float32 [8] in the script's model, and absent in the run's" in str(error)
        with pytest.raises(AssertionError, match="BadManifest"):
            ran.result(PATIENCE_S)


def test_another_script_is_refused_on_both_ends(run: ScriptRun, start: Start) -> None:
    prepare = run.prepare
    run.script.write_text("import other\n")
    ran = start(Loop(), 1)
    run.ask(prepare)
    assert "start the file that [scripts.train] of site.toml names" in str(run.answer(Failed).to_error())
    with pytest.raises(AssertionError, match="NotAllowed"):
        ran.result(PATIENCE_S)


def test_a_schedule_without_steps_is_refused_on_both_ends(tmp_path: Path, world: World) -> None:
    with (
        ScriptRun(tmp_path, build, schedule={"kind": "rounds", "min": 1}).served() as run,
        ThreadPoolExecutor(1) as pool,
    ):
        ran = pool.submit(world.run, joined, 1, Loop(), run.socket, run.script)
        run.ask(run.prepare)
        assert "strategy.schedule.kind = 'rounds': atoll.join()" in str(run.answer(Failed).to_error())
        with pytest.raises(AssertionError, match="ConfigError"):
            ran.result(PATIENCE_S)
