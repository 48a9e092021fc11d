"""Granted bytes as raw frames on two gRPC methods, no protobuf around them: the way that every peer speaks.

Frames are read, checked and stored in threads, one ahead of the network, so an event loop that serves thousands of
control streams never waits for a disk.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from typing import Any

import grpc
import grpc.aio

from atoll.transport.call_end import CallEnd
from atoll.transport.pieces import Pieces
from atoll.transport.transfer import Moved, Slot, held, settle
from atoll.wire.control_pb2 import Grant
from atoll.wire.errors import from_rpc
from atoll.wire.frames import ends_at
from atoll.wire.transfer_pb2 import DownloadRequest, TransferStatus

_SERVICE = "atoll.wire.Transfer"
UPLOAD_METHOD = f"/{_SERVICE}/Upload"
DOWNLOAD_METHOD = f"/{_SERVICE}/Download"
GRANT_METADATA_KEY = "atoll-grant"


class GrpcCarrier:
    """`transport.transfer.Carrier` over one channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel: Any = channel

    async def send(self, grant: Grant, pieces: Pieces, before_last: Callable[[], Awaitable[None]]) -> TransferStatus:
        method = self._channel.stream_unary(UPLOAD_METHOD, response_deserializer=TransferStatus.FromString)
        call = method(metadata=[(GRANT_METADATA_KEY, grant.grant)])
        end = CallEnd(call)
        try:
            async with aclosing(frames(pieces)) as stream:
                async for frame in stream:
                    if ends_at(frame) == grant.num_bytes:
                        await before_last()
                    await call.write(frame)
            await call.done_writing()
            status: TransferStatus = await call
        except (asyncio.InvalidStateError, grpc.aio.InternalError, grpc.aio.AioRpcError):  # the call is over
            raise await end.error() from None
        except BaseException:
            call.cancel()
            raise
        return status

    async def fetch(self, grant: Grant, slot: Slot) -> None:
        call = self._download(grant, slot.received_bytes)
        try:
            await _in_threads(call, slot.write)
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error) from None
        finally:
            call.cancel()

    async def give_back(self, grant: Grant) -> None:
        with suppress(grpc.aio.AioRpcError):
            async for _ in self._download(grant, grant.num_bytes):  # asks for nothing
                break

    def _download(self, grant: Grant, offset: int) -> Any:
        method = self._channel.unary_stream(DOWNLOAD_METHOD, request_serializer=DownloadRequest.SerializeToString)
        return method(DownloadRequest(grant=grant.grant, offset=offset))


async def receive(
    request_iterator: AsyncIterator[bytes], slot: Slot, on_progress: Moved = lambda received: None
) -> TransferStatus:
    """Takes the frames of an upload into `slot`, from its `received_bytes` on; what is there when the stream ends.

    Raises:
        BadFrame: a frame is damaged or out of place (what came before is kept), or all bytes together are not what was
            announced (nothing is kept).
        TooLarge: more bytes than announced.
    """
    await _in_threads(request_iterator, slot.write, lambda: on_progress(slot.received_bytes))
    return held(slot)


async def _in_threads(
    source: AsyncIterable[bytes], take: Callable[[bytes], None], after: Callable[[], None] = lambda: None
) -> None:
    """Hands each item to `take` in a thread, one at a time, while the next one is on its way."""
    taking: asyncio.Future[None] | None = None
    loop = asyncio.get_running_loop()
    try:
        async for item in source:
            if taking is not None:
                await taking
                after()
            taking = loop.run_in_executor(None, take, item)
        if taking is not None:
            await taking
            after()
    finally:
        if taking is not None:
            await settle(taking)


async def frames(pieces: Pieces) -> AsyncGenerator[bytes, None]:
    """The frames of an object as gRPC takes them; two at a time are in memory."""

    def read_next() -> bytes:
        return b"".join(pieces.next() or ())

    loop = asyncio.get_running_loop()
    reading = loop.run_in_executor(None, read_next)
    try:
        while frame := await reading:
            reading = loop.run_in_executor(None, read_next)
            yield frame
    finally:
        await settle(reading)


def transfer_handlers(
    upload: Callable[[AsyncIterator[bytes], Any], Any], download: Callable[[DownloadRequest, Any], AsyncIterator[bytes]]
) -> grpc.GenericRpcHandler:
    """The two methods as a handler for a `grpc.aio` server; frames pass as they are.

    Args:
        upload: awaitable; takes the frames and the context (the grant stands in its metadata under
            GRANT_METADATA_KEY), gives a TransferStatus.
        download: asynchronous generator; takes the request and the context, gives frames.
    """
    return grpc.method_handlers_generic_handler(
        _SERVICE,
        {
            "Upload": grpc.stream_unary_rpc_method_handler(
                upload, response_serializer=TransferStatus.SerializeToString
            ),
            "Download": grpc.unary_stream_rpc_method_handler(download, request_deserializer=DownloadRequest.FromString),
        },
    )
