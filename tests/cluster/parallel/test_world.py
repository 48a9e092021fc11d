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
from samples.bench import Bench, MakeBench

from atoll.cluster.run_session import RunSession
from atoll.cluster.sessions import open_session
from atoll.cluster.worker_process import WorkerDied, WorkerProcess
from atoll.wire.errors import AppFailed, BadUpdate, ConfigError
from atoll.wire.job import parse_job

DDP = {"dp_replicate": 2, "timeouts": {"start": 120, "collective": 60}}
FSDP = {"dp_shard": 2, "timeouts": {"start": 120, "collective": 60}}


@pytest_asyncio.fixture
async def worker(tmp_path: Path, installed: Path) -> AsyncIterator[WorkerProcess]:
    """A worker that has started, and leaves no process behind."""
    found = new_worker(tmp_path / "worker", installed)
    await found.start()
    yield found
    below = family(found)
    await found.close()
    assert await gone(below)


async def test_a_world_does_what_a_worker_does_and_ends_with_a_rank_that_dies(
    worker: WorkerProcess, make_bench: MakeBench
) -> None:
    bench = make_bench(work={"epochs": 2, "batch_size": 7})
    prepared = await worker.prepare(bench.prepare("north", parallel=DDP))
    assert (prepared.max_weight, prepared.device) == (40, "cpu")
    below = family(worker)
    assert len(below) == 3  # the launcher and two ranks
    progress: list[tuple[int, int]] = []
    trained = await worker.train(bench.train("update"), lambda done, total: progress.append((done, total)))
    assert (trained.weight, progress[-1]) == (40, (12, 12))
    assert trained.num_bytes == prepared.update_bytes == len(bench.update("update"))
    assert (await worker.evaluate(bench.evaluate())).metrics["accuracy"][1] == 20

    # A task that is given up ends on both, and the world stays for the next.
    long = asyncio.create_task(worker.train(bench.train("given-up")))
    await asyncio.sleep(0)
    long.cancel()
    await asyncio.wait({long})
    again = await worker.train(bench.train("again"))
    assert again.crc32 == trained.crc32
    assert bench.update("again") == bench.update("update")
    assert family(worker) == below

    assert trained.num_values > 0
    await require_masked_as_alone(worker, bench)
    assert family(worker) == below

    os.kill(ranks_of(below)[1], signal.SIGKILL)
    with pytest.raises(WorkerDied):
        await worker.train(bench.train("another"))
    assert await gone(below)


@pytest.mark.chaos
async def test_the_next_worker_goes_on_with_the_same_bytes(
    worker: WorkerProcess, make_bench: MakeBench, installed: Path, tmp_path: Path
) -> None:
    bench = make_bench(work={"steps": 20, "batch_size": 7})
    await worker.prepare(bench.prepare("north", parallel=DDP))
    await worker.train(bench.train("whole"))
    other = new_worker(tmp_path / "other", installed)
    await other.start()
    await other.prepare(bench.prepare("north", parallel=DDP))
    os.kill(ranks_of(family(other))[0], signal.SIGKILL)
    with pytest.raises(WorkerDied):
        await other.train(bench.train("update"))
    await other.start()
    await other.prepare(bench.prepare("north", parallel=DDP))
    await other.train(bench.train("update"))
    await other.close()
    assert bench.update("update") == bench.update("whole")


@pytest.mark.chaos
async def test_what_all_find_wrong_costs_no_world(worker: WorkerProcess, make_bench: MakeBench) -> None:
    bench = make_bench(app={"fault": "nan"})
    await worker.prepare(bench.prepare("north", parallel=DDP))
    ranks = family(worker)
    with pytest.raises(BadUpdate, match="loss"):
        await worker.train(bench.train("update"))
    assert family(worker) == ranks


@pytest.mark.chaos
async def test_one_rank_that_fails_in_a_step_declines_for_all_and_the_world_starts_anew(
    worker: WorkerProcess, make_bench: MakeBench
) -> None:
    bench = make_bench(app={"fault": "one_rank"}, work={"steps": 3, "batch_size": 7})
    await worker.prepare(bench.prepare("north", parallel=DDP))
    first = family(worker)
    with pytest.raises(AppFailed, match="rank 1"):
        await worker.train(bench.train("update"))
    assert await gone(first)
    with pytest.raises(AppFailed, match="rank 1"):
        await worker.train(bench.train("update", round=2))


@pytest.mark.chaos
async def test_a_killed_worker_leaves_no_process(make_bench: MakeBench, installed: Path, tmp_path: Path) -> None:
    bench = make_bench()
    worker = new_worker(tmp_path / "worker", installed)
    await worker.start()
    await worker.prepare(bench.prepare("north", parallel=DDP))
    below = family(worker)
    worker.kill()
    assert await gone(below)
    await worker.close()


async def test_numbers_that_do_not_fit_are_refused_before_a_process_starts(
    make_bench: MakeBench, installed: Path
) -> None:
    bench = make_bench()
    with pytest.raises(ConfigError, match="does not make 3 processes"):
        open_session(bench.prepare("north", parallel={**DDP, "processes": 3}))
    many = parse_job({**bench.job.model_dump(mode="json", exclude_none=True), "parallel": {"dp_replicate": 4096}})
    with pytest.raises(ConfigError, match="the job asks for 4096 processes and this machine has"):
        open_session(bench.prepare("north", job=many.canonical().decode()))


def new_worker(folder: Path, installed: Path) -> WorkerProcess:
    path = os.pathsep.join([str(installed), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    return WorkerProcess(folder, env={"PYTHONPATH": path})


def family(worker: WorkerProcess) -> list[int]:
    """Processes below a worker that lives."""
    if worker.pid is None:
        return []
    return [process.pid for process in psutil.Process(worker.pid).children(recursive=True)]


def ranks_of(pids: list[int]) -> list[int]:
    return [pid for pid in pids if "atoll.cluster.parallel.rank" in psutil.Process(pid).cmdline()]


async def gone(pids: list[int], within_s: float = 15.0) -> bool:
    for _ in range(int(within_s / 0.1)):
        if not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids):
            return True
        await asyncio.sleep(0.1)
    return False


async def require_masked_as_alone(worker: WorkerProcess, bench: Bench) -> None:
    """The masked input of a session is that of the same update at a site of one process."""
    masked = await worker.mask(bench.mask())
    session = open_session(bench.prepare("north"))
    assert isinstance(session, RunSession)
    alone = session.mask(bench.mask("alone"), lambda done, total: None)
    assert (masked.sha256_hex, masked.crc32) == (alone.sha256_hex, alone.crc32)
    assert bench.update("masked") == bench.update("alone")


@pytest.mark.chaos
async def test_sharded_ranks_send_the_masked_bytes_of_one_process(worker: WorkerProcess, make_bench: MakeBench) -> None:
    bench = make_bench(work={"epochs": 1, "batch_size": 7})
    await worker.prepare(bench.prepare("north", parallel=FSDP))
    await worker.train(bench.train("update"))
    await require_masked_as_alone(worker, bench)
