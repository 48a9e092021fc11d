"""A server of one object on loopback, carriers to it, and carriers that break."""

from __future__ import annotations

import asyncio
import os
import tempfile
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import grpc
import grpc.aio

from atoll.server.bulk import BulkPort, by_claim
from atoll.transport.bulk_carrier import BulkCarrier
from atoll.transport.grants import Ask, GrantTable, Subject
from atoll.transport.grpc_carrier import GRANT_METADATA_KEY, GrpcCarrier, frames, receive, transfer_handlers
from atoll.transport.pieces import Pieces
from atoll.transport.staging import StagingPool, StagingSlot
from atoll.transport.transfer import Carrier, Moved, Withdrawal
from atoll.wire.control_pb2 import Grant
from atoll.wire.errors import (
    METADATA_KEY,
    AtollError,
    RemoteError,
    to_detail,
)
from atoll.wire.frames import ends_at
from atoll.wire.transfer_pb2 import DownloadRequest, TransferStatus

FRAME = 16 << 10
WHOLE = 10 * FRAME + 123
SITE = "site-3"

Way = Literal["grpc", "bulk"]


class Server:
    """A server with one slot and one file to give, and a clock that tests move."""

    def __init__(self, folder: Path, data: bytes) -> None:
        self.now_s = 0.0
        self.data = data
        self.source = folder / "source"
        self.source.write_bytes(b"a header" + data)
        self.grants = GrantTable(1, 1, lambda: self.now_s)
        self.slot: StagingSlot = StagingPool(folder / "staging", 1).acquire()
        self.slot.begin(len(data), zlib.crc32(data), f"update of {SITE}, round 12")
        self.withdrawals: dict[str, Withdrawal] = {}
        self.num_frames_in = self.num_bytes_in = self.num_bytes_out = 0
        self.progressed = asyncio.Event()  # set by each frame that is in
        self.num_uploads_open = self.num_downloads_open = 0
        self.download_ended = asyncio.Event()
        self.upload_ended = asyncio.Condition()
        self.flip_bit_of_frame: int | None = None  # damage one frame on its way out

    def grant(self, *, up: bool, offset: int = 0) -> Grant:
        """A new grant for the whole object, whatever was granted before."""
        subject = Subject(direction="up" if up else "down", run="0" * 26, task="train-12" if up else "", version=7)
        ask = Ask(site=SITE, subject=subject, num_bytes=len(self.data), offset=offset, crc32=zlib.crc32(self.data))
        self.grants.ask(ask)
        (grant,) = self.grants.admit()
        return grant.to_message()

    async def resumed_upload(self) -> Grant:
        """A grant for what is lacking, once nobody writes to the slot any more."""
        async with self.upload_ended:
            await self.upload_ended.wait_for(lambda: self.num_uploads_open == 0)
        return self.grant(up=True, offset=self.slot.received_bytes)

    async def upload(self, grant_id: str, receive: Callable[..., Any], sinks: Any = None) -> TransferStatus:
        """What both carriers bring; as `server.transfers.Transfers.upload`."""
        self.num_uploads_open += 1
        try:
            self.grants.find(grant_id, SITE, "up")
            async with Withdrawal() as withdrawal:
                self.withdrawals[grant_id] = withdrawal
                status: TransferStatus = await receive(self.slot, self._progress(grant_id))
            self.grants.finish(grant_id)
            return status
        finally:
            self.num_uploads_open -= 1
            async with self.upload_ended:
                self.upload_ended.notify_all()

    @asynccontextmanager
    async def sending(self, grant_id: str, offset: int) -> AsyncIterator[tuple[Pieces, Moved]]:
        """What both carriers take; as `server.transfers.Transfers.sending`."""
        self.grants.find(grant_id, SITE, "down")
        pieces = _Flipping(self.source, len(b"a header"), len(self.data), offset, frame_bytes=FRAME)
        pieces.flipped = self.flip_bit_of_frame
        before = offset

        def moved(position: int) -> None:
            nonlocal before
            self.num_bytes_out += position - before
            before = position

        self.num_downloads_open += 1
        try:
            yield pieces, moved
        finally:
            self.num_downloads_open -= 1
            self.download_ended.set()

    async def bytes_out(self) -> int:
        """What downloads have taken since this was asked last, once none is under way."""
        while self.num_downloads_open:
            self.download_ended.clear()
            await self.download_ended.wait()
        num_bytes, self.num_bytes_out = self.num_bytes_out, 0
        return num_bytes

    async def on_upload(self, request_iterator: AsyncIterator[bytes], context: Any) -> TransferStatus:
        try:
            grant_id = dict(context.invocation_metadata())[GRANT_METADATA_KEY]
            return await self.upload(grant_id, partial(receive, request_iterator))
        except AtollError as error:
            await refuse(context, error)
            raise

    async def on_download(self, request: DownloadRequest, context: Any) -> AsyncIterator[bytes]:
        try:
            async with self.sending(request.grant, request.offset) as (pieces, moved), aclosing(frames(pieces)) as data:
                async for frame in data:
                    yield frame
                    moved(ends_at(frame))
        except AtollError as error:
            await refuse(context, error)

    def _progress(self, grant_id: str) -> Moved:
        before = self.slot.received_bytes

        def note(received_bytes: int) -> None:
            nonlocal before
            self.num_frames_in += 1
            self.num_bytes_in += received_bytes - before
            before = received_bytes
            self.grants.progress(grant_id, received_bytes)
            self.progressed.set()

        return note


class _Flipping(Pieces):
    """Pieces of which one is damaged on its way."""

    flipped: int | None = None

    def next(self) -> tuple[bytes, memoryview] | None:
        piece = super().next()
        if piece is not None and self.sent_bytes // FRAME == self.flipped:
            return piece[0], memoryview(flipped(bytes(piece[1])))
        return piece


async def refuse(context: Any, error: AtollError) -> None:
    """Lets the error reach the peer in the form that travels."""
    if not isinstance(error, RemoteError):
        raise error
    await context.abort(
        grpc.StatusCode[error.status], error.message, ((METADATA_KEY, to_detail(error).SerializeToString()),)
    )


def flipped(frame: bytes) -> bytes:
    return frame[:-1] + bytes([frame[-1] ^ 1])


class Loopback:
    """A started server, carriers to it, and carriers that break after so many bytes."""

    def __init__(self, server: Server, way: Way, port: int) -> None:
        self.server, self.way, self.port = server, way, port

    @asynccontextmanager
    async def channel(self, port: int | None = None) -> AsyncIterator[grpc.aio.Channel]:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port or self.port}") as channel:
            yield channel

    @asynccontextmanager
    async def carrier(self, port: int | None = None) -> AsyncIterator[Carrier]:
        port = port or self.port
        if self.way == "grpc":
            async with self.channel(port) as channel:
                yield GrpcCarrier(channel)
        else:
            async with grpc.aio.insecure_channel("127.0.0.1:1") as nowhere:  # so nothing goes by gRPC unseen
                carrier = BulkCarrier(("127.0.0.1", port), name=SITE, identity=None, instead=GrpcCarrier(nowhere))
                yield carrier
                carrier.close()

    @asynccontextmanager
    async def breaking_carrier(
        self,
        *,
        after_bytes_up: int = 1 << 60,
        after_bytes_down: int = 1 << 60,
        once: Callable[[], object] = lambda: True,
    ) -> AsyncIterator[Carrier]:
        """A carrier through a proxy that drops the connection when one direction has carried so many bytes.

        Args:
            once: holds them back until this is so too. An end that learns of the break first forgets what it has not
                read yet.
        """
        tasks: list[asyncio.Task[None]] = []

        async def carry(
            reader: asyncio.StreamReader, writer: asyncio.StreamWriter, budget: int, cut: Callable[[], None]
        ) -> None:
            while data := await reader.read(min(4096, budget)):
                writer.write(data)
                await writer.drain()
                budget -= len(data)
                if budget == 0:
                    break
            while not once():
                await asyncio.sleep(0.005)
            cut()

        async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if tasks:  # one connection, then none: what breaks stays broken
                writer.transport.abort()
                return
            to_reader, to_writer = await asyncio.open_connection("127.0.0.1", self.port)

            def cut() -> None:
                writer.transport.abort()
                to_writer.transport.abort()

            tasks.append(asyncio.create_task(carry(reader, to_writer, after_bytes_up, cut)))
            tasks.append(asyncio.create_task(carry(to_reader, writer, after_bytes_down, cut)))

        proxy = await asyncio.start_server(on_connection, "127.0.0.1", 0)
        try:
            async with self.carrier(proxy.sockets[0].getsockname()[1]) as carrier:
                yield carrier
        finally:
            proxy.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def loopback(folder: Path, num_bytes: int = WHOLE, way: Way = "grpc") -> AsyncIterator[Loopback]:
    server = Server(folder, os.urandom(num_bytes))
    if way == "bulk":
        bulk: Any = BulkPort(server, admit=by_claim, certificate=None, threads=2)  # type: ignore[arg-type]
        port = bulk.bind(("127.0.0.1", 0))
        bulk.start()
        try:
            yield Loopback(server, way, port)
        finally:
            await bulk.stop()
        return
    grpc_server = grpc.aio.server()
    grpc_server.add_generic_rpc_handlers((transfer_handlers(server.on_upload, server.on_download),))
    port = grpc_server.add_insecure_port("127.0.0.1:0")
    await grpc_server.start()
    try:
        yield Loopback(server, way, port)
    finally:
        await grpc_server.stop(None)


def in_new_folder(scenario: Callable[[Path], Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(scenario(Path(folder)))
