"""Uploads through the server's slots, without a network: who gets a place, and when."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from atoll.server.security import Caller, current_caller
from atoll.server.settings import LimitsSection
from atoll.server.steps import unobserved
from atoll.server.transfers import SPARE_SLOTS, Transfers
from atoll.transport.grpc_carrier import receive
from atoll.wire import control_pb2 as pb
from atoll.wire.frames import encode_frame

UPDATE = bytes(range(200))
MAX_UPLOADS = 2


class Server:
    """Transfers whose grants are seen, and whose updates are worked on until `work` is set."""

    def __init__(self, folder: Path) -> None:
        self.grants: dict[str, str] = {}
        self.done: list[str] = []
        self.work = asyncio.Event()
        self.transfers = Transfers(
            limits=LimitsSection(max_uploads=MAX_UPLOADS), staging=folder, send=self._send, on_step=unobserved
        )

    def ask(self, site: str, update: bytes = UPDATE) -> None:
        key = pb.TaskKey(run="run", task=f"r1.{site}", attempt=1)

        async def whole(received: memoryview) -> None:
            await self.work.wait()
            assert bytes(received) == update
            self.done.append(site)

        payload = pb.Payload(name="update", num_bytes=len(update), crc32=zlib.crc32(update))
        self.transfers.ask_up(site, key, payload, whole)

    async def upload(self, site: str, *pieces: tuple[int, bytes]) -> bool:
        with calling(site):
            status = await self.transfers.upload(self.grants.pop(site), partial(receive, frames(*pieces)), _no_models)
        return status.complete

    async def settle(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0.005)

    def _send(self, site: str, **body: Any) -> None:
        self.grants[site] = body["grant"].grant


@contextmanager
def calling(site: str) -> Iterator[None]:
    token = current_caller.set(Caller(role="site", name=site))
    try:
        yield
    finally:
        current_caller.reset(token)


async def frames(*pieces: tuple[int, bytes]) -> AsyncIterator[bytes]:
    for offset, piece in pieces or ((0, UPDATE),):
        yield encode_frame(offset, memoryview(piece))


def _no_models(run: str) -> Any:
    raise AssertionError(run)


@pytest.mark.asyncio
async def test_uploads_wait_while_every_slot_holds_an_update_that_is_worked_on(tmp_path: Path) -> None:
    server = Server(tmp_path)
    sites = [f"site-{number}" for number in range(8)]
    for site in sites:
        server.ask(site)
    arrived = 0
    while arrived < MAX_UPLOADS + SPARE_SLOTS:
        await server.settle()
        assert len(server.grants) == min(MAX_UPLOADS, MAX_UPLOADS + SPARE_SLOTS - arrived)
        for site in list(server.grants):
            assert await server.upload(site)
            arrived += 1
    await server.settle()
    assert server.grants == {}
    assert server.done == []
    server.work.set()
    while len(server.done) < len(sites):
        await server.settle()
        for site in list(server.grants):
            assert await server.upload(site)
    assert sorted(server.done) == sites
    server.transfers.close()


@pytest.mark.asyncio
async def test_an_update_that_was_lost_and_made_anew_begins_at_its_first_byte(tmp_path: Path) -> None:
    """The site lost power before it was durable, and training it again gave other bytes."""
    server = Server(tmp_path)
    server.work.set()
    server.ask("site-1")
    await server.settle()
    assert not await server.upload("site-1", (0, UPDATE[:10]))
    other = UPDATE[::-1]
    assert other != UPDATE
    server.ask("site-1", other)
    await server.settle()
    assert await server.upload("site-1", (0, other[:10]), (10, other[10:]))
    await server.settle()
    assert server.done == ["site-1"]
    server.transfers.close()
