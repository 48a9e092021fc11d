"""A server with all that it has, inside the process of a test."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio

from atoll.server.authority import Authority
from atoll.server.main import Server
from atoll.server.settings import ServerFolder, load_settings
from atoll.server.setup import init_server
from atoll.server.store import Store
from atoll.transport.credentials import open_channel
from atoll.transport.identity import Identity
from atoll.wire import admin_pb2_grpc
from atoll.wire.errors import from_rpc


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [opened.getsockname()[1] for opened in sockets]
    for opened in sockets:
        opened.close()
    return ports


def make(tmp_path: Path, **changes: Any) -> Path:
    """The folder of a new server on free ports."""
    port, enrolment_port = free_ports(2)
    values: dict[str, Any] = {
        "federation": "demo",
        "key_folder": tmp_path / "offline",
        "address": f"127.0.0.1:{port}",
        "enrolment_address": f"127.0.0.1:{enrolment_port}",
        "listen": f"127.0.0.1:{port}",
        "enrolment_listen": f"127.0.0.1:{enrolment_port}",
    }
    init_server(tmp_path / "server", **(values | changes))
    return tmp_path / "server"


@asynccontextmanager
async def server_in(folder: Path) -> AsyncIterator[Server]:
    """The server of a folder, running while the block lasts."""
    place = ServerFolder(root=folder)
    settings = load_settings(folder, {})
    store = Store.open(place.database_url(settings))
    server = Server(place=place, settings=settings, store=store, authority=Authority.load(place.authority))
    try:
        await server.start()
        yield server
        await server.drain()
    finally:
        store.close()


async def ask(identity: Identity, method: str, request: Any) -> Any:
    """One call of the Admin service."""
    async with open_channel(identity) as channel:
        try:
            return await getattr(admin_pb2_grpc.AdminStub(channel), method)(request, timeout=20)
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error) from None
