"""An object that comes in straight to the file where it will stay, and goes on where an earlier try stopped."""

from __future__ import annotations

import os
from pathlib import Path

from atoll.transport.durable import disk_errors, sync_file, sync_folder
from atoll.transport.intake import Intake
from atoll.transport.transfer import part_of
from atoll.wire.checksum import crc32_of
from atoll.wire.errors import BadFrame
from atoll.wire.frames import FRAME_BYTES


class PartFile:
    """The file at `path` + ".part", as `transport.transfer.download` leaves it too. One writer at a time.

    Args:
        num_bytes: length of the object; a file that is longer is no part of it and begins anew.
        crc32: of the whole object (zlib).
        what: names the object in errors.

    Raises:
        DiskFull, LocalError: from every method.
    """

    def __init__(self, path: Path, num_bytes: int, crc32: int, what: str) -> None:
        self._path, self._part = path, part_of(path)
        self._intake = Intake(num_bytes, crc32, what)
        with disk_errors(self._part):
            self._descriptor = os.open(self._part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            held = os.fstat(self._descriptor).st_size
            if held > num_bytes:
                os.ftruncate(self._descriptor, 0)
                held = 0
            while self.received_bytes < held:
                data = os.pread(self._descriptor, min(FRAME_BYTES, held - self.received_bytes), self.received_bytes)
                self._intake.count(len(data), crc32_of(data))

    @property
    def received_bytes(self) -> int:
        return self._intake.received_bytes

    @property
    def complete(self) -> bool:
        return self._intake.complete

    def write(self, frame: bytes) -> None:
        """Takes the next frame. Raises BadFrame, TooLarge."""
        self._intake.take(frame, self._keep)

    def check_whole(self) -> None:
        """Raises BadFrame where all bytes are in and are not those that were announced; nothing is kept then."""
        try:
            self._intake.check_whole()
        except BadFrame:
            self._part.unlink(missing_ok=True)
            raise

    def finish(self) -> None:
        """Gives the whole object its name, durably. Blocks."""
        with disk_errors(self._path):
            sync_file(self._part)
            os.replace(self._part, self._path)
            sync_folder(self._path.parent)

    def close(self) -> None:
        """Lets go of the file; what came stays."""
        os.close(self._descriptor)

    def _keep(self, offset: int, payload: memoryview) -> None:
        with disk_errors(self._part):
            while payload.nbytes:
                written = os.pwrite(self._descriptor, payload, offset)
                payload, offset = payload[written:], offset + written
