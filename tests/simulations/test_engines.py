"""Engines: the same bytes whoever does the work, killed processes are made up for, and none is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from samples.simulated import KEEPING, Points, Remembering, points_job
from torch import Tensor

import atoll
from atoll.simulations import engine_choice
from atoll.simulations.clock import Speeds
from atoll.simulations.dropouts import Dropouts
from atoll.simulations.engine import Kind
from atoll.simulations.results import Result
from atoll.wire.errors import ConfigError, LocalError

SITES = 6


class Doomed(Points):
    """The same; a process that is to train ends as `source` says, as often as it says."""

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        if torch.is_grad_enabled() and os.getpid() != self.source["parent"]:
            for number in range(self.source["deaths"]):
                try:
                    (Path(self.source["folder"]) / str(number)).touch(exist_ok=False)
                except FileExistsError:
                    continue
                os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(output, batch)


class Hungry(Points):
    """The same, with more memory than there is."""

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        if torch.is_grad_enabled():
            torch.empty(1 << 60)
        return super().loss(output, batch)


def run(engine: Kind, job: dict[str, Any] | None = None, **options: Any) -> Result:
    return atoll.simulate(
        job or points_job(rounds=4), engine=engine, **{"app": Points, "sites": SITES, "source": {}, **options}
    )


def told(result: Result) -> list[dict[str, Any]]:
    """All that rounds say but how long they took here."""
    return [{**entry.record(), "wall_s": None} for entry in result.rounds]


@pytest.fixture(autouse=True)
def others() -> None:
    """Children that tests of other modules have left to this process."""
    OTHERS.clear()
    OTHERS.update(children())


def children() -> set[int]:
    """Those that the test has started."""
    found = {int(pid) for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()}
    return found - OTHERS


OTHERS: set[int] = set()
QUORUM = {"kind": "rounds", "min": SITES, "quorum": 2, "deadline": "40s"}
UNEVEN = Speeds(step_s=1.0, spread=1.5, seed=3)  # some of the sites come too late, others drop out
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **KEEPING,
    "fragments": ({"schedule": {"kind": "every_steps", "steps": 4, "min": SITES, "fragments": 2}}, {}),
    "download": ({"codec": {"kind": "int8"}, "download": {"kind": "bfloat16"}}, {}),
    "late-scaffold": ({"kind": "scaffold", "schedule": QUORUM}, {"speeds": UNEVEN, "dropouts": Dropouts(share=0.2)}),
    "late-feedback": (
        {"codec": {"kind": "top_k", "fraction": 0.1}, "schedule": QUORUM},
        {"speeds": UNEVEN, "app": Remembering, "dropouts": Dropouts(share=0.2)},
    ),
    "buffered": (
        {"kind": "fedbuff", "schedule": {"kind": "buffered", "k": 2, "min": SITES}},
        {"speeds": UNEVEN, "app": Remembering},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_processes_give_the_bytes_of_one(name: str) -> None:
    strategy, options = CASES[name]
    if "steps" in strategy.get("schedule", {}):
        strategy = {**strategy, "work": {"batch_size": 8}}
    job: dict[str, Any] = points_job(rounds=4, **strategy) | {
        "evaluation": {"sites": True, "server": "local" not in strategy}
    }
    if name == "difference":
        job["job"]["sites"] = [f"site-{number}" for number in range(1, SITES + 1)]
    one, several = run("sequential", job, **options), run("processes", job, processes=3, **options)
    assert (one.status, one.reason) == ("finished", "")
    assert (one.engine, several.engine) == ("sequential", "processes (3)")
    assert one.model_bytes == several.model_bytes
    assert told(one) == told(several)
    if name.startswith("late"):
        assert any("dropped out" in reason for entry in one.rounds for reason in entry.missing.values())
        assert any("dropped out" not in reason for entry in one.rounds for reason in entry.missing.values())


def test_an_app_that_raises_in_a_process_is_lost_there() -> None:
    sources: dict[str, dict[str, Any]] = {f"site-{n}": {} for n in range(1, SITES + 1)}
    sources["site-2"] = {"fault": "raise"}
    job = points_job(schedule={"kind": "rounds", "min": SITES, "quorum": 5})
    one, several = (run(engine, job, sites=sources) for engine in ("sequential", "processes"))
    assert told(one) == told(several)
    assert "this batch cannot be learnt" in several.rounds[0].missing["site-2"]


@pytest.mark.parametrize("strategy", [{}, {"kind": "scaffold"}], ids=["fedavg", "scaffold"])
def test_a_process_that_is_killed_is_replaced_and_the_result_is_the_same(
    tmp_path: Path, strategy: dict[str, Any]
) -> None:
    source = {"parent": os.getpid(), "folder": str(tmp_path), "deaths": 2}
    job = points_job(rounds=3, **strategy)
    killed = run("processes", job, app=Doomed, source=source, processes=2)
    assert len(list(tmp_path.iterdir())) == 2
    assert killed.model_bytes == run("sequential", job).model_bytes
    assert not children()


def test_a_task_that_kills_every_process_ends_the_run_and_names_the_setting(tmp_path: Path) -> None:
    source = {"parent": os.getpid(), "folder": str(tmp_path), "deaths": 100}
    with pytest.raises(LocalError, match=r"train at site-\d in round 1 was killed by signal 9, 3 times.*--processes"):
        run("processes", app=Doomed, source=source, processes=1)
    assert not children()


@pytest.mark.parametrize("engine", ["sequential", "processes"])
def test_memory_that_runs_out_names_the_settings(engine: Kind) -> None:
    with pytest.raises(
        LocalError, match=r"memory ran out while site-1 was to train in round 1.*--processes.*batch_size"
    ):
        run(engine, app=Hungry)
    assert not children()


def test_an_interruption_ends_the_processes_and_leaves_what_was_committed(tmp_path: Path) -> None:
    def interrupt(entry: Any) -> None:
        if entry.round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run("processes", on_round=interrupt, out=tmp_path)
    assert not children()
    assert len((tmp_path / "rounds.jsonl").read_text().splitlines()) == 2
    assert (tmp_path / "model.safetensors").exists()


SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
import atoll
from samples.simulated import Points, points_job

def say(entry):
    print("committed", flush=True)

atoll.simulate(points_job(rounds=1_000_000), app=Points, sites=6, source={}, engine="processes", processes=2, on_round=say)
"""


def test_no_process_outlives_a_simulation_that_is_killed() -> None:
    tests = Path(__file__).parents[1]
    command = [sys.executable, "-c", SCRIPT, str(tests)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as simulation:
        assert simulation.stdout is not None
        assert simulation.stdout.readline() == "committed\n"
        paths = Path(f"/proc/{simulation.pid}/task").glob("*/children")
        workers = [int(pid) for path in paths for pid in path.read_text().split()]
        simulation.kill()
    assert len(workers) == 2
    deadline_s = time.monotonic() + 10
    while any(_lives(pid) for pid in workers) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not any(_lives(pid) for pid in workers)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_choice_is_measured_and_may_go_either_way(monkeypatch: pytest.MonkeyPatch) -> None:
    job = points_job(rounds=6, kind="scaffold")
    expected = run("sequential", job)
    monkeypatch.setattr(engine_choice, "MEASURE_S", 0.0)
    monkeypatch.setattr(engine_choice, "num_cores", lambda: 2)
    names: set[str] = set()
    for slow in ("sequential", "processes"):
        calls: list[str] = []
        monkeypatch.setattr(engine_choice, "monotonic", _clock(calls, slow))
        measured = run("auto", job)
        assert measured.model_bytes == expected.model_bytes
        names.add(measured.engine)
    assert names == {"sequential", "processes (2)"}
    assert not children()


def _clock(calls: list[str], slow: str) -> Any:
    """Time that passes faster while the engine that is to be the slow one is measured."""
    now = 0.0

    def monotonic() -> float:
        nonlocal now
        calls.append("")
        first = len(calls) <= engine_choice.MEASURE_TASKS + 1
        now += 2.0 if first == (slow == "sequential") else 1.0
        return now

    return monotonic


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"engine": "steam"}, "engine"),
        ({"engine": "processes", "processes": 0}, "processes"),
        ({"engine": "sequential", "processes": 2}, "processes"),
        (
            {"engine": "processes", "job": points_job() | {"training": {"threads": 2, "device": "cpu"}}},
            "training.threads",
        ),
    ],
)
def test_an_engine_that_cannot_be_is_named(options: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run(**options)
    assert caught.value.key == key


def test_more_threads_than_one_are_done_without_processes() -> None:
    job = points_job() | {"training": {"threads": 2, "device": "cpu"}}
    assert run("auto", job).engine == "sequential"
