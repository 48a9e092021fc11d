"""Where incoming objects wait until they are whole: a few mapped files, used again and again.

The memory of a server does not grow with its sites: what is in flight stands in these slots and nowhere else. Room on
the disk is reserved before the first byte, so a full disk is an error at the start and never a fault in a mapping.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path

from atoll.transport.durable import disk_errors, private_folder
from atoll.transport.intake import Intake
from atoll.wire.errors import BadFrame, LocalError, Unavailable
from atoll.wire.room import reserve


class StagingSlot:
    """One mapped file that takes one object at a time. Its pages stay warm from one object to the next.

    One writer at a time; readers of `view` are done before the next `begin`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._intake = Intake(0)
        self._map: mmap.mmap | None = None
        self._capacity_bytes = 0
        with disk_errors(path):
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)

    def begin(self, num_bytes: int, crc32: int | None = None, what: str = "object") -> None:
        """Makes room for a new object; what was here before is gone.

        Args:
            crc32: of the whole object (zlib), compared when all bytes are in; None compares nothing.
            what: names the object in errors.

        Raises:
            DiskFull: there is no room; the slot is empty and usable.
        """
        self._intake = Intake(0)
        if num_bytes > self._capacity_bytes:
            self._grow(num_bytes)
        self._intake = Intake(num_bytes, crc32, what)

    def write(self, frame: bytes) -> None:
        """Takes the next frame.

        Raises:
            BadFrame: damaged, or not the next bytes.
            TooLarge: it ends beyond the object.
        """
        self._intake.take(frame, self._keep)

    def read(self, header: bytes | bytearray, fill: Callable[[memoryview], None]) -> None:
        """Takes the next frame by its header, while `fill` brings the payload to where it stays. Raises as `write`."""
        self._intake.read(header, self._room, fill)

    def check_whole(self) -> None:
        """Raises BadFrame where all bytes are in and their crc32 is not the announced one; the slot is empty then."""
        try:
            self._intake.check_whole()
        except BadFrame:
            self._intake = Intake(0)
            raise

    @property
    def received_bytes(self) -> int:
        """Bytes from the start that are here; a transfer goes on from there."""
        return self._intake.received_bytes

    @property
    def num_bytes(self) -> int:
        """Length of the whole object."""
        return self._intake.num_bytes

    @property
    def complete(self) -> bool:
        return self._intake.complete

    @property
    def crc32(self) -> int:
        """Of the bytes that are here (zlib)."""
        return self._intake.crc32

    @property
    def view(self) -> memoryview:
        """The bytes that are here, without a copy; valid until the next `begin`."""
        whole = memoryview(self._map or b"")
        return whole[: self.received_bytes].toreadonly()

    def close(self) -> None:
        """Gives memory and disk back; once more is fine."""
        self._map = None  # views that are left keep the mapping until they go
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._path.unlink(missing_ok=True)
            self._descriptor = -1

    def _keep(self, offset: int, payload: memoryview) -> None:
        self._room(offset, payload.nbytes)[:] = payload

    def _room(self, offset: int, num_bytes: int) -> memoryview:
        if self._map is None:
            raise LocalError(f"{self._path}: a frame came before the slot was given an object")
        return memoryview(self._map)[offset : offset + num_bytes]

    def _grow(self, num_bytes: int) -> None:
        with disk_errors(self._path):
            try:
                reserve(self._descriptor, num_bytes)
                self._map = mmap.mmap(self._descriptor, num_bytes)
            except OSError:
                os.ftruncate(self._descriptor, self._capacity_bytes)
                raise
        self._capacity_bytes = num_bytes


class StagingPool:
    """`num_slots` slots in `folder`, whose old slots are removed. Used from one thread."""

    def __init__(self, folder: Path, num_slots: int) -> None:
        private_folder(folder)
        with disk_errors(folder):
            for left_behind in folder.glob("slot-*"):
                left_behind.unlink()
        self._slots = [StagingSlot(folder / f"slot-{number}") for number in range(num_slots)]
        self._free = list(self._slots)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def acquire(self) -> StagingSlot:
        """A free slot, the one used last first, since its pages are warm.

        Raises:
            Unavailable: none is free; admit transfers by `num_free`.
        """
        if not self._free:
            raise Unavailable(
                f"all {len(self._slots)} staging slots are taken; try again later",
                field="staging",
                bound=len(self._slots),
            )
        return self._free.pop()

    def release(self, slot: StagingSlot) -> None:
        """Takes a slot back, with whatever is in it; one that is free already is fine."""
        if slot not in self._free:
            self._free.append(slot)

    def close(self) -> None:
        """Removes all slots."""
        for slot in self._slots:
            slot.close()
        self._slots, self._free = [], []
