"""The checksum of all that travels or lies on disk: crc32, as zlib computes it.

It catches damage, not an attacker: whoever changes bytes on purpose can make the checksum fit. TLS authenticates them.
"""

from __future__ import annotations

import mmap

from isal import isal_zlib

_BLOCK_BYTES = 1 << 20  # a process hears signals between two blocks, however long the whole is


def crc32_of(data: bytes | bytearray | memoryview | mmap.mmap, crc32: int = 0) -> int:
    """The crc32 of contiguous bytes of any length; `crc32` is that of bytes before them."""
    with memoryview(data).cast("B") as view:
        for start in range(0, view.nbytes, _BLOCK_BYTES):
            crc32 = isal_zlib.crc32(view[start : start + _BLOCK_BYTES], crc32)
    return crc32
