"""Which run `atoll site exec` means, and what the agent's end of a script does without one."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from pathlib import Path

import pytest

from atoll.client.exec_script import find_waiting
from atoll.client.home import SiteHome
from atoll.cluster.messages import Close, Prepare, Prepared, decode, encode
from atoll.cluster.script.awaited import WAITING, AwaitedScript
from atoll.cluster.worker_process import WorkerDied
from atoll.wire.errors import ConfigError

RUNS = ("0" * 26, "1" * 26)
PREPARE = Prepare(
    run=RUNS[0], site="north", app_name="train", distribution="", entry_point="", app_hash="", data={}, job="{}",
    manifest_path="", state_folder="",
)  # fmt: skip


def let_wait(home: SiteHome, run: str, *, since_unix_s: float) -> None:
    path = home.run_state(run) / "worker" / WAITING
    path.parent.mkdir(parents=True)
    path.write_text("socket")
    os.utime(path, (since_unix_s, since_unix_s))


def test_the_run_is_named_or_the_one_that_began_to_wait_last(tmp_path: Path) -> None:
    home = SiteHome(root=tmp_path)
    for run, since_unix_s in zip(RUNS, (2.0, 1.0), strict=True):
        let_wait(home, run, since_unix_s=since_unix_s)
    assert find_waiting(home, RUNS[1]) == RUNS[1]
    assert find_waiting(home, "latest") == RUNS[0]


def test_a_run_that_does_not_wait_is_refused_with_the_reason(tmp_path: Path) -> None:
    home = SiteHome(root=tmp_path)
    with pytest.raises(ConfigError, match=f"no agent runs on {tmp_path}; start it: atoll site run"):
        find_waiting(home, "latest")


async def connected(folder: Path) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    while not (folder / WAITING).exists():
        await asyncio.sleep(0.01)
    path = (folder / WAITING).read_text()
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    return await asyncio.open_unix_connection(path)


async def test_a_script_is_a_worker_that_comes_by_itself(tmp_path: Path) -> None:
    told: list[bool] = []
    worker = AwaitedScript(tmp_path / "worker", on_waiting=lambda: told.append(True))
    starting = asyncio.create_task(worker.start())
    reader, writer = await connected(tmp_path / "worker")
    await starting
    assert (worker.pid, told) == (os.getpid() if hasattr(socket, "SO_PEERCRED") else 0, [True])
    assert not list((tmp_path / "worker").iterdir())  # nobody else is waited for
    asking = asyncio.create_task(worker.prepare(PREPARE))
    assert decode(await reader.readline()) == PREPARE
    writer.write(encode(Prepared(max_weight=3, update_bytes=4, device="cpu")))
    assert (await asking).max_weight == 3
    asking = asyncio.create_task(worker.prepare(PREPARE))
    await reader.readline()
    writer.close()
    with pytest.raises(WorkerDied, match="the script ended during prepare; what it printed is where it was started"):
        await asking
    assert worker.pid is None


async def test_a_script_that_idles_is_seen_to_go(tmp_path: Path) -> None:
    worker = AwaitedScript(tmp_path / "worker", on_waiting=lambda: None)
    starting = asyncio.create_task(worker.start())
    _, writer = await connected(tmp_path / "worker")
    await starting
    writer.close()
    while worker.pid is not None:
        await asyncio.sleep(0.01)


async def test_closing_ends_the_waiting_and_lets_a_script_go(tmp_path: Path) -> None:
    worker = AwaitedScript(tmp_path / "worker", on_waiting=lambda: None)
    starting = asyncio.create_task(worker.start())
    while not (tmp_path / "worker" / WAITING).exists():
        await asyncio.sleep(0.01)
    await worker.close()
    with pytest.raises(WorkerDied, match="no script has joined the run"):
        await starting
    other = AwaitedScript(tmp_path / "worker", on_waiting=lambda: None)
    starting = asyncio.create_task(other.start())
    reader, writer = await connected(tmp_path / "worker")
    await starting
    closing = asyncio.create_task(other.close())
    assert decode(await reader.readline()) == Close()
    writer.close()
    await asyncio.wait_for(closing, 5)
