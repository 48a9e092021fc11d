"""Differences of which few values travel: the largest of each group, or some drawn by lot; the others decode to zero.

A tensor is cut into groups of 4,096 values, so that nothing needs more memory than a block; of the n values of a group
(the last one of a tensor may be shorter) k = fraction n travel, rounded up, as float32.

* **top_k**: region = values of all groups, then their places in their group (uint16), each group's in rising order. Of
  equal magnitudes the first ones travel, so the bytes are a function of the values.
* **random_k**: region = a seed of 16 bytes, then the values, in the order of their places. Each value of the tensor
  draws a number from the seed (AES-256 in counter mode), and the k largest of a group travel, so places cost nothing.
  The seed follows from the site's secret, run, round and place in the model, so a retry writes the same bytes.

Error, for each group x: top_k leaves out the n - k smallest, so ||x - C(x)||^2 <= (1 - k / n) ||x||^2, and random_k has
that in expectation (Stich et al. 2018, arXiv:1809.07599, lemma A.1): both contract, as error feedback needs it. Without
it random_k sends n / k times its values and has E C(x) = x, E ||x - C(x)||^2 = (n / k - 1) ||x||^2, which contracts
nothing; so it scales exactly where nothing is carried over.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from atoll.aggregation.blocks import largest_magnitude
from atoll.aggregation.codecs.encoding import Encoding
from atoll.aggregation.codecs.feedback import FeedbackOptions
from atoll.aggregation.rounding import SEED_BYTES, Rounding

GROUP = 4096  # places fit 16 bits, and 8 groups a block

Numbers = NDArray[np.float32] | NDArray[np.uint32]
Places = NDArray[np.int64]


@dataclass(frozen=True)
class _Sparse:
    """What both have in common: how many values of a group travel."""

    fraction: float

    alignment = 4
    group = GROUP
    two_limbs = False
    limit = torch.finfo(torch.float32).max

    @property
    def gain(self) -> float:
        return 1.0

    def reach(self, bound: float) -> float:
        return torch.tensor(bound, dtype=torch.float32).item()

    def kept_of(self, num_values: int) -> int:
        """Values that travel of a group of so many."""
        return math.ceil(self.fraction * num_values)

    def _num_kept(self, num_values: int) -> int:
        """Values that travel of the first `num_values` of a tensor."""
        groups, rest = divmod(num_values, GROUP)
        return groups * self.kept_of(GROUP) + self.kept_of(rest)

    def _largest(self, scores_P: Numbers) -> Places:
        """Places of the largest scores of each group, rising; the first ones of equals."""
        return np.concatenate(
            [start + np.flatnonzero(_marks(rows, self.kept_of(rows.shape[1]))) for start, rows in _in_groups(scores_P)]
        )


@dataclass(frozen=True)
class TopKEncoding(_Sparse):
    @property
    def name(self) -> str:
        return f"top_k/{GROUP}/{self.fraction!r}"

    def num_bytes(self, num_values: int) -> int:
        return 6 * self._num_kept(num_values)

    def encode(self, values_P: Tensor, region: Tensor, start: int, rounding: Rounding, index: int) -> None:
        numbers_P = values_P.to(torch.float32).numpy()
        places_K = self._largest(np.abs(numbers_P))
        values, places = self._parts(region, start, start + len(numbers_P))
        values[:] = numbers_P[places_K]
        places[:] = places_K % GROUP

    def decode(self, region: Tensor, start: int, out_P: Tensor) -> None:
        values, places = self._parts(region, start, start + out_P.numel())
        out_P.zero_().numpy()[self._spread(places)] = values

    def magnitude(self, region: Tensor, start: int, stop: int) -> float:
        values, places = self._parts(region, start, stop)
        spread_K = self._spread(places)
        if (places >= GROUP).any() or (len(spread_K) and spread_K[-1] >= stop - start):
            raise ValueError("a place beyond the last value")
        if (np.diff(spread_K) <= 0).any():
            raise ValueError("places that do not rise")
        return largest_magnitude(torch.from_numpy(values))

    def _spread(self, places: NDArray[np.uint16]) -> Places:
        """Places in a block that starts with a group, of places in their groups."""
        return np.arange(len(places)) // self.kept_of(GROUP) * GROUP + places

    def _parts(self, region: Tensor, start: int, stop: int) -> tuple[NDArray[np.float32], NDArray[np.uint16]]:
        """The values that travel of `start` to `stop`, and their places in their groups."""
        data, num_kept = region.numpy(), region.numel() // 6
        kept = slice(self._num_kept(start), self._num_kept(stop))
        return data[: 4 * num_kept].view(np.float32)[kept], data[4 * num_kept :].view(np.uint16)[kept]


@dataclass(frozen=True)
class RandomKEncoding(_Sparse):
    scaled: bool = False  # a choice of who writes: those who read do the same with both

    @property
    def name(self) -> str:
        return f"random_k/{GROUP}/{self.fraction!r}"

    @property
    def gain(self) -> float:
        return (1 + 2.0**-22) / self.fraction if self.scaled else 1.0  # two roundings to float32

    def num_bytes(self, num_values: int) -> int:
        return SEED_BYTES + 4 * self._num_kept(num_values) if num_values else 0

    def encode(self, values_P: Tensor, region: Tensor, start: int, rounding: Rounding, index: int) -> None:
        seed, numbers_P = rounding.seed(index - start), values_P.to(torch.float32).numpy()
        region.numpy()[:SEED_BYTES] = np.frombuffer(seed, dtype=np.uint8)
        places_K = self._drawn(seed, start, len(numbers_P))
        kept_K = numbers_P[places_K]
        self._values(region, start, start + len(numbers_P))[:] = kept_K * self._scales(len(numbers_P), len(kept_K))

    def decode(self, region: Tensor, start: int, out_P: Tensor) -> None:
        out_P.zero_()
        if not out_P.numel():
            return
        places_K = self._drawn(region[:SEED_BYTES].numpy().tobytes(), start, out_P.numel())
        out_P.numpy()[places_K] = self._values(region, start, start + out_P.numel())

    def magnitude(self, region: Tensor, start: int, stop: int) -> float:
        return largest_magnitude(torch.from_numpy(self._values(region, start, stop)))

    def _drawn(self, seed: bytes, start: int, num_values: int) -> Places:
        """Places that are drawn of `num_values` from `start` on, counted from there."""
        # Two of 4,096 numbers of 32 bits are equal in one group of 500; the place of one value in it then leans.
        draws = Rounding(hashlib.sha256(b"atoll/random_k/1\x00" + seed).digest())
        return self._largest(draws.integers(start, num_values))

    def _scales(self, num_values: int, num_kept: int) -> NDArray[np.float32]:
        """The factor of each value that travels."""
        if not self.scaled:
            return np.ones(1, dtype=np.float32)
        full, rest = self.kept_of(GROUP), num_values % GROUP
        scales_K = np.full(num_kept, GROUP / full, dtype=np.float32)
        if rest:
            scales_K[-self.kept_of(rest) :] = rest / self.kept_of(rest)
        return scales_K

    def _values(self, region: Tensor, start: int, stop: int) -> NDArray[np.float32]:
        values: NDArray[np.float32] = region.numpy()[SEED_BYTES:].view(np.float32)
        return values[self._num_kept(start) : self._num_kept(stop)]


def _in_groups(scores_P: Numbers) -> Iterator[tuple[int, Numbers]]:
    """The whole groups as rows, then the shorter one, each with the place of its first value."""
    whole = len(scores_P) // GROUP * GROUP
    yield 0, scores_P[:whole].reshape(-1, GROUP)
    yield whole, scores_P[whole:].reshape(1, -1)


def _marks(scores_GV: Numbers, k: int) -> NDArray[np.bool_]:
    """Marks the k largest of each row, of equals the first ones."""
    if not scores_GV.size:
        return np.zeros(0, dtype=bool)
    least = scores_GV.shape[1] - k
    least_G1 = np.partition(scores_GV, least, axis=1)[:, least : least + 1]
    marks_GV: NDArray[np.bool_] = scores_GV >= least_G1
    if np.count_nonzero(marks_GV) == k * len(marks_GV):  # no equals at the border
        return marks_GV
    above_GV, equal_GV = scores_GV > least_G1, scores_GV == least_G1
    lacking_G1 = k - above_GV.sum(axis=1, keepdims=True)
    marks_GV = above_GV | (equal_GV & (equal_GV.cumsum(axis=1) <= lacking_G1))
    return marks_GV


class _Options(FeedbackOptions):
    fraction: float = Field(default=0.01, gt=0, le=0.5)  # beyond it bfloat16 costs less and loses less
    error_feedback: bool = True


class TopK:
    """The largest values of each 4,096, with their places; what is left out goes with the next update.

    Error: ||x - C(x)||^2 <= (1 - fraction) ||x||^2 (Stich et al. 2018, arXiv:1809.07599, lemma A.1). Bytes: 6 for each
    value that travels.
    """

    class Options(_Options):
        pass

    def __init__(self, options: Options) -> None:
        self.name, self.additive, self.sparse, self.feedback = "top_k", True, True, options.feedback
        self._encoding = TopKEncoding(options.fraction)

    def encoding(self, dtype: str) -> Encoding:
        return self._encoding


class RandomK:
    """Values of each 4,096 drawn by lot; what is left out goes with the next update, or the others stand for it.

    Error: the expectation of top_k's bound; unbiased without feedback, the values then scaled by n / k (Stich et al.
    2018, arXiv:1809.07599, lemma A.1). Bytes: 4 for each value that travels, and 16 for each tensor.
    """

    class Options(_Options):
        pass

    def __init__(self, options: Options) -> None:
        self.name, self.additive, self.sparse, self.feedback = "random_k", True, True, options.feedback
        self._encoding = RandomKEncoding(options.fraction, scaled=options.feedback == "none")

    def encoding(self, dtype: str) -> Encoding:
        return self._encoding
