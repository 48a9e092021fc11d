"""Differences as small integers with one float32 scale for each group of them, rounded up or down at random.

A value x of a group with largest magnitude m becomes q = floor(x / s + u), s = m / L rounded towards zero and u uniform
in [0, 1), so that E[q s] = x: errors of sites average out (Gupta et al. 2015, arXiv:1502.02551, section 2). L is the
largest level: 127 for 8 bits, 7 for 4. Error of a value: less than s + 2^-23 m, so less than m / (L - 1). A group whose
m is below L * 2^-126 becomes zeros. Region: all scales, then all levels; two of 4 bits in a byte, the first one low.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from atoll.aggregation.blocks import largest_magnitude
from atoll.aggregation.codecs.encoding import Encoding
from atoll.aggregation.codecs.feedback import FeedbackOptions
from atoll.aggregation.rounding import Rounding

_SMALLEST_SCALE = torch.finfo(torch.float32).smallest_normal


@dataclass(frozen=True)
class BlockScaled:
    """Levels of `bits` bits in groups of `group` values, an even number."""

    bits: Literal[8, 4]
    group: int

    alignment = 4
    two_limbs = False
    gain = 1.0
    limit = torch.finfo(torch.float32).max

    @property
    def name(self) -> str:
        return f"int{self.bits}/{self.group}"

    @property
    def levels(self) -> int:
        """The largest level; its opposite is the smallest, and the one below that is never written."""
        return (1 << self.bits - 1) - 1

    def reach(self, bound: float) -> float:
        return torch.tensor(bound, dtype=torch.float32).item()  # so many scales never exceed the largest magnitude

    def num_bytes(self, num_values: int) -> int:
        return 4 * self._num_groups(num_values) + self._level_bytes(num_values)

    def encode(self, values_P: Tensor, region: Tensor, start: int, rounding: Rounding, index: int) -> None:
        scales_G, packed = self._parts(region)
        groups_GV = self._grouped(values_P.to(torch.float32))
        scale_G = self._scales(groups_GV)
        first = start // self.group
        scales_G[first : first + scale_G.numel()].copy_(scale_G)
        divisor_G = torch.where(scale_G > 0, scale_G, torch.inf)  # x / inf = 0
        ratio_P = (groups_GV / divisor_G[:, None]).reshape(-1)[: values_P.numel()]
        floor_P = torch.from_numpy(np.floor(ratio_P.numpy()))  # torch would split it over threads (see round_sum)
        # frac < 1 and u < 1 are exact in float32, so up is drawn with probability frac (to 2^-24).
        up_P = rounding.uniform(index, values_P.numel()) < ratio_P - floor_P
        self._write(packed, start, (floor_P + up_P).clamp_(-self.levels, self.levels).to(torch.int8))

    def decode(self, region: Tensor, start: int, out_P: Tensor) -> None:
        scales_G, packed = self._parts(region)
        num_values = out_P.numel()
        out_P.copy_(self._read(packed, start, num_values))
        first, whole = start // self.group, num_values // self.group * self.group
        last = first + whole // self.group
        # At most 7 and 24 significant bits: the product is exact in float64.
        out_P[:whole].view(-1, self.group).mul_(scales_G[first:last, None])
        if whole < num_values:
            out_P[whole:].mul_(scales_G[last])

    def magnitude(self, region: Tensor, start: int, stop: int) -> float:
        scales_G, packed = self._parts(region)
        scale_G = scales_G[start // self.group : self._num_groups(stop)]
        if torch.signbit(scale_G).any():
            raise ValueError("a negative scale")
        if self._read(packed, start, stop - start).min() < -self.levels:
            raise ValueError(f"a level of {-self.levels - 1}")
        if self.bits == 4 and stop % 2 and int(packed[stop // 2]) & 0xF0:
            raise ValueError("a level beyond the last value")
        return largest_magnitude(scale_G) * self.levels

    # --- bytes ------------------------------------------------------------------------------------------------------

    def _num_groups(self, num_values: int) -> int:
        return -(-num_values // self.group)

    def _level_bytes(self, num_values: int) -> int:
        return -(-num_values * self.bits // 8)

    def _parts(self, region: Tensor) -> tuple[Tensor, Tensor]:
        """Scales (float32) and levels (uint8) of a region: its length says how many groups there are."""
        num_groups = -(-region.numel() // (4 + self._level_bytes(self.group)))
        return region[: 4 * num_groups].view(torch.float32), region[4 * num_groups :]

    def _write(self, packed: Tensor, start: int, levels_P: Tensor) -> None:
        if self.bits == 8:
            packed.view(torch.int8)[start : start + levels_P.numel()].copy_(levels_P)
            return
        nibbles_P = torch.nn.functional.pad(levels_P, (0, levels_P.numel() % 2)).view(torch.uint8) & 0x0F
        first = start // 2
        packed[first : first + nibbles_P.numel() // 2].copy_(nibbles_P[0::2] | (nibbles_P[1::2] << 4))

    def _read(self, packed: Tensor, start: int, num_values: int) -> Tensor:
        """Levels from `start` on, int8."""
        if self.bits == 8:
            return packed.view(torch.int8)[start : start + num_values]
        pairs_P = packed[start // 2 : (start + num_values + 1) // 2]
        levels_P = torch.empty(2 * pairs_P.numel(), dtype=torch.int8)
        levels_P[0::2] = (pairs_P << 4).view(torch.int8) >> 4  # the shift of a signed byte brings its sign along
        levels_P[1::2] = pairs_P.view(torch.int8) >> 4
        return levels_P[:num_values]

    # --- numbers ----------------------------------------------------------------------------------------------------

    def _grouped(self, values_P: Tensor) -> Tensor:
        """Values in rows of one group, the last one filled with zeros."""
        missing = -values_P.numel() % self.group
        return torch.nn.functional.pad(values_P, (0, missing)).view(-1, self.group)

    def _scales(self, groups_GV: Tensor) -> Tensor:
        """m / L in float32, rounded towards zero so that L scales never exceed m; 0 for groups that are all but 0."""
        most_G = groups_GV.abs().amax(dim=1)
        scale_G = most_G / self.levels
        over_G = scale_G.double() * self.levels > most_G.double()
        scale_G = torch.where(over_G, torch.nextafter(scale_G, torch.zeros(())), scale_G)
        return torch.where(scale_G >= _SMALLEST_SCALE, scale_G, 0.0)


INT8 = BlockScaled(bits=8, group=256)  # one outlier coarsens 255 neighbours; a scale costs 4 bytes, 1.6 %
INT4 = BlockScaled(bits=4, group=64)  # with 15 levels neighbours must be fewer; 12.5 %


class Int8:
    """Signed bytes with a float32 scale for each 256 values, rounded at random so that the mean is unbiased.

    Error: less than 1/126 of the largest magnitude in the group. Bytes: 1.016 a value.
    """

    class Options(FeedbackOptions):
        pass

    def __init__(self, options: Options) -> None:
        self.name, self.additive, self.feedback = "int8", True, options.feedback

    def encoding(self, dtype: str) -> Encoding:
        return INT8


class Int4:
    """Signed half-bytes with a float32 scale for each 64 values, rounded at random so that the mean is unbiased.

    Error: less than 1/6 of the largest magnitude in the group. Bytes: 0.5625 a value.
    """

    class Options(FeedbackOptions):
        pass

    def __init__(self, options: Options) -> None:
        self.name, self.additive, self.feedback = "int4", True, options.feedback

    def encoding(self, dtype: str) -> Encoding:
        return INT4
