"""Real workers forked from a real nursery: like those that are started directly in all that an agent can see."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
from samples.bench import DISTRIBUTION, ENTRY_POINTS, MakeBench, install
from samples.dying_agent import pids_left_by_a_killed_agent

from atoll.cluster import nursery_process
from atoll.cluster.nursery_process import FORKS, ForkedProcess, Nursery
from atoll.cluster.registry import hash_distribution
from atoll.cluster.worker_process import WorkerDied, WorkerProcess
from atoll.wire.errors import AppFailed

pytestmark = pytest.mark.skipif(not FORKS, reason="workers are not forked on this system")
in_one_loop = pytest.mark.asyncio(loop_scope="module")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ward:
    """A nursery, and workers with the environment of its first one, which knows the tests' app."""

    nursery: Nursery
    environment: dict[str, str]
    folder: Path

    def worker(self, name: str, *, env: dict[str, str] | None = None, direct: bool = False) -> WorkerProcess:
        return WorkerProcess(
            self.folder / name, env=self.environment | (env or {}), nursery=None if direct else self.nursery
        )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ward(tmp_path_factory: pytest.TempPathFactory, installed: Path) -> AsyncIterator[Ward]:
    """One for most tests: a nursery survives all that happens to its workers, and is started again where it does not."""
    folder = tmp_path_factory.mktemp("ward")
    path = os.pathsep.join([str(installed), *(p for p in sys.path if p)])
    nursery = Nursery(folder / "nursery.log")
    yield Ward(nursery=nursery, environment={"PYTHONPATH": path}, folder=folder)
    await nursery.close()
    assert nursery.pid is None
    await nursery.close()


@in_one_loop
async def test_a_worker_is_a_child_of_the_nursery_and_leads_its_session(ward: Ward) -> None:
    worker = ward.worker("child")
    await worker.start()
    assert worker.pid is not None
    assert (parent(worker.pid), os.getsid(worker.pid)) == (ward.nursery.pid, worker.pid)
    assert descriptors(worker.pid) == ["/dev/null", str(worker.log_path), str(worker.log_path), "socket"]
    pid = worker.pid
    await worker.close()
    assert worker.pid is None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@in_one_loop
async def test_has_the_environment_that_was_asked_for_and_no_secrets(
    ward: Ward, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATOLL_SERVER_PASSWORD", "s3cret")
    worker = ward.worker("same")
    await worker.start()
    assert worker.pid is not None
    assert environment(worker.pid) == worker.environment()
    await worker.close()


@in_one_loop
async def test_who_wants_another_environment_or_python_is_started_directly(ward: Ward) -> None:
    await (first := ward.worker("first")).start()
    other = ward.worker("other", env={"OMP_NUM_THREADS": "7"})
    await other.start()
    assert other.pid is not None
    assert parent(other.pid) == os.getpid()
    assert environment(other.pid)["OMP_NUM_THREADS"] == "7"
    await other.close()
    await first.close()
    elsewhere = WorkerProcess(ward.folder / "elsewhere", python="/bin/false", nursery=ward.nursery)
    with pytest.raises(WorkerDied, match=r"ended during start \(exit code 1\)"):
        await elsewhere.start()


@in_one_loop
async def test_writes_the_bytes_of_a_worker_started_directly(ward: Ward, make_bench: MakeBench) -> None:
    bench = make_bench(app={"dropout": 0.5, "momentum": 0.9}, entry_point="keeping", codec={"kind": "int8"})
    for name, direct in (("direct", True), ("forked", False), ("forked-again", False)):
        worker = ward.worker(name, direct=direct)
        await worker.start()
        await worker.prepare(bench.prepare("north", state_folder=str(bench.folder / f"state-{name}")))
        for round in (1, 2):
            await worker.train(bench.train(f"{name}-{round}", round=round))
        await worker.close()
    for round in (1, 2):
        assert bench.update(f"direct-{round}") == bench.update(f"forked-{round}")
        assert bench.update(f"direct-{round}") == bench.update(f"forked-again-{round}")


@in_one_loop
async def test_what_the_app_prints_and_raises_is_in_the_log_of_its_worker(ward: Ward, make_bench: MakeBench) -> None:
    bench = make_bench(app={"fault": "raise"})
    worker, other = ward.worker("loud"), ward.worker("silent")
    await asyncio.gather(worker.start(), other.start())
    await worker.prepare(bench.prepare("north"))
    with pytest.raises(AppFailed, match="the scanner of room 7 is broken"):
        await worker.train(bench.train("update"))
    await asyncio.gather(worker.close(), other.close())
    assert "the scanner of room 7 is broken" in worker.log_path.read_text()
    assert other.log_path.read_text() == ""


@in_one_loop
async def test_signals_and_exit_codes_are_reported(ward: Ward, make_bench: MakeBench) -> None:
    bench = make_bench(app={"fault": "crash"})
    worker = ward.worker("crash")
    await worker.start()
    await worker.prepare(bench.prepare("north"))
    with pytest.raises(WorkerDied, match=r"ended during train \(signal 9\)") as died:
        await worker.train(bench.train("update"))
    assert died.value.returncode == -signal.SIGKILL
    await worker.close()

    worker = ward.worker("killed")
    await worker.start()
    worker.kill()
    with pytest.raises(WorkerDied, match="signal 9"):
        await worker.evaluate(bench.evaluate())
    worker.kill()

    lost, ended = ward.folder / "nobody-listens-there", ward.folder / "lost.log"
    with ended.open("ab") as log:
        process = await ward.nursery.fork(str(lost), log, worker.environment())
    assert isinstance(process, ForkedProcess)
    assert await process.wait() == process.returncode == 1
    assert "FileNotFoundError" in ended.read_text()


@in_one_loop
async def test_a_cancelled_training_ends_and_the_next_one_runs(ward: Ward, make_bench: MakeBench) -> None:
    bench = make_bench(work={"steps": 5_000_000})
    worker = ward.worker("cancelled")
    await worker.start()
    await worker.prepare(bench.prepare("north"))
    begun = asyncio.Event()
    training = asyncio.ensure_future(worker.train(bench.train("long"), lambda *_: begun.set()))
    await asyncio.wait_for(begun.wait(), 60)
    training.cancel()
    with pytest.raises(asyncio.CancelledError):
        await training
    assert (await worker.train(bench.train("short", config={"steps": 3}))).weight == 72
    await worker.close()


@in_one_loop
async def test_a_start_that_was_cancelled_leaves_no_worker_behind(ward: Ward) -> None:
    await (first := ward.worker("before")).start()
    starting = asyncio.ensure_future(ward.worker("cancelled-start").start())
    await asyncio.sleep(0.001)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await (last := ward.worker("cancelled-start")).start()
    assert last.pid is not None
    assert parent(last.pid) == ward.nursery.pid
    await asyncio.gather(first.close(), last.close())
    assert ward.nursery.pid is not None
    children = Path(f"/proc/{ward.nursery.pid}/task/{ward.nursery.pid}/children")
    await eventually(lambda: not children.read_text().split())


@in_one_loop
async def test_a_worker_that_is_killed_while_it_starts_does_not_live(ward: Ward) -> None:
    worker = ward.worker("unborn")
    starting = asyncio.ensure_future(worker.start())
    await asyncio.sleep(0)
    worker.kill()
    with pytest.raises(WorkerDied, match=r"during start \(signal 9\)"):
        await starting
    assert worker.pid is None


@in_one_loop
async def test_the_next_worker_sees_an_app_that_was_installed_anew(
    ward: Ward, make_bench: MakeBench, installed: Path
) -> None:
    bench = make_bench()
    await (worker := ward.worker("old")).start()
    await worker.prepare(bench.prepare("north"))
    source = (installed / "probe_app.py").read_text()
    try:
        text = source.replace("class Probe(atoll.App):", 'print("the new app")\n\n\nclass Probe(atoll.App):')
        install(installed, name=DISTRIBUTION, files={"probe_app.py": text}, entry_points=ENTRY_POINTS)
        await (new := ward.worker("new")).start()
        await new.prepare(bench.prepare("north", app_hash=hash_distribution(DISTRIBUTION)))
        await asyncio.gather(worker.close(), new.close())
    finally:
        install(installed, name=DISTRIBUTION, files={"probe_app.py": source}, entry_points=ENTRY_POINTS)
    assert new.log_path.read_text() == "the new app\n"


@in_one_loop
async def test_workers_outlive_a_nursery_that_is_killed_and_the_next_start_has_another(
    ward: Ward, make_bench: MakeBench
) -> None:
    bench = make_bench()
    worker, other = ward.worker("outliving"), ward.worker("outliving-2")
    await asyncio.gather(worker.start(), other.start())
    await worker.prepare(bench.prepare("north"))
    old = ward.nursery.pid
    assert old is not None
    os.kill(old, signal.SIGKILL)
    await eventually(lambda: ward.nursery.pid is None)
    assert (await worker.train(bench.train("update"))).weight == 40
    assert worker.pid is not None
    await worker.close()
    assert worker.pid is None
    other.kill()
    with pytest.raises(WorkerDied) as died:
        await other.evaluate(bench.evaluate())
    assert died.value.returncode is None  # only the nursery would have known

    await (again := ward.worker("again")).start()
    assert again.pid is not None
    assert ward.nursery.pid not in (None, old)
    assert parent(again.pid) == ward.nursery.pid
    await again.close()


@in_one_loop
async def test_all_die_with_their_agent_in_the_middle_of_a_training(make_bench: MakeBench, tmp_path: Path) -> None:
    bench = make_bench(work={"steps": 5_000_000})
    pids = await pids_left_by_a_killed_agent(bench, tmp_path, "forked")
    assert len(pids) == 2
    await eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


@in_one_loop
async def test_a_nursery_that_cannot_fork_gives_way_to_direct_starts(ward: Ward, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, threading, time\n"
        "if 'atoll.cluster.nursery' in sys.orig_argv:\n"
        "    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    )
    path = os.pathsep.join([str(tmp_path), ward.environment["PYTHONPATH"]])
    nursery = Nursery(tmp_path / "nursery.log")
    worker = WorkerProcess(tmp_path / "w", env={"PYTHONPATH": path}, nursery=nursery)
    await worker.start()
    assert worker.pid is not None
    assert parent(worker.pid) == os.getpid()
    assert (tmp_path / "nursery.log").read_text() == (
        "an import has left 1 threads running: nothing can be forked from here\n"
    )
    (tmp_path / "nursery.log").unlink()
    with worker.log_path.open("ab") as log:
        assert await nursery.fork("unused", log, worker.environment()) is None
    assert not (tmp_path / "nursery.log").exists()  # it was not tried again
    await asyncio.gather(worker.close(), nursery.close())


@in_one_loop
async def test_a_worker_that_cannot_start_says_why(tmp_path: Path) -> None:
    nursery = Nursery(tmp_path / "nursery.log")
    worker = WorkerProcess(tmp_path / "w", env={"PYTHONHOME": "/nowhere"}, nursery=nursery)
    with pytest.raises(WorkerDied, match=r"ended during start \(exit code 1\)") as died:
        await worker.start()
    assert "No module named" in died.value.log_tail
    await nursery.close()


@in_one_loop
async def test_where_the_system_cannot_fork_workers_are_started_directly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nursery_process, "FORKS", False)
    nursery = Nursery(tmp_path / "nursery.log")
    with (tmp_path / "log").open("wb") as log:
        assert await nursery.fork("unused", log, {}) is None
    assert nursery.pid is None
    await nursery.close()


@pytest.mark.gpu
@in_one_loop
async def test_a_forked_worker_can_use_the_gpu(ward: Ward, make_bench: MakeBench) -> None:
    bench = make_bench()
    worker = ward.worker("gpu")
    await worker.start()
    assert worker.pid is not None
    assert parent(worker.pid) == ward.nursery.pid
    assert (await worker.prepare(bench.prepare("north", device="cuda"))).device == "cuda:0"
    assert (await worker.train(bench.train("update"))).weight == 40
    await worker.close()


def parent(pid: int) -> int:
    """Process id of a process's parent."""
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def descriptors(pid: int) -> list[str]:
    """What the open descriptors of a process are, by number."""
    folder = Path(f"/proc/{pid}/fd")
    return [os.readlink(folder / fd).split(":")[0] for fd in sorted(os.listdir(folder), key=int)]


def environment(pid: int) -> dict[str, str]:
    """The environment that a process, or the one that it was forked from, was started with."""
    pairs = Path(f"/proc/{pid}/environ").read_bytes().rstrip(b"\0").split(b"\0")
    return {name: value for name, _, value in (os.fsdecode(pair).partition("=") for pair in pairs)}


async def eventually(holds: Callable[[], bool]) -> None:
    """Waits until it holds; fails after 30 s."""
    for _ in range(600):
        if holds():
            return
        await asyncio.sleep(0.05)
    raise AssertionError("it never came so far")
