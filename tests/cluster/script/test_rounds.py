"""The explicit form: a script that asks for rounds, and what it is told where it leaves something out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from samples.parallel_world import World
from samples.script_connected import script
from samples.script_loops import build
from samples.script_run import PATIENCE_S, ScriptRun

import atoll
from atoll.cluster.messages import Failed, Trained
from atoll.cluster.script.messages import SOCKET_VARIABLE
from atoll.wire.errors import LocalError

ROUNDS = {"kind": "rounds", "min": 1}
Start = Callable[..., "Future[list[Any]]"]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World(2) as world:
        yield world


@pytest.fixture
def start(world: World) -> Iterator[Start]:
    with ThreadPoolExecutor(1) as pool:
        yield lambda size, run, *args: pool.submit(world.run, script, size, run.socket, run.script, *args)


@pytest.mark.parametrize("size", [1, 2])
def test_rounds_come_and_end_with_the_run(tmp_path: Path, start: Start, size: int) -> None:
    with ScriptRun(tmp_path, build, schedule=ROUNDS).served() as run:
        ran = start(size, run, 10)
        assert run.begin().max_weight == 10 * size
        for number in (1, 3):
            run.ask(run.train(number))
            trained = run.answer(Trained)
            assert (trained.weight, trained.metrics) == (3 * size, {"loss": (6.0 * size, 3.0 * size)})
            for difference in run.difference(number).values():
                torch.testing.assert_close(difference, torch.full_like(difference, number))
        run.end()
        assert ran.result(PATIENCE_S) == [["run-1", "north", {"lr": 0.1}, {"path": "there"}, 1, 3]] * size


def test_work_in_steps_says_how_many_examples_there_are(tmp_path: Path, start: Start) -> None:
    work = {"steps": 5, "batch_size": 4}
    with ScriptRun(tmp_path, build, schedule=ROUNDS, work=work).served() as run:
        ran = start(2, run, None)
        assert run.begin().max_weight == 20
        run.end()
        ran.result(PATIENCE_S)


@pytest.mark.parametrize(
    ("strategy", "told"),
    [
        ({"schedule": ROUNDS}, "max_examples is missing: say in rounds(max_examples=...)"),
        (
            {},
            "strategy.schedule.kind = 'every_steps': this schedule counts the steps, so the script joins by atoll.join",
        ),
    ],
)
def test_what_cannot_be_promised_is_refused_on_both_ends(
    tmp_path: Path, start: Start, strategy: dict[str, Any], told: str
) -> None:
    with ScriptRun(tmp_path, build, **strategy).served() as run:
        ran = start(1, run, None)
        run.ask(run.prepare)
        assert told in str(run.answer(Failed).to_error())
        with pytest.raises(AssertionError, match="ConfigError"):
            ran.result(PATIENCE_S)


@pytest.mark.parametrize("left_out", ["load", "report"])
def test_a_round_that_is_not_done_is_told(tmp_path: Path, start: Start, left_out: str) -> None:
    with ScriptRun(tmp_path, build, schedule=ROUNDS).served() as run:
        ran = start(1, run, 10, left_out)
        run.begin()
        run.ask(run.train(1))
        failed = run.answer(Failed)
        assert failed.key == "r1#1"
        assert f"round 1 ended without round.{left_out}(" in str(failed.to_error())
        with pytest.raises(AssertionError, match="AppFailed"):
            ran.result(PATIENCE_S)


def test_connect_needs_an_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SOCKET_VARIABLE, raising=False)
    with pytest.raises(LocalError, match="start it by `atoll site exec RUN"):
        atoll.connect()
