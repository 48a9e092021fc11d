"""Transfers of tensor bytes: frames by offset, checked as they come, resumed where they stopped.

Every transfer is one whole object of known length and crc32, named by a grant. How its frames travel is a carrier's
business (`grpc_carrier`, `bulk_carrier`); all rules are here and in `intake`, the same for every carrier.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from atoll.transport.durable import disk_errors, private_folder, sync_file, sync_folder
from atoll.transport.intake import Intake
from atoll.transport.pieces import Pieces
from atoll.wire.checksum import crc32_of
from atoll.wire.control_pb2 import Grant
from atoll.wire.errors import BadFrame, DiskFull, LocalError, RemoteError, Stale, Unavailable
from atoll.wire.frames import FRAME_BYTES
from atoll.wire.transfer_pb2 import TransferStatus


class Slot(Protocol):
    """Where an object comes in: `staging.StagingSlot`, `part_file.PartFile`."""

    @property
    def received_bytes(self) -> int: ...

    @property
    def complete(self) -> bool: ...

    def write(self, frame: bytes) -> None:
        """Takes the next frame. Blocks. Raises BadFrame, TooLarge."""
        ...

    def check_whole(self) -> None:
        """Raises BadFrame where all bytes are in, and together they are not what was announced."""
        ...


class RoomySlot(Slot, Protocol):
    """One that has the place of a payload at hand before its bytes have come."""

    def read(self, header: bytes | bytearray, fill: Callable[[memoryview], None]) -> None:
        """Takes the next frame by its header, while `fill` brings the payload to where it goes. Raises as `write`."""
        ...


# --- the side that has the grant -----------------------------------------------------------------------------------


class Carrier(Protocol):
    """How granted bytes travel: `grpc_carrier`, `bulk_carrier`. All rules of a transfer are here, none there."""

    async def send(self, grant: Grant, pieces: Pieces, before_last: Callable[[], Awaitable[None]]) -> TransferStatus:
        """Sends all pieces; what the server holds then. `before_last` is awaited before the last one leaves.

        Raises:
            RemoteError: the server refused, as its own error; Unavailable where the connection broke.
        """
        ...

    async def fetch(self, grant: Grant, slot: RoomySlot) -> None:
        """Asks for what lacks in `slot`, and takes it in. Asked even where nothing does: the call ends the grant.

        Raises:
            RemoteError: as `send`, and what the slot raises.
        """
        ...

    async def give_back(self, grant: Grant) -> None:
        """Ends the grant of a download that nobody wants any more, so that the server has the place for others at once.

        Where the connection is broken, the grant is void with it.
        """
        ...


async def _at_once() -> None:
    """Nothing to wait for."""


async def upload(
    carrier: Carrier,
    grant: Grant,
    path: Path,
    *,
    frame_bytes: int = FRAME_BYTES,
    before_last: Callable[[], Awaitable[None]] = _at_once,
) -> TransferStatus:
    """Sends the file at `path` from the grant's offset on; what the server holds afterwards.

    Args:
        frame_bytes: payload of a frame, at most what the server's Welcome allows.
        before_last: awaited before the last frame leaves.

    Raises:
        RemoteError: the server refused, as its own error; Unavailable where the connection broke: wait for a new grant.
        LocalError: the file cannot be read, or has another size than the grant says.
    """
    if path.is_file() and path.stat().st_size != grant.num_bytes:
        raise LocalError(f"{path}: has {path.stat().st_size} bytes, the grant is for {grant.num_bytes}")
    pieces = Pieces(path, 0, grant.num_bytes, grant.offset, frame_bytes=frame_bytes)
    return await carrier.send(grant, pieces, before_last)


def partial_bytes(path: Path, header: bytes = b"") -> int:
    """Bytes of the object that an earlier `download` to `path` left behind: the offset of the next Fetch."""
    part = part_of(path)
    return max(0, part.stat().st_size - len(header)) if part.is_file() else 0


async def download(
    carrier: Carrier,
    grant: Grant,
    path: Path,
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
        await _fetch(carrier, grant, part, intake, len(header))
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


async def _fetch(carrier: Carrier, grant: Grant, part: Path, intake: Intake, header_bytes: int) -> None:
    """Appends what is lacking to the file at `part`. Asked even where nothing is: the call ends the grant."""
    with disk_errors(part), part.open("r+b", buffering=0) as file:
        await carrier.fetch(grant, _Part(intake, file.fileno(), header_bytes))
    if not intake.complete:
        raise Unavailable(
            f"the server ended the transfer at byte {intake.received_bytes} of {intake.num_bytes}; fetch again",
            field="offset",
            value=intake.received_bytes,
            bound=intake.num_bytes,
        )


class _Part:  # a RoomySlot
    """The open file in which an object arrives, behind so many bytes of our own."""

    def __init__(self, intake: Intake, descriptor: int, header_bytes: int) -> None:
        self._intake, self._descriptor, self._header_bytes = intake, descriptor, header_bytes
        self._buffer = bytearray()  # of one payload on its way to the file; used again, so it stays in the cache
        self.check_whole = intake.check_whole

    @property
    def received_bytes(self) -> int:
        return self._intake.received_bytes

    @property
    def complete(self) -> bool:
        return self._intake.complete

    def write(self, frame: bytes) -> None:
        self._intake.take(frame, self._keep)

    def read(self, header: bytes | bytearray, fill: Callable[[memoryview], None]) -> None:
        self._intake.read(header, self._room, fill, self._keep)

    def _room(self, offset: int, num_bytes: int) -> memoryview:
        if len(self._buffer) < num_bytes:
            self._buffer = bytearray(num_bytes)
        return memoryview(self._buffer)[:num_bytes]

    def _keep(self, offset: int, payload: memoryview) -> None:
        _write_all(self._descriptor, payload, self._header_bytes + offset)


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


Moved = Callable[[int], None]  # hears on the event loop how many bytes of an object have moved, after each frame


def held(slot: Slot) -> TransferStatus:
    """What is in `slot` when a call that filled it ends.

    Raises:
        BadFrame: all bytes are in, and together they are not what was announced; nothing is kept.
    """
    slot.check_whole()
    return TransferStatus(received_bytes=slot.received_bytes, complete=slot.complete)


async def settle(work: asyncio.Future[Any]) -> None:
    """Waits until a thread is out of its work, whatever comes of it: only then may others touch what it used."""
    await asyncio.wait([work])
    if not work.cancelled():
        work.exception()


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
