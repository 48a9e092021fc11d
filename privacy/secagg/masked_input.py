"""A site's input to a session as it leaves: its values as levels of a ring, under all masks, written block by block.

The input is the lanes of the plan one after the other: exact integers of 64 bits, then the reals of the update. Each
block of reals is checked, quantised and masked while it is in the core's cache, in the file that is sent: there is no
mask of full length, and no second copy of the model.

Invariant: every byte is a function of the values, the keys and the place in the lane. So threads, ranks that write
their own slices, a worker that was killed and begins again, and a transfer that resumes all give the same bytes.
Nothing is written of a value that is not finite or beyond the bound: that is an error, and never clipped.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import os
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from atoll.privacy.secagg.fixed_point import Quantiser
from atoll.privacy.secagg.keys import Mask
from atoll.privacy.secagg.levels import Bits
from atoll.privacy.secagg.masks import Lane, Masking, add_masks
from atoll.wire.checksum import crc32_of
from atoll.wire.errors import BadUpdate

SLICE_VALUES: Final = 1 << 20
"""At most what a thread takes at a time: milliseconds of work beside the microseconds that setting up the ciphers takes."""
BLOCK_VALUES: Final = 1 << 17
"""Levels that are quantised and masked before the next ones: `masks.BLOCK_BYTES` of a lane of 32 bits."""

_PAGE_VALUES: Final = 1 << 12
_KEY_LABEL: Final = b"atoll/secagg/rounding/1\0"


@dataclass(frozen=True, slots=True)
class Reals:
    """Neighbouring values of an update, of which the first is number `index` of the lane of reals."""

    index: int
    values: NDArray[Any]  # flat, float16, float32 or float64; bfloat16 as uint16

    @property
    def stop(self) -> int:
        return self.index + self.values.size

    def part(self, start: int, stop: int) -> NDArray[np.floating[Any]]:
        """Values number `start` to `stop` of the lane."""
        found: NDArray[Any] = self.values[start - self.index : stop - self.index]
        if found.dtype == np.uint16:  # bfloat16 is the upper half of a float32
            widened: NDArray[np.float32] = (found.astype("<u4") << np.uint32(16)).view("<f4")
            return widened
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """How reals become levels."""

    bits: Bits
    scale: float  # levels of a value of 1: L / C of the plan times this site's share of the largest weight
    bound: float  # C, the largest magnitude of a value
    clips: bool = False  # what is beyond the bound is cut to it; else it is an error
    key: bytes = field(repr=False)  # of rounding


def rounding_key(secret: bytes, round: int) -> bytes:
    """32 bytes from which the rounding of a round's levels follows; `secret` is of one run at one site.

    The same for every session of a round: a retry quantises the same input to the same levels.
    """
    return hmac.digest(secret, _KEY_LABEL + round.to_bytes(4, "big"), "sha256")


class RealsLane:
    """The lane of reals of one input. Any thread, or rank, may write any part of it."""

    def __init__(
        self,
        pieces: Sequence[Reals],
        encoding: Encoding,
        masks: Sequence[Mask],
        *,
        name_at: Callable[[int], str] = lambda index: f"value {index}",
    ) -> None:
        """`pieces` follow one another from value 0 on, without gaps; `name_at` names the tensor of a value for errors."""
        self._pieces = sorted(pieces, key=lambda piece: piece.index)
        starts = [0, *(piece.stop for piece in self._pieces)]
        if any(piece.index != start for piece, start in zip(self._pieces, starts, strict=False)):
            raise ValueError("the pieces of an input do not follow one another")
        self._starts = [piece.index for piece in self._pieces]
        self.num_values = starts[-1]
        self.dtype = np.dtype(f"<u{encoding.bits // 8}")
        self._encoding, self._masks, self._name_at = encoding, tuple(masks), name_at
        self._quantiser = Quantiser(encoding.key, scale=encoding.scale, bits=encoding.bits)

    def write(self, start: int, out: Lane) -> None:
        """Writes the values from `start` on, as many as `out` (of `dtype`) has room for.

        Raises:
            BadUpdate: one of them is not finite or beyond the bound; names tensor, value and bound.
        """
        levels, masking = self._quantiser.at(start), Masking(self._masks, start, self.dtype)
        for begin in range(0, out.size, BLOCK_VALUES):
            block = out[begin : begin + BLOCK_VALUES]
            first = start + begin
            for place, values in self._within(first, first + block.size):
                checked = self._checked(place, values)
                levels.write(checked, block[place - first : place - first + values.size])
            masking.add(block)

    def _within(self, start: int, stop: int) -> Iterator[tuple[int, NDArray[np.floating[Any]]]]:
        """Values `start` to `stop`, piece by piece: the place of the first, and the values."""
        for piece in self._pieces[bisect_right(self._starts, start) - 1 :]:
            if piece.index >= stop:
                return
            low, high = max(start, piece.index), min(stop, piece.stop)
            if low < high:
                yield low, piece.part(low, high)

    def _checked(self, place: int, values: NDArray[np.floating[Any]]) -> NDArray[np.floating[Any]]:
        bound = self._encoding.bound
        low, high = float(np.minimum.reduce(values)), float(np.maximum.reduce(values))
        if -bound <= low and high <= bound:  # NaN comes through both, and compares false
            return values
        if self._encoding.clips and math.isfinite(low) and math.isfinite(high):
            clipped: NDArray[np.floating[Any]] = np.clip(values, -bound, bound)
            return clipped
        within = np.isfinite(values) if self._encoding.clips else np.abs(values) <= bound
        first = int(np.flatnonzero(~within)[0])
        name, value = self._name_at(place + first), float(values[first])
        raise BadUpdate(
            f"{name} moved by {value}, secure aggregation takes at most {bound:g}; lower the learning rate, or raise "
            "privacy.secure_aggregation.bound in the job if such a step is meant",
            field=name,
            value=value,
            bound=bound,
        )

    def num_beyond(self) -> int:
        """How many values are beyond the bound: those that are cut, where they may be."""
        bound, found = self._encoding.bound, 0
        for start in range(0, self.num_values, BLOCK_VALUES):
            for _, values in self._within(start, min(self.num_values, start + BLOCK_VALUES)):
                if not (-bound <= values.min() and values.max() <= bound):
                    found += int(np.count_nonzero(~(np.abs(values) <= bound)))
        return found


def slice_values(num_values: int, num_threads: int) -> int:
    """Values of a slice, such that all threads have the same number of slices; the last one may be shorter."""
    rounds = -(-num_values // (num_threads * SLICE_VALUES))
    each = -(-num_values // max(1, rounds * num_threads))
    return max(1, -(-each // _PAGE_VALUES)) * _PAGE_VALUES


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What was written, by what its receiver compares."""

    num_bytes: int
    crc32: int
    sha256: bytes


def write_input(
    out: memoryview,
    exact: Sequence[int],
    exact_masks: Sequence[Mask],
    reals: RealsLane,
    *,
    num_threads: int | None = None,
    on_slice: Callable[[], None] = lambda: None,
) -> Written:
    """Writes a whole input into `out`: the exact integers, then the reals, from as many threads as there are cores.

    Args:
        exact: weight, metric sums and counts in two's complement, each from 0 to 2^64 - 1.
        on_slice: is called before each slice of reals, and may raise to end the work.

    Raises:
        BadUpdate: a real is not finite or beyond the bound, or an integer out of range.
        ValueError: `out` has another length than the input.
    """
    head, width = 8 * len(exact), reals.dtype.itemsize
    if out.nbytes != head + width * reals.num_values:
        raise ValueError(f"an input of {head + width * reals.num_values} bytes into {out.nbytes}")
    _write_exact(out[:head], exact, exact_masks)
    lane = np.frombuffer(out[head:], dtype=reals.dtype)
    num_threads = num_threads or os.cpu_count() or 1
    size = slice_values(reals.num_values, num_threads)

    def write(start: int) -> memoryview:
        on_slice()
        part = lane[start : start + size]
        reals.write(start, part)
        return part.data.cast("B")

    digest, crc32 = hashlib.sha256(out[:head]), crc32_of(out[:head])
    with ThreadPoolExecutor(num_threads, thread_name_prefix="masking") as pool:
        # Slices are hashed in their order, while later ones are made; a few ahead, so that they come from the cache.
        starts, ahead = iter(range(0, reals.num_values, size)), deque[Future[memoryview]]()
        try:
            ahead.extend(pool.submit(write, start) for start in islice(starts, 2 * num_threads))
            while ahead:
                data = ahead.popleft().result()
                ahead.extend(pool.submit(write, start) for start in islice(starts, 1))
                digest.update(data)
                crc32 = crc32_of(data, crc32)
        finally:
            for future in ahead:
                future.cancel()
    return Written(num_bytes=out.nbytes, crc32=crc32, sha256=digest.digest())


def _write_exact(out: memoryview, exact: Sequence[int], masks: Sequence[Mask]) -> None:
    for place, value in enumerate(exact):
        if not 0 <= value < 2**64:
            raise BadUpdate(
                f"exact value {place} of an input is {value}, it has 64 bits",
                field="exact",
                value=value,
                bound="0 to 2^64 - 1",
            )
    lane = np.frombuffer(out, dtype="<u8")
    lane[:] = np.array(exact, dtype="<u8")
    add_masks(lane, 0, masks)
