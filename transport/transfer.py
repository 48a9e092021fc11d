"""Tensor bytes on their own methods: raw frames by offset, no protobuf around them, resumed where they stopped.

Every transfer is one whole object of known length and crc32, named by a grant. Frames are read, checked and stored in
threads, one ahead of the network, so an event loop that serves thousands of control streams never waits for a disk.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import shutil
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import grpc
import grpc.aio

from atoll.transport.call_end import CallEnd
from atoll.transport.durable import disk_errors, private_folder, sync_file, sync_folder
from atoll.transport.intake import Intake
from atoll.wire.checksum import crc32_of
from atoll.wire.control_pb2 import Grant
from atoll.wire.errors import BadFrame, DiskFull, LocalError, RemoteError, Stale, Unavailable, from_rpc
from atoll.wire.frames import FRAME_BYTES, encode_frame, ends_at
from atoll.wire.transfer_pb2 import DownloadRequest, TransferStatus

_SERVICE = "atoll.wire.Transfer"
UPLOAD_METHOD = f"/{_SERVICE}/Upload"
DOWNLOAD_METHOD = f"/{_SERVICE}/Download"
GRANT_METADATA_KEY = "atoll-grant"

Metadata = Sequence[tuple[str, str | bytes]]


# --- the side that has the grant -----------------------------------------------------------------------------------


async def _at_once() -> None:
    """Nothing to wait for."""


async def upload(
    channel: grpc.aio.Channel,
    grant: Grant,
    path: Path,
    metadata: Metadata = (),
    *,
    frame_bytes: int = FRAME_BYTES,
    before_last: Callable[[], Awaitable[None]] = _at_once,
) -> TransferStatus:
    """Sends the file at `path` from the grant's offset on; what the server holds afterwards.

    Args:
        metadata: more of the call's metadata.
        frame_bytes: payload of a frame, at most what the server's Welcome allows.
        before_last: awaited before the last frame leaves.

    Raises:
        RemoteError: the server refused, as its own error; Unavailable where the connection broke: wait for a new grant.
        LocalError: the file cannot be read, or has another size than the grant says.
    """
    if path.is_file() and path.stat().st_size != grant.num_bytes:
        raise LocalError(f"{path}: has {path.stat().st_size} bytes, the grant is for {grant.num_bytes}")
    method: Any = channel.stream_unary(UPLOAD_METHOD, response_deserializer=TransferStatus.FromString)
    call = method(metadata=[(GRANT_METADATA_KEY, grant.grant), *metadata])
    end = CallEnd(call)
    try:
        async with aclosing(frames(path, 0, grant.num_bytes, grant.offset, frame_bytes=frame_bytes)) as stream:
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


def partial_bytes(path: Path, header: bytes = b"") -> int:
    """Bytes of the object that an earlier `download` to `path` left behind: the offset of the next Fetch."""
    part = part_of(path)
    return max(0, part.stat().st_size - len(header)) if part.is_file() else 0


async def download(
    channel: grpc.aio.Channel,
    grant: Grant,
    path: Path,
    metadata: Metadata = (),
    *,
    header: bytes = b"",
    durable: bool = False,
) -> None:
    """Fetches the object of a grant to `path`; goes on from `path` + ".part" where an earlier try left one.

    The file is whole under its name, and only synced where that is asked for: a version can be fetched again. Whoever finds a file that an
    earlier process fetched renames it to `part_of(path)`, and its bytes are compared with those of the server.

    Args:
        metadata: more of the call's metadata.
        header: bytes of our own that stand before the object in the file, e.g. the header of a model file.
        durable: the bytes are synced before the file has its name.

    Raises:
        RemoteError: the server refused, as its own error; Unavailable where the connection broke (what came is kept);
            BadFrame where a frame is damaged (what came before is kept) or the whole is (nothing is kept);
            Stale where the grant starts beyond what is here: fetch again.
        DiskFull: there is no room; nothing is kept.
    """
    private_folder(path.parent)
    part = part_of(path)
    try:
        intake = await asyncio.to_thread(_open_part, part, header, grant)
        await _fetch(channel, grant, part, intake, metadata, len(header))
    except DiskFull:
        part.unlink(missing_ok=True)
        raise
    try:
        intake.check_whole()
    except BadFrame:
        part.unlink()
        raise
    with disk_errors(path):
        if durable:
            await asyncio.to_thread(sync_file, part)
        os.replace(part, path)
        if durable:
            await asyncio.to_thread(sync_folder, path.parent)


async def _fetch(
    channel: grpc.aio.Channel, grant: Grant, part: Path, intake: Intake, metadata: Metadata, header_bytes: int
) -> None:
    """Appends what is lacking to the file at `part`. Asked even where nothing is: the call ends the grant."""
    method: Any = channel.unary_stream(DOWNLOAD_METHOD, request_serializer=DownloadRequest.SerializeToString)
    call = method(DownloadRequest(grant=grant.grant, offset=intake.received_bytes), metadata=list(metadata))
    try:
        with disk_errors(part), part.open("r+b", buffering=0) as file:

            def keep(offset: int, payload: memoryview) -> None:
                _write_all(file.fileno(), payload, header_bytes + offset)

            await _in_threads(call, lambda frame: intake.take(frame, keep))
    except grpc.aio.AioRpcError as error:
        raise from_rpc(error) from None
    finally:
        call.cancel()
    if not intake.complete:
        raise Unavailable(
            f"the server ended the transfer at byte {intake.received_bytes} of {intake.num_bytes}; fetch again",
            field="offset",
            value=intake.received_bytes,
            bound=intake.num_bytes,
        )


def part_of(path: Path) -> Path:
    """Where `download` to `path` keeps what has come so far."""
    return path.with_name(path.name + ".part")


def _open_part(part: Path, header: bytes, grant: Grant) -> Intake:
    """What the file at `part` holds of the object; starts a new file where that is nothing of use."""
    intake = Intake(grant.num_bytes, grant.crc32, f"version {grant.version} of run {grant.key.run}")
    with disk_errors(part):
        descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            held = os.fstat(descriptor).st_size - len(header)
            if not 0 < held <= grant.num_bytes or os.pread(descriptor, len(header), 0) != header:
                # A new file: the old one may be linked from elsewhere, as a region's is from its server's versions.
                os.close(descriptor)
                part.unlink()
                descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                _write_all(descriptor, memoryview(header), 0)
                held = 0
            for offset in range(0, held, FRAME_BYTES):
                block = os.pread(descriptor, min(FRAME_BYTES, held - offset), len(header) + offset)
                intake.count(len(block), crc32_of(block))
        finally:
            os.close(descriptor)
    if held < grant.offset:
        raise Stale(
            f"the grant starts at byte {grant.offset}, here are {held} bytes of {part.name}; fetch again",
            run=grant.key.run,
            field="offset",
            value=grant.offset,
            bound=held,
        )
    _require_room(part, grant.num_bytes - held)
    return intake


def _require_room(part: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(part.parent).free
    if free < num_bytes:
        raise DiskFull(f"{part.parent}: {num_bytes} bytes are to come, {free} are free; free some, then start again")


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    while data.nbytes:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


# --- the side that gives grants ------------------------------------------------------------------------------------


class Slot(Protocol):
    """Where an object comes in: `staging.StagingSlot`, `part_file.PartFile`."""

    @property
    def received_bytes(self) -> int: ...

    @property
    def complete(self) -> bool: ...

    def write(self, frame: bytes) -> None: ...

    def check_whole(self) -> None: ...


async def receive(
    request_iterator: AsyncIterator[bytes],
    slot: Slot,
    on_progress: Callable[[int], None] = lambda received: None,
) -> TransferStatus:
    """Takes the frames of an upload into `slot`, from its `received_bytes` on; what is there when the stream ends.

    Args:
        on_progress: called on the event loop with the bytes received so far, after each frame.

    Raises:
        BadFrame: a frame is damaged or out of place (what came before is kept), or all bytes together are not what was
            announced (nothing is kept).
        TooLarge: more bytes than announced.
    """

    def take(frame: bytes) -> None:
        slot.write(frame)

    await _in_threads(request_iterator, take, lambda: on_progress(slot.received_bytes))
    slot.check_whole()
    return TransferStatus(received_bytes=slot.received_bytes, complete=slot.complete)


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
            await _settle(taking)


async def _settle(work: asyncio.Future[Any]) -> None:
    """Waits until a thread is out of its work, whatever comes of it: only then may others touch what it used."""
    await asyncio.wait([work])
    if not work.cancelled():
        work.exception()


Checksums = dict[tuple[int, int], int]  # crc32 of a piece of an object, by its first byte and its end


async def frames(
    path: Path,
    data_offset: int,
    num_bytes: int,
    offset: int,
    *,
    frame_bytes: int = FRAME_BYTES,
    checksums: Checksums | None = None,
) -> AsyncGenerator[bytes, None]:
    """Frames of the `num_bytes` bytes that stand in a file from `data_offset` on, from byte `offset` of them.

    The bytes come from the page cache, which all readers share; two frames at a time are in memory. After a first short
    one, frames begin at multiples of their size, so all transfers of an object are cut alike.

    Args:
        checksums: what transfers of the same object have computed; it is used and filled. A checksum is the greater
            part of a frame's cost to a sender, and an object that goes to many needs each once.

    Raises:
        LocalError: the file cannot be read or is shorter.
        Stale: the offset is beyond the end.
    """
    if not 0 <= offset <= num_bytes:
        raise Stale(
            f"byte {offset} was asked of an object of {num_bytes} bytes", field="offset", value=offset, bound=num_bytes
        )
    data = _mapped(path, data_offset, num_bytes)
    known = {} if checksums is None else checksums
    start = offset

    def read_next() -> bytes:
        nonlocal start
        if start == num_bytes:
            return b""
        end = min(num_bytes, (start // frame_bytes + 1) * frame_bytes)
        payload = data[start:end]
        if (start, end) not in known:
            known[start, end] = crc32_of(payload)
        frame = encode_frame(start, payload, known[start, end])
        start = end
        return frame

    loop = asyncio.get_running_loop()
    reading = loop.run_in_executor(None, read_next)
    try:
        while frame := await reading:
            reading = loop.run_in_executor(None, read_next)
            yield frame
    finally:
        await _settle(reading)


def _mapped(path: Path, data_offset: int, num_bytes: int) -> memoryview:
    """A read-only view of a part of a file; the mapping ends with it."""
    with disk_errors(path), path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < data_offset + num_bytes:
            raise LocalError(f"{path}: has {size} bytes, {data_offset + num_bytes} are wanted; it was cut short")
        whole = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) if size else b""
    return memoryview(whole)[data_offset : data_offset + num_bytes]


class Withdrawal:
    """Ends a transfer from outside: `withdraw(error)` makes the guarded block raise `error`.

    ::

        async with Withdrawal() as withdrawal:
            registry[grant] = withdrawal
            return await receive(...)
    """

    def __init__(self) -> None:
        self._task: asyncio.Task[Any] | None = None
        self._cancelling = 0
        self._error: RemoteError | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.current_task()
        self._cancelling = self._task.cancelling() if self._task else 0
        return self

    def withdraw(self, error: RemoteError) -> None:
        """Ends the block with `error`; before or after the block it does nothing."""
        if self._task is not None and self._error is None:
            self._error = error
            self._task.cancel()

    async def __aexit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        if task is None or self._error is None:
            return
        if task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise self._error from None


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
