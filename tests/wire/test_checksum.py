"""The checksum is zlib's, of any contiguous bytes, and nobody computes it elsewhere."""

from __future__ import annotations

import array
import mmap
import random
import zlib

import pytest

from atoll.wire.checksum import crc32_of

BLOCK = 1 << 20


@pytest.mark.parametrize("num_bytes", [0, 1, 63, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 17])
def test_it_is_that_of_zlib(num_bytes: int) -> None:
    data = random.Random(num_bytes).randbytes(num_bytes)
    assert crc32_of(data) == zlib.crc32(data)


def test_whatever_holds_the_bytes() -> None:
    data = random.Random(1).randbytes(BLOCK + 8)
    with mmap.mmap(-1, len(data)) as mapping:
        mapping[:] = data
        for held in (bytearray(data), memoryview(data), memoryview(array.array("d", data)), mapping):
            assert crc32_of(held) == zlib.crc32(data)
