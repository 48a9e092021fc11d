"""A server for tests of the agent: a real grpc.aio server that says what the test tells it to, and keeps what it hears."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from atoll.transport.grpc_carrier import GRANT_METADATA_KEY, transfer_handlers
from atoll.wire import control_pb2 as pb
from atoll.wire import control_pb2_grpc as rpc
from atoll.wire.errors import METADATA_KEY, RemoteError, to_detail
from atoll.wire.frames import decode_frame, encode_frame
from atoll.wire.transfer_pb2 import DownloadRequest, TransferStatus

PATIENCE_S = 20.0  # for a message that has to come; a healthy agent takes milliseconds
_IN_BETWEEN = frozenset({"heartbeat", "progress"})


class Line:
    """One Attach stream, from the server's end."""

    def __init__(self, hello: pb.Hello) -> None:
        self.hello = hello
        self.ended = asyncio.Event()
        self.progress = asyncio.Event()
        self._heard: asyncio.Queue[pb.SiteMessage] = asyncio.Queue()
        self._said: asyncio.Queue[pb.ServerMessage | RemoteError | None] = asyncio.Queue()

    def say(self, **body: Any) -> None:
        """Send one message, named by its field of ServerMessage."""
        self._said.put_nowait(pb.ServerMessage(**body))

    def end(self, error: RemoteError | None = None) -> None:
        """End the stream, in order or with an error."""
        self._said.put_nowait(error)

    async def hear(self, kind: str) -> Any:
        """The next message, which must be of this kind; heartbeats and progress are passed over."""
        return await self.hear_one_of(kind)

    async def hear_one_of(self, *kinds: str) -> Any:
        """The next message, which must be of one of these kinds."""
        async with asyncio.timeout(PATIENCE_S):
            message = await self._heard.get()
        body = message.WhichOneof("body")
        assert body in kinds, f"wanted {kinds}, heard {message}"
        return getattr(message, str(body))

    async def silence(self, seconds: float = 0.2) -> None:
        """Nothing is heard for a while."""
        try:
            async with asyncio.timeout(seconds):
                message = await self._heard.get()
        except TimeoutError:
            return
        raise AssertionError(f"wanted nothing, heard {message}")

    def take(self, message: pb.SiteMessage) -> None:
        body = message.WhichOneof("body")
        if body == "progress":
            self.progress.set()
        if body not in _IN_BETWEEN:
            self._heard.put_nowait(message)

    async def next_said(self) -> pb.ServerMessage | None:
        item = await self._said.get()
        if isinstance(item, RemoteError):
            raise item
        return item


@dataclass(slots=True, kw_only=True)
class Transfers:
    """Bytes that came and bytes to be had, by grant; and where to break off once."""

    received: dict[str, bytearray] = field(default_factory=dict)
    wanted: dict[str, int] = field(default_factory=dict)  # length of an upload
    offered: dict[str, bytes] = field(default_factory=dict)
    begun: dict[str, int] = field(default_factory=dict)  # downloads, with the first byte that they asked for
    break_upload_after_bytes: int | None = None
    break_download_after_bytes: int | None = None
    hold_upload: asyncio.Event | None = None  # an upload waits for it after its first frame
    frame_bytes: int = 4096


class ScriptedServer:
    """`start`, then `attached()` for each stream that a site opens."""

    def __init__(self) -> None:
        self.transfers = Transfers()
        self.refuse_with: RemoteError | None = None
        self.protocol = 1
        self.features: tuple[str, ...] = ()
        self.port = 0
        self._lines: asyncio.Queue[Line] = asyncio.Queue()
        self._server: grpc.aio.Server | None = None
        self._num_grants = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Listen on the port of before, or on a free one."""
        server = grpc.aio.server()
        register: Callable[..., None] = rpc.add_ControlServicer_to_server
        register(self, server)
        server.add_generic_rpc_handlers([transfer_handlers(self._upload, self._download)])
        self.port = server.add_insecure_port(f"127.0.0.1:{self.port}")
        await server.start()
        self._server = server

    async def stop(self) -> None:
        """Close all streams at once."""
        if self._server is not None:
            await self._server.stop(None)

    async def attached(self) -> Line:
        """The next stream that a site has opened."""
        async with asyncio.timeout(PATIENCE_S):
            return await self._lines.get()

    def grant_download(self, line: Line, fetch: pb.Fetch, data: bytes, *, crc32: int | None = None) -> None:
        """Let the site have `data` as the version that it fetches."""
        grant = self._new_grant()
        self.transfers.offered[grant] = data
        line.say(
            grant=pb.Grant(
                grant=grant,
                direction=pb.DOWN,
                key=pb.TaskKey(run=fetch.run),
                version=fetch.version,
                offset=fetch.offset,
                num_bytes=len(data),
                crc32=zlib.crc32(data) if crc32 is None else crc32,
            )
        )

    def grant_upload(self, line: Line, result: pb.Result, *, received: bytes = b"") -> str:
        """Ask for the one payload of a result, of which `received` is here; the name of the grant."""
        grant = self._new_grant()
        payload = result.payloads[0]
        self.transfers.received[grant] = bytearray(received)
        self.transfers.wanted[grant] = payload.num_bytes
        line.say(
            grant=pb.Grant(
                grant=grant,
                direction=pb.UP,
                key=result.key,
                payload=payload.name,
                offset=len(received),
                num_bytes=payload.num_bytes,
            )
        )
        return grant

    async def whole(self, grant: str) -> bytes:
        """The bytes of an upload, once all are here."""
        async with asyncio.timeout(PATIENCE_S):
            while len(self.transfers.received[grant]) < self.transfers.wanted[grant]:
                await asyncio.sleep(0.005)
        return bytes(self.transfers.received[grant])

    # --- the services -----------------------------------------------------------------------------------------------

    async def Attach(self, requests: AsyncIterator[pb.SiteMessage], context: Any) -> AsyncIterator[pb.ServerMessage]:
        if self.refuse_with is not None:
            await _abort(context, self.refuse_with)
        first = await anext(aiter(requests))
        line = Line(first.hello)
        self._lines.put_nowait(line)
        yield pb.ServerMessage(
            welcome=pb.Welcome(
                protocol=self.protocol,
                features=self.features,
                federation="trial",
                heartbeat_s=1,
                lease_s=4,
                max_frame_bytes=1 << 20,
            )
        )

        async def read() -> None:
            async for message in requests:
                line.take(message)
            line.end()

        reading = asyncio.create_task(read())
        try:
            while (message := await line.next_said()) is not None:
                yield message
        except RemoteError as error:
            await _abort(context, error)
        finally:
            reading.cancel()
            line.ended.set()

    async def _upload(self, frames: AsyncIterator[bytes], context: Any) -> TransferStatus:
        grant = str(dict(context.invocation_metadata())[GRANT_METADATA_KEY])
        received = self.transfers.received[grant]
        async for frame in frames:
            offset, payload = decode_frame(frame)
            assert offset == len(received)
            received += payload
            if self.transfers.hold_upload is not None:
                await self.transfers.hold_upload.wait()
            limit = self.transfers.break_upload_after_bytes
            if limit is not None and len(received) >= limit:
                self.transfers.break_upload_after_bytes = None
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the line broke")
        complete = len(received) == self.transfers.wanted[grant]
        return TransferStatus(received_bytes=len(received), complete=complete)

    async def _download(self, request: DownloadRequest, context: Any) -> AsyncIterator[bytes]:
        data = memoryview(self.transfers.offered[request.grant])
        self.transfers.begun[request.grant] = request.offset
        for start in range(request.offset, len(data), self.transfers.frame_bytes):
            limit = self.transfers.break_download_after_bytes
            if limit is not None and start >= limit:
                self.transfers.break_download_after_bytes = None
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the line broke")
            yield encode_frame(start, data[start : start + self.transfers.frame_bytes])

    def _new_grant(self) -> str:
        self._num_grants += 1
        return f"grant-{self._num_grants}"


async def _abort(context: Any, error: RemoteError) -> None:
    detail = to_detail(error).SerializeToString()
    await context.abort(grpc.StatusCode[error.status], error.message, trailing_metadata=((METADATA_KEY, detail),))
