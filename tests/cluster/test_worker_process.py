"""A real worker over its socket: what it answers, what it survives, and that it never outlives its agent."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import zlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from samples.bench import MakeBench
from samples.dying_agent import pids_left_by_a_killed_agent

from atoll.cluster.worker_process import WorkerDied, WorkerProcess
from atoll.wire.errors import AppFailed, BadUpdate, ConfigError, DeviceMissing, NotAllowed

in_one_loop = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def worker(tmp_path_factory: pytest.TempPathFactory, installed: Path) -> AsyncIterator[WorkerProcess]:
    """One worker for most tests, since starting torch takes seconds: a worker survives all that they do to it."""
    path = os.pathsep.join([str(installed), *(p for p in sys.path if p)])
    found = WorkerProcess(tmp_path_factory.mktemp("worker"), env={"PYTHONPATH": path})
    await found.start()
    yield found
    pid = found.pid
    await found.close()
    assert pid is not None
    assert found.pid is None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@in_one_loop
async def test_prepares_trains_and_evaluates(worker: WorkerProcess, make_bench: MakeBench) -> None:
    bench = make_bench()
    prepared = await worker.prepare(bench.prepare("north"))
    assert (prepared.max_weight, prepared.device) == (40, "cpu")
    progress: list[tuple[int, int]] = []
    trained = await worker.train(bench.train("update"), lambda done, total: progress.append((done, total)))
    assert progress[-1] == (10, 10)
    assert trained.weight == 40
    assert trained.num_bytes == prepared.update_bytes == len(bench.update("update"))
    assert trained.crc32 == zlib.crc32(bench.update("update"))
    assert trained.metrics["loss"][1] == 80
    evaluated = await worker.evaluate(bench.evaluate())
    assert evaluated.metrics.keys() == {"accuracy", "loss"}
    assert evaluated.metrics["accuracy"][1] == 20


@in_one_loop
async def test_what_the_app_raises_comes_back_and_the_worker_lives(
    worker: WorkerProcess, make_bench: MakeBench
) -> None:
    bench = make_bench(app={"fault": "raise"})
    await worker.prepare(bench.prepare("north"))
    with pytest.raises(
        AppFailed,
        match=r"is broken; look at the data there, or correct the app, .* new version at .*\n  at probe_app:\d+ in loss",
    ) as e:
        await worker.train(bench.train("update", round=2))
    assert (e.value.site, e.value.run, e.value.round) == ("north", "run-1", 2)
    assert not (bench.folder / "update").exists()
    bench = make_bench(app={"fault": "exit"})
    await worker.prepare(bench.prepare("north"))
    with pytest.raises(AppFailed, match="SystemExit"):
        await worker.train(bench.train("update"))
    bench = make_bench(app={"fault": "nan"})
    await worker.prepare(bench.prepare("north"))
    with pytest.raises(BadUpdate, match="loss"):
        await worker.train(bench.train("update"))


@in_one_loop
async def test_refuses_what_it_cannot_prepare(worker: WorkerProcess, make_bench: MakeBench) -> None:
    bench = make_bench()
    with pytest.raises(NotAllowed, match="another hash"):
        await worker.prepare(bench.prepare("north", app_hash="0" * 64))
    with pytest.raises(DeviceMissing, match="cuda:77"):
        await worker.prepare(bench.prepare("north", device="cuda:77"))
    with pytest.raises(ConfigError, match="did you mean 'lr'"):
        await worker.prepare(
            bench.prepare("north", job=bench.job.canonical().decode().replace('"app":{}', '"app":{"rl":1}'))
        )
    with pytest.raises(AppFailed, match="FileNotFoundError"):
        await worker.prepare(bench.prepare("north", data={"path": "/nowhere.npz"}))


@in_one_loop
async def test_a_cancelled_training_ends_and_the_next_one_runs(worker: WorkerProcess, make_bench: MakeBench) -> None:
    bench = make_bench(work={"steps": 5_000_000})
    await worker.prepare(bench.prepare("north"))
    begun = asyncio.Event()
    training = asyncio.ensure_future(worker.train(bench.train("long"), lambda *_: begun.set()))
    await asyncio.wait_for(begun.wait(), 60)
    training.cancel()
    with pytest.raises(asyncio.CancelledError):
        await training
    trained = await asyncio.wait_for(worker.train(bench.train("short", config={"steps": 3})), 60)
    assert trained.weight == 32 + 8 + 32  # the 40 examples of one pass, then the next begins
    assert not (bench.folder / "long").exists()


@in_one_loop
async def test_a_killed_worker_started_again_writes_the_same_bytes(
    worker: WorkerProcess, make_bench: MakeBench, tmp_path: Path
) -> None:
    bench = make_bench(app={"dropout": 0.5, "momentum": 0.9}, entry_point="keeping", codec={"kind": "int8"})
    await worker.prepare(bench.prepare("north"))
    for round in (1, 2):
        await worker.train(bench.train(f"kept-{round}", round=round))

    other = WorkerProcess(tmp_path / "other", env=bench.environment)
    await other.start()
    state = {"state_folder": str(tmp_path / "state")}
    await other.prepare(bench.prepare("north", **state))
    await other.train(bench.train("killed-1", round=1))
    training = asyncio.ensure_future(other.train(bench.train("lost", round=2, config={"epochs": 2})))
    await asyncio.sleep(0)
    other.kill()
    with pytest.raises(WorkerDied, match="signal 9") as died:
        await training
    assert died.value.returncode == -signal.SIGKILL
    with pytest.raises(WorkerDied):
        await other.evaluate(bench.evaluate())
    await other.close()

    again = WorkerProcess(tmp_path / "again", env=bench.environment)
    await again.start()
    await again.prepare(bench.prepare("north", **state))
    await again.train(bench.train("killed-2", round=2))
    await again.close()
    assert bench.update("killed-1") == bench.update("kept-1")
    assert bench.update("killed-2") == bench.update("kept-2")


@in_one_loop
async def test_dies_with_its_agent_in_the_middle_of_a_training(make_bench: MakeBench, tmp_path: Path) -> None:
    bench = make_bench(work={"steps": 5_000_000})
    [pid] = await pids_left_by_a_killed_agent(bench, tmp_path, "direct")
    assert await _ends(pid, within_s=30)


@in_one_loop
async def test_a_worker_that_cannot_start_says_why(tmp_path: Path) -> None:
    worker = WorkerProcess(tmp_path / "w", env={"PYTHONHOME": "/nowhere"})
    with pytest.raises(WorkerDied, match=r"ended during start \(exit code 1\)") as died:
        await worker.start()
    assert "No module named" in died.value.log_tail
    assert "No module named" not in str(died.value)


def test_passes_on_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOLL_SERVER_PASSWORD", "s3cret")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s3cret")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    passed = WorkerProcess(tmp_path, env={"TZ": "UTC"}).environment()
    assert "s3cret" not in passed.values()
    assert (passed["OMP_NUM_THREADS"], passed["TZ"]) == ("1", "UTC")


async def _ends(pid: int, *, within_s: float) -> bool:
    """Whether a process that is not ours ends in time."""
    for _ in range(int(within_s / 0.05)):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        await asyncio.sleep(0.05)
    return False
