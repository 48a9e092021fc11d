"""Uniform numbers for stochastic rounding: a function of a run's secret, the round and the place in the model.

So a restarted worker, and each rank of a site for its own slice, draw the same numbers and write the same bytes.
Assumption: the secret is of one run at one site (the agent derives it from the site's own). Whoever knows it could undo the rounding, which hides nothing but the lost
digits; it is never used for masks or noise. In reproducible runs (tests, simulations) it follows from the job's seed.
"""

from __future__ import annotations

import hmac

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray
from torch import Tensor

SECRET_BYTES = 32
SEED_BYTES = 16
_VALUES_PER_BLOCK = 4  # 16 bytes of AES make four 32-bit numbers


def rounding_key(secret: bytes, round: int) -> bytes:
    """The 32-byte AES key for one round; `secret` is of one run at one site.

    Raises:
        ValueError: the secret is not 32 bytes.
    """
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"the secret of rounding has {len(secret)} bytes, wanted {SECRET_BYTES}")
    message = b"atoll/rounding/1\x00" + round.to_bytes(4, "little")
    return hmac.digest(secret, message, "sha256")


class Rounding:
    """Numbers in [0, 1) on a grid of 2^-24, by AES-256 in counter mode: 9 GB/s of key stream, seekable."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._cipher = algorithms.AES256(key)

    def uniform(self, start: int, count: int) -> Tensor:
        """float32 numbers `start` to `start` + `count` of the sequence that belongs to the key."""
        bits = self.integers(start, count) >> np.uint32(8)
        return torch.from_numpy(bits.astype(np.float32) * np.float32(2**-24))

    def integers(self, start: int, count: int) -> NDArray[np.uint32]:
        """Numbers `start` to `start` + `count` of the same sequence as integers from 0 to 2^32 - 1."""
        if count == 0:
            return np.empty(0, dtype=np.uint32)
        block, skipped = divmod(start, _VALUES_PER_BLOCK)
        encryptor = Cipher(self._cipher, modes.CTR(block.to_bytes(16, "big"))).encryptor()
        stream = encryptor.update(bytes(4 * (skipped + count)))
        return np.frombuffer(stream, dtype="<u4")[skipped:]

    def seed(self, index: int) -> bytes:
        """16 bytes that may be published: they belong to the place `index` and say nothing of the key."""
        return hmac.digest(self._key, b"atoll/seed\x00" + index.to_bytes(8, "little"), "sha256")[:SEED_BYTES]
