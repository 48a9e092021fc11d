"""Real numbers as integers of a ring, so that a sum of n sites cannot overflow and masks hide it.

A value v of a tensor with the public bound C travels as q = round(v L / C) in two's complement, at random up or down so
that the expectation is v L / C. With L = floor((2^(b-1) - 1) / n) - 1 the sum of n such numbers stays below 2^(b-1):
n (L + 1) <= 2^(b-1) - 1, the 1 for the rounding. n is the size of the roster, whoever drops out.

The error of a sum's value is unbiased, below n C / L, with a variance of at most n / 4 (C / L)^2.
"""

from __future__ import annotations

import math
import threading
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from atoll.privacy.secagg.levels import Bits
from atoll.privacy.secagg.masks import KeyStream, Lane

_MAGIC: Final = 1.5 * 2.0**84  # 1.5 * 2^52 in units of 2^32: a float64 beside it keeps its integer in its low half
_RANDOM: Final = np.dtype("<i4")
_PART_VALUES: Final = 1 << 17  # a block of a lane of 32 bits


class Quantiser:
    """Writes values as levels of a ring.

    Args:
        key: 32 bytes from which the randomness of rounding follows, of one site, run and round; never a mask's.
        scale: L / C times the site's share of the largest weight.
    """

    def __init__(self, key: bytes, *, scale: float, bits: Bits) -> None:
        if not 0 < scale < math.inf:
            raise ValueError(f"scale {scale}")
        self._key = key
        self._scale = scale * 2.0**32

    def at(self, start: int) -> Levels:
        """Writes the levels of the values from number `start` of the lane on."""
        return Levels(KeyStream(self._key, start * _RANDOM.itemsize), self._scale)

    def write(self, values: NDArray[np.floating[Any]], start: int, out: Lane) -> None:
        """The levels of `values` (flat, finite, within the bound), of which the first is number `start` of the lane.

        The same key, value and place give the same level, whatever the blocks.
        """
        self.at(start).write(values, out)


class Levels:
    """Levels of one part of a lane, one block after the other."""

    def __init__(self, stream: KeyStream, scale: float) -> None:
        self._stream, self._scale = stream, scale

    def write(self, values: NDArray[np.floating[Any]], out: Lane) -> None:
        """Those of the next values (finite, within the bound), as many as `out` has room for."""
        units, random, whole = _scratch.unit, _scratch.random, _scratch.whole
        for begin in range(0, values.size, _PART_VALUES):
            size = min(_PART_VALUES, values.size - begin)
            unit = units[:size]
            # In units of 2^-32: the value, a uniform number from -1/2 to 1/2, and a constant that rounds to integers.
            # Casts are copies of their own: operations that cast allocate buffers, and so hold up other threads.
            np.copyto(unit, values[begin : begin + size])
            np.multiply(unit, self._scale, unit)
            np.copyto(random[:size], self._stream.next(size, _RANDOM))
            np.add(unit, random[:size], unit)
            np.add(unit, _MAGIC, unit)
            np.copyto(out[begin : begin + size], whole[:size], casting="unsafe")  # the low half, as the ring has it


class _Scratch(threading.local):
    """What each thread reuses."""

    def __init__(self) -> None:
        self.unit = np.empty(_PART_VALUES)
        self.random = np.empty(_PART_VALUES)
        self.whole = self.unit.view("<u8")


_scratch = _Scratch()


def total(levels: Lane) -> NDArray[np.int64]:
    """The sum that levels in two's complement stand for."""
    return levels.view(f"<i{levels.dtype.itemsize}").astype(np.int64)
