"""A real worker with a world of its own, over its socket: the launcher, the ranks, and what becomes of them."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
from samples.bench import MakeBench

from atoll.cluster.worker_process import WorkerDied, WorkerProcess
from atoll.wire.errors import AppFailed, BadUpdate, ConfigError

DDP = {"dp_replicate": 2, "timeouts": {"start": 120, "collective": 60}}
in_one_loop = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def worker(tmp_path_factory: pytest.TempPathFactory, installed: Path) -> AsyncIterator[WorkerProcess]:
    """One worker for all tests that leave it alive; its world starts with each run that is prepared."""
    path = os.pathsep.join([str(installed), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    found = WorkerProcess(tmp_path_factory.mktemp("worker"), env={"PYTHONPATH": path})
    await found.start()
    yield found
    below = family(found)
    await found.close()
    assert await gone(below)


@in_one_loop
async def test_a_world_does_what_a_worker_does(worker: WorkerProcess, make_bench: MakeBench) -> None:
    bench = make_bench(work={"epochs": 2, "batch_size": 7})
    prepared = await worker.prepare(bench.prepare("north", parallel=DDP))
    assert (prepared.max_weight, prepared.device) == (40, "cpu")
    assert len(family(worker)) == 3  # the launcher and two ranks
    progress: list[tuple[int, int]] = []
    trained = await worker.train(bench.train("update"), lambda done, total: progress.append((done, total)))
    assert (trained.weight, progress[-1]) == (40, (12, 12))
    assert trained.num_bytes == prepared.update_bytes == len(bench.update("update"))
    assert (await worker.evaluate(bench.evaluate())).metrics["accuracy"][1] == 20

    # A task that is given up ends on both, and the world stays for the next.
    ranks = family(worker)
    long = asyncio.create_task(worker.train(bench.train("given-up", config={})))
    await asyncio.sleep(0)
    long.cancel()
    await asyncio.wait({long})
    again = await worker.train(bench.train("again"))
    assert again.crc32 == trained.crc32
    assert bench.update("again") == bench.update("update")
    assert family(worker) == ranks


@in_one_loop
async def test_what_all_find_wrong_costs_no_world(worker: WorkerProcess, make_bench: MakeBench) -> None:
    bench = make_bench(app={"fault": "nan"})
    await worker.prepare(bench.prepare("north", parallel=DDP))
    ranks = family(worker)
    with pytest.raises(BadUpdate, match="loss"):
        await worker.train(bench.train("update"))
    assert family(worker) == ranks
    with pytest.raises(ConfigError, match="does not make 3 processes"):
        await worker.prepare(bench.prepare("north", parallel={**DDP, "processes": 3}))


async def test_a_rank_that_dies_ends_the_worker_and_the_next_goes_on(
    make_bench: MakeBench, installed: Path, tmp_path: Path
) -> None:
    path = os.pathsep.join([str(installed), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    bench = make_bench(work={"steps": 20, "batch_size": 7})
    updates = []
    for fate in ("killed", "whole"):
        worker = WorkerProcess(tmp_path / fate, env={"PYTHONPATH": path})
        await worker.start()
        try:
            await worker.prepare(bench.prepare("north", parallel=DDP))
            below = family(worker)
            if fate == "killed":
                os.kill(ranks_of(below)[1], signal.SIGKILL)
                with pytest.raises(WorkerDied):
                    await worker.train(bench.train("update"))
                assert await gone(below)
            else:
                await worker.train(bench.train("update"))
                updates.append(bench.update("update"))
        finally:
            await worker.close()
    assert len(updates[0]) > 64


@pytest.mark.chaos
async def test_one_rank_that_fails_in_a_step_declines_for_all_and_the_world_starts_anew(
    make_bench: MakeBench, installed: Path, tmp_path: Path
) -> None:
    path = os.pathsep.join([str(installed), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    bench = make_bench(app={"fault": "one_rank"}, work={"steps": 3, "batch_size": 7})
    worker = WorkerProcess(tmp_path / "worker", env={"PYTHONPATH": path})
    await worker.start()
    try:
        await worker.prepare(bench.prepare("north", parallel=DDP))
        first = family(worker)
        with pytest.raises(AppFailed, match="rank 1"):
            await worker.train(bench.train("update"))
        assert await gone(first)
        with pytest.raises(AppFailed, match="rank 1"):
            await worker.train(bench.train("update", round=2))
    finally:
        await worker.close()


@pytest.mark.chaos
async def test_a_killed_worker_leaves_no_process(make_bench: MakeBench, installed: Path, tmp_path: Path) -> None:
    path = os.pathsep.join([str(installed), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    bench = make_bench()
    worker = WorkerProcess(tmp_path / "worker", env={"PYTHONPATH": path})
    await worker.start()
    await worker.prepare(bench.prepare("north", parallel=DDP))
    below = family(worker)
    worker.kill()
    assert await gone(below)
    await worker.close()


def family(worker: WorkerProcess) -> list[int]:
    """Processes below a worker."""
    assert worker.pid is not None
    return [process.pid for process in psutil.Process(worker.pid).children(recursive=True)]


def ranks_of(pids: list[int]) -> list[int]:
    return [pid for pid in pids if "atoll.cluster.parallel.rank" in psutil.Process(pid).cmdline()]


async def gone(pids: list[int], within_s: float = 15.0) -> bool:
    for _ in range(int(within_s / 0.1)):
        if not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids):
            return True
        await asyncio.sleep(0.1)
    return False
