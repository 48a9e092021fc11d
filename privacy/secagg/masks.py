"""Masks: key streams that are added to the values of an update, or taken away, in a ring of 2^16, 2^32 or 2^64.

A mask is the output of AES-256 in counter mode (NIST SP 800-38A) on zeros, from a zero counter, read as little-endian
unsigned integers. Its value number i stands at byte i * width whatever was computed before, so blocks, threads, ranks
and transfers that resume all give the same bytes. No mask is ever held whole: a block of it is made, added, forgotten.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from numpy.typing import NDArray

from atoll.privacy.secagg.keys import Mask

BLOCK_BYTES: Final = 1 << 19
"""Of 32 KiB to 1 MiB the fastest for masks with rounding: smaller blocks cost calls, at whose ends threads wait for each
other, and larger ones leave the second-level cache. For masks alone 256 KiB do as well."""
_AES_BLOCK: Final = 16

Lane = NDArray[np.unsignedinteger[Any]]


class _Scratch(threading.local):
    """What each thread reuses: a block of key stream, and views of it."""

    def __init__(self) -> None:
        stream = np.zeros(BLOCK_BYTES + _AES_BLOCK, dtype=np.uint8)
        self.data = stream.data
        self.views = {dtype: stream[:BLOCK_BYTES].view(dtype) for dtype in map(np.dtype, ("<u2", "<u4", "<i4", "<u8"))}


_ZEROS: Final = memoryview(bytes(BLOCK_BYTES))
_scratch = _Scratch()


class KeyStream:
    """The bytes of a key stream from `offset` on, one piece after the other."""

    def __init__(self, key: bytes, offset: int) -> None:
        self._encryptor = _encryptor_at(key, offset)

    def next(self, num_values: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """The next values, at most `BLOCK_BYTES` of them, which are this thread's until its next call of any stream."""
        self._encryptor.update_into(_ZEROS[: num_values * dtype.itemsize], _scratch.data)
        return _scratch.views[dtype][:num_values]


def _encryptor_at(key: bytes, offset: int) -> CipherContext:
    """AES-256 in counter mode, of which the next byte is number `offset`."""
    block, skipped = divmod(offset, _AES_BLOCK)
    encryptor = Cipher(algorithms.AES256(key), modes.CTR(block.to_bytes(_AES_BLOCK, "big"))).encryptor()
    encryptor.update(bytes(skipped))
    return encryptor


class Masking:
    """Adds masks to the values of a lane in place, one block after the other."""

    def __init__(self, masks: Sequence[Mask], start: int, dtype: np.dtype[Any]) -> None:
        """`start` is the place of the first value in the lane, whose values are uint16, uint32 or uint64."""
        self._dtype = dtype
        self._streams = [
            (_encryptor_at(mask.key, start * dtype.itemsize).update_into, np.subtract if mask.negative else np.add)
            for mask in masks
        ]

    def add(self, block: Lane) -> None:
        """The masks of the next values, at most `BLOCK_BYTES` of them."""
        zeros, data, stream = _ZEROS[: block.nbytes], _scratch.data, _scratch.views[self._dtype][: block.size]
        # Two calls a mask and nothing between: what holds the interpreter here keeps all other threads from theirs.
        for encrypt_into, change in self._streams:
            encrypt_into(zeros, data)
            change(block, stream, block)


def add_masks(values: Lane, start: int, masks: Sequence[Mask]) -> None:
    """Adds masks to the values of a lane, in place.

    Args:
        values: flat, uint16, uint32 or uint64, little endian.
        start: place of the first of them in the lane.
    """
    masking = Masking(masks, start, values.dtype)
    size = BLOCK_BYTES // values.dtype.itemsize
    for begin in range(0, values.size, size):
        masking.add(values[begin : begin + size])
