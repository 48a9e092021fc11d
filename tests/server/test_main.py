"""The server as a whole: refused, started, drained, killed, started again."""

from __future__ import annotations

import asyncio
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from samples.whole_server import ask, make, server_in

from atoll.server.database import FolderLock
from atoll.server.main import check_bind, run_server
from atoll.transport.credentials import open_channel, open_plaintext_channel
from atoll.transport.enrolment import enrol
from atoll.transport.hello import make_hello
from atoll.transport.identity import Identity, load_identity
from atoll.wire import admin_pb2 as pb
from atoll.wire import admin_pb2_grpc, control_pb2_grpc
from atoll.wire.control_pb2 import Capacity, ServerMessage, SiteMessage
from atoll.wire.errors import ConfigError, LocalError, PortInUse, from_rpc

RUN = "import sys; from pathlib import Path; from atoll.server.main import run_server; run_server(Path(sys.argv[1]))"
PATIENCE_S = 120.0  # for a process to load the server on a busy machine


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make(tmp_path)


@contextmanager
def process_of(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A server process that has said that it is ready; killed at the end unless it has ended."""
    with (folder.parent / "log").open("a") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", RUN, str(folder)], stdout=subprocess.PIPE, stderr=log, text=True
        )
    try:
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], PATIENCE_S)
        line = process.stdout.readline() if ready else ""
        assert "federation demo is ready at 127.0.0.1:" in line, (line, (folder.parent / "log").read_text())
        yield process
    finally:
        process.kill()
        process.communicate()


async def join(folder: Path, name: str) -> Identity:
    request = pb.AddRequest(name=name, role="site", organisation="Clinic")
    token = (await ask(load_identity(folder / "operator"), "Add", request)).token
    return await asyncio.to_thread(enrol, token, folder.parent / name, roles=frozenset({"site"}))


async def sites(folder: Path) -> list[pb.SiteState]:
    reply = await ask(load_identity(folder / "operator"), "Sites", pb.SitesRequest())
    return list(reply.sites)


async def hello_and_silence() -> AsyncIterator[SiteMessage]:
    yield SiteMessage(hello=make_hello(Capacity(runs_at_once=1)))
    await asyncio.Event().wait()


def attach(channel: grpc.aio.Channel) -> Any:
    return control_pb2_grpc.ControlStub(channel).Attach(hello_and_silence())


async def test_kill_9_then_a_new_start_then_sigterm(folder: Path) -> None:
    with process_of(folder) as process:
        site = await join(folder, "site-1")
        process.kill()
        process.wait()
    with process_of(folder) as process:
        assert [state.site for state in await sites(folder)] == ["site-1"]
        async with open_channel(site) as channel:
            stream = attach(channel)
            first: ServerMessage = await stream.read()
            assert first.welcome.federation == "demo"
            process.terminate()
            last: ServerMessage = await stream.read()
            assert last.drain.reconnect_after_s >= 1
            assert await stream.read() is grpc.aio.EOF
            assert await stream.code() is grpc.StatusCode.OK
        assert await asyncio.to_thread(process.wait, PATIENCE_S) == 0
    FolderLock(folder / "server.lock").release()


async def test_ctrl_c_ends_in_order_too(folder: Path) -> None:
    with process_of(folder) as process:
        process.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(process.wait, PATIENCE_S) == 0


async def test_a_drained_server_lets_nobody_back_in(folder: Path) -> None:
    async with server_in(folder) as server:
        site = await join(folder, "site-1")
        async with open_channel(site) as channel:
            stream = attach(channel)
            await stream.read()
            started_s = time.monotonic()
            drained = asyncio.create_task(server.drain())
            while await stream.read() is not grpc.aio.EOF:
                pass
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await attach(channel).read()
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            await drained
            assert time.monotonic() - started_s < 20  # it does not sit out limits.drain_s


async def test_revocation_ends_an_open_stream(folder: Path) -> None:
    async with server_in(folder):
        site = await join(folder, "site-1")
        async with open_channel(site) as channel:
            stream = attach(channel)
            await stream.read()
            assert [state.connected for state in await sites(folder)] == [True]
            await ask(load_identity(folder / "operator"), "Revoke", pb.RevokeRequest(name="site-1"))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stream.read()
            assert "site-1 is revoked" in from_rpc(caught.value).message
            assert [state.connected for state in await sites(folder)] == [False]


async def test_plain_text_on_loopback(tmp_path: Path) -> None:
    folder = make(tmp_path, plaintext=True)
    operator = load_identity(folder / "operator")
    async with server_in(folder) as server:
        assert "PLAIN TEXT" in server.ready_line
        async with open_plaintext_channel(operator.address, name="operator", role="operator") as channel:
            stub = admin_pb2_grpc.AdminStub(channel)
            assert len((await stub.Sites(pb.SitesRequest(), timeout=20)).sites) == 0
        async with open_channel(operator) as channel:
            stub = admin_pb2_grpc.AdminStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Sites(pb.SitesRequest(), timeout=20)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("key", ["listen", "enrolment_listen"])
async def test_a_port_in_use(folder: Path, key: str) -> None:
    found = re.search(rf'^{key} *= "127.0.0.1:(\d+)"', (folder / "server.toml").read_text(), re.MULTILINE)
    assert found is not None
    with (
        socket.create_server(("127.0.0.1", int(found[1]))),
        pytest.raises(PortInUse, match=rf"^{key} = 127.0.0.1:{found[1]}: another process listens there; end it, or"),
    ):
        async with server_in(folder):
            pass
    async with server_in(folder) as server:  # the refused start holds neither port
        assert str(server.port) in server.ready_line


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("192.0.2.1:7443", "this machine does not have that address; use 0.0.0.0"),  # TEST-NET-1: nobody's
        ("no.such.invalid:1", "cannot listen there: .*; check the address"),
    ],
)
def test_addresses_that_cannot_be_listened_on(address: str, message: str) -> None:
    with pytest.raises(LocalError, match=rf"listen = {address}: {message}"):
        check_bind(address, "listen")


def test_a_second_server_on_the_folder_is_refused(folder: Path) -> None:
    lock = FolderLock(folder / "server.lock")
    with pytest.raises(LocalError, match=r"a server with pid \d+ works on this folder; stop it first"):
        run_server(folder)
    lock.release()


def test_settings_of_another_federation(folder: Path) -> None:
    path = folder / "server.toml"
    path.write_text(path.read_text().replace('federation = "demo"', 'federation = "other"'))
    with pytest.raises(ConfigError, match=r'federation = "other", and the keys in .* are those of "demo"'):
        run_server(folder)
    FolderLock(folder / "server.lock").release()  # the refused start holds nothing


def test_a_typo_in_the_settings(folder: Path) -> None:
    path = folder / "server.toml"
    path.write_text(path.read_text() + "[limits]\nmax_upload = 3\n")
    with pytest.raises(
        ConfigError, match=r"server.toml, line \d+: unknown key 'limits.max_upload'; did you mean 'max_uploads'\?"
    ):
        run_server(folder)
