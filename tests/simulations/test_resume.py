"""A run that was interrupted goes on, and ends as if nothing had been."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from samples.simulated import KEEPING, Points, Remembering, points_job

import atoll
from atoll.simulations.clock import Speeds
from atoll.simulations.devices import Network
from atoll.simulations.dropouts import Dropouts
from atoll.simulations.engine import Kind
from atoll.simulations.keeping import folder_of
from atoll.simulations.results import Result, RoundResult
from atoll.wire.errors import ConfigError, DiskFull, LocalError

SITES, ROUNDS, STOPPED = 6, 6, 3
SERVER_STATE = {"kind": "fedadam", "optimizer": {"kind": "adam", "lr": 0.1}}
GROUPS = {"schedule": {"kind": "hierarchical", "label": "region", "groups": ["north", "south"], "rounds": 2}}
QUORUM = {"kind": "rounds", "min": SITES, "quorum": 2, "deadline": "40s"}
UNEVEN: dict[str, Any] = {  # some of the sites come too late, others drop out
    "speeds": Speeds(step_s=1.0, spread=1.5, seed=3),
    "dropouts": Dropouts(share=0.2),
    "network": Network(up_mbit_s=1.0, down_mbit_s=5.0),
}


STRATEGIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **KEEPING,
    "fragments": (
        {
            "schedule": {"kind": "every_steps", "steps": 4, "min": SITES, "fragments": 2},
            "work": {"batch_size": 8},
        },
        {},
    ),
    "download": ({"codec": {"kind": "int8"}, "download": {"kind": "bfloat16"}}, {}),
    "late-scaffold": ({"kind": "scaffold", "schedule": QUORUM}, UNEVEN),
    "late-feedback": (
        {"codec": {"kind": "top_k", "fraction": 0.1}, "schedule": QUORUM},
        {**UNEVEN, "app": Remembering},
    ),
    "fedadam": (SERVER_STATE, {}),
    "groups": (GROUPS, {"labels": {f"site-{n}": {"region": ("north", "south")[n % 2]} for n in range(1, SITES + 1)}}),
}
FEW = ("fedadam", "error-feedback", "late-scaffold")  # with each engine


def run(strategy: dict[str, Any], **options: Any) -> Result:
    job = points_job(rounds=ROUNDS, **strategy)
    if strategy.get("kind") == "ef21":  # for named sites that all take part
        job["job"]["sites"] = [f"site-{number}" for number in range(1, SITES + 1)]
    return atoll.simulate(job, **{"app": Points, "sites": SITES, "source": {}, "engine": "sequential", **options})


def interrupt(out: Path, strategy: dict[str, Any], at: int = STOPPED, **options: Any) -> None:
    def stop(entry: RoundResult) -> None:
        if entry.round == at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(strategy, out=out, on_round=stop, **options)


def lines(out: Path, *but: str) -> list[dict[str, Any]]:
    """rounds.jsonl without the time of this machine."""
    found = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in ("wall_s", *but)} for line in found]


def require_equal(resumed: Result, folder: Path, strategy: dict[str, Any], **options: Any) -> None:
    undisturbed = run(strategy, out=folder / "undisturbed", **options)
    assert (undisturbed.status, resumed.status) == ("finished", "finished")
    assert resumed.model_bytes == undisturbed.model_bytes
    assert (folder / "out" / "model.safetensors").read_bytes() == (
        folder / "undisturbed" / "model.safetensors"
    ).read_bytes()
    assert lines(folder / "out") == lines(folder / "undisturbed")
    assert [entry.round for entry in resumed.rounds] == list(range(1, ROUNDS + 1))
    assert resumed.simulated_s == undisturbed.simulated_s
    assert not folder_of(folder / "out").exists()  # it is over


@pytest.mark.parametrize(
    ("name", "engine"),
    [(name, "sequential") for name in STRATEGIES] + [(name, "processes") for name in FEW],
)
def test_an_interrupted_run_ends_like_an_undisturbed_one(name: str, engine: Kind, tmp_path: Path) -> None:
    strategy, options = STRATEGIES[name]
    options = {**options, "engine": engine, "processes": 2 if engine == "processes" else None}
    interrupt(tmp_path / "out", strategy, **options)
    resumed = run(strategy, resume=tmp_path / "out", **options)
    require_equal(resumed, tmp_path, strategy, **{**options, "engine": "sequential", "processes": None})


def test_a_run_may_be_interrupted_again_and_again(tmp_path: Path) -> None:
    strategy: dict[str, Any] = {"kind": "scaffold"}
    interrupt(tmp_path / "out", strategy, at=1, app=Remembering)
    for at in (2, 3, 5):

        def stop(entry: RoundResult, at: int = at) -> None:
            if entry.round == at:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run(strategy, resume=tmp_path / "out", app=Remembering, on_round=stop)
    resumed = run(strategy, resume=tmp_path / "out", app=Remembering)
    require_equal(resumed, tmp_path, strategy, app=Remembering)


def test_what_was_written_after_the_last_commit_is_cut_off(tmp_path: Path) -> None:
    out = tmp_path / "out"
    strategy: dict[str, Any] = {"kind": "scaffold"}
    interrupt(out, strategy)
    for path in (out / "rounds.jsonl", folder_of(out) / "events.jsonl"):
        path.write_bytes(path.read_bytes() + b'{"half a line')
    require_equal(run(strategy, resume=out), tmp_path, strategy)


def test_a_full_disk_leaves_a_run_that_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, replace = tmp_path / "out", os.replace
    names: list[str] = []

    def full(source: Any, target: Any) -> None:
        names.append(Path(target).name)
        if names[-1] == "standing.json" and names.count("standing.json") == STOPPED:
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(source, target)

    with monkeypatch.context() as patched:
        patched.setattr("atoll.simulations.keeping.os.replace", full)
        with pytest.raises(DiskFull, match=r"standing\.json: no room on the disk"):
            run(SERVER_STATE, out=out)
    require_equal(run(SERVER_STATE, resume=out), tmp_path, SERVER_STATE)


@pytest.mark.parametrize("name", ["standing.json", "options.json", "events.jsonl", "3.safetensors", "../rounds.jsonl"])
def test_a_damaged_file_is_an_error_that_says_so(name: str, tmp_path: Path) -> None:
    interrupt(tmp_path / "out", {})
    path = folder_of(tmp_path / "out") / name
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(data)
    with pytest.raises(LocalError, match=rf"{path.name}: is damaged, so the run cannot go on: .*; begin it anew"):
        run({}, resume=tmp_path / "out")
    path.unlink()
    with pytest.raises((LocalError, ConfigError), match=r"is damaged|has no interrupted run"):
        run({}, resume=tmp_path / "out")


@pytest.mark.parametrize(
    ("strategy", "options", "key", "old", "new"),
    [
        ({"work": {"epochs": 1, "batch_size": 4}}, {}, "strategy.work.batch_size", "8", "4"),
        ({}, {"sites": 7}, "sites", "'site-6']", "'site-7']"),
        ({}, {"dropouts": Dropouts(share=0.5)}, "dropout (dropouts)", "share=0.0", "share=0.5"),
        ({}, {"source": {"num_train": 60}}, "data (source)", "{}", "{'num_train': 60}"),
        ({}, {"rounding_seed": 1}, "rounding_seed", "0", "1"),
        ({}, {"app": Remembering}, "app (class)", "Points", "Remembering"),
    ],
)
def test_another_option_is_refused_by_name_with_both_values(
    strategy: dict[str, Any], options: dict[str, Any], key: str, old: str, new: str, tmp_path: Path
) -> None:
    interrupt(tmp_path / "out", {})
    with pytest.raises(ConfigError) as caught:
        run(strategy, resume=tmp_path / "out", **options)
    assert caught.value.key == key
    assert old in str(caught.value.bound)
    assert new in str(caught.value.value)
    assert f"{key} is {caught.value.value}, and the interrupted run had {caught.value.bound}" in str(caught.value)


@pytest.mark.parametrize(
    ("job", "key"),
    [
        (points_job(kind="fedbuff", schedule={"kind": "buffered", "k": 2, "min": SITES}), "strategy.schedule"),
        ({**points_job(buffers="local"), "privacy": {"secure_aggregation": {}}}, "privacy.secure_aggregation"),
    ],
)
def test_what_cannot_go_on_is_refused_by_key_and_keeps_nothing(job: dict[str, Any], key: str, tmp_path: Path) -> None:
    def stop(entry: RoundResult) -> None:
        raise KeyboardInterrupt

    options: dict[str, Any] = {"app": Points, "sites": SITES, "source": {}, "engine": "sequential"}
    with pytest.raises(KeyboardInterrupt):
        atoll.simulate(job, out=tmp_path, on_round=stop, **options)
    assert not folder_of(tmp_path).exists()
    with pytest.raises(ConfigError, match=r"cannot go on after an interruption") as caught:
        atoll.simulate(job, resume=tmp_path, **options)
    assert caught.value.key == key


def test_a_run_that_ended_does_not_go_on(tmp_path: Path) -> None:
    run({}, out=tmp_path)
    with pytest.raises(ConfigError, match=r"has no interrupted run to go on with: it has ended"):
        run({}, resume=tmp_path)
    with pytest.raises(ConfigError, match=r"leave one of them out"):
        run({}, resume=tmp_path, out=tmp_path)


KILLED = """
import sys, atoll
from samples.simulated import Points, points_job
atoll.simulate(
    points_job(rounds=60, kind="scaffold", optimizer={"kind": "adam", "lr": 0.1}),
    app=Points, sites=6, source={}, engine=sys.argv[1], processes=2 if sys.argv[1] == "processes" else None,
    **{sys.argv[2]: sys.argv[3]},
)
"""


@pytest.mark.chaos
@pytest.mark.parametrize("engine", ["sequential", "processes"])
def test_a_run_that_is_killed_goes_on_with_the_same_bytes(engine: str, tmp_path: Path) -> None:
    draw, out = random.Random(engine), tmp_path / "out"
    paths = os.pathsep.join(filter(None, (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH"))))

    def command(option: str, folder: Path) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "PYTHONPATH": paths}
        return subprocess.Popen([sys.executable, "-c", KILLED, engine, option, str(folder)], env=environment)

    def num_rounds() -> int:
        return (out / "rounds.jsonl").read_bytes().count(b"\n") if (out / "rounds.jsonl").exists() else 0

    for option in ("out", *["resume"] * 4):
        before = num_rounds()
        process = command(option, out)
        while num_rounds() < before + 4:
            assert process.poll() is None
            time.sleep(0.001)
        time.sleep(draw.uniform(0.0, 0.05))
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        assert folder_of(out).exists()
    assert command("resume", out).wait() == 0
    assert command("out", tmp_path / "undisturbed").wait() == 0
    assert lines(out) == lines(tmp_path / "undisturbed")
    assert len(lines(out)) == 60
    models = [(folder / "model.safetensors").read_bytes() for folder in (out, tmp_path / "undisturbed")]
    assert models[0] == models[1]
