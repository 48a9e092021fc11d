"""An object on its way out, piece by piece, straight from the page cache that all its readers share."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from atoll.transport.durable import disk_errors
from atoll.wire.checksum import crc32_of
from atoll.wire.errors import LocalError, Stale
from atoll.wire.frames import FRAME_BYTES, encode_header

Checksums = dict[tuple[int, int], int]  # crc32 of a piece of an object, by its first byte and its end


class Pieces:
    """The frames of the `num_bytes` bytes that stand in a file from `data_offset` on, from byte `offset` of them.

    After a first short one, frames begin at multiples of their size, so all transfers of an object are cut alike.

    Args:
        checksums: what transfers of the same object have computed; it is used and filled. A checksum is the greater
            part of a frame's cost to a sender, and an object that goes to many needs each once.

    Raises:
        LocalError: the file cannot be read or is shorter.
        Stale: the offset is beyond the end.
    """

    def __init__(
        self,
        path: Path,
        data_offset: int,
        num_bytes: int,
        offset: int,
        *,
        frame_bytes: int = FRAME_BYTES,
        checksums: Checksums | None = None,
    ) -> None:
        if not 0 <= offset <= num_bytes:
            raise Stale(
                f"byte {offset} was asked of an object of {num_bytes} bytes",
                field="offset",
                value=offset,
                bound=num_bytes,
            )
        self._data = _mapped(path, data_offset, num_bytes)
        self._num_bytes, self._frame_bytes = num_bytes, frame_bytes
        self._checksums = {} if checksums is None else checksums
        self.sent_bytes = offset  # where the next frame begins

    @property
    def is_last(self) -> bool:
        """Whether the next frame is the last one."""
        return self.sent_bytes < self._num_bytes == self._end()

    def next(self) -> tuple[bytes, memoryview] | None:
        """Header and payload of the next frame, without a copy; None where all are out. Blocks: it may read the disk."""
        start, end = self.sent_bytes, self._end()
        if start == self._num_bytes:
            return None
        payload = self._data[start:end]
        if (start, end) not in self._checksums:
            self._checksums[start, end] = crc32_of(payload)
        self.sent_bytes = end
        return encode_header(start, payload.nbytes, self._checksums[start, end]), payload

    def _end(self) -> int:
        return min(self._num_bytes, (self.sent_bytes // self._frame_bytes + 1) * self._frame_bytes)


def _mapped(path: Path, data_offset: int, num_bytes: int) -> memoryview:
    """A read-only view of a part of a file; the mapping ends with it."""
    with disk_errors(path), path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < data_offset + num_bytes:
            raise LocalError(f"{path}: has {size} bytes, {data_offset + num_bytes} are wanted; it was cut short")
        whole = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) if size else b""
    return memoryview(whole)[data_offset : data_offset + num_bytes]
