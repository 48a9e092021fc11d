"""Differences as signed bytes with one float32 scale for each 256 of them, rounded up or down at random.

A value x of a group with largest magnitude m becomes q = floor(x / s + u), s = m / 127 rounded towards zero and u
uniform in [0, 1), so that E[q s] = x: errors of sites average out (Gupta et al. 2015, arXiv:1502.02551, section 2).
Error of a value: less than s + 2^-23 m, so less than m / 126. A group whose m is below 127 * 2^-126 becomes zeros.
Region: all scales, then all bytes; 1.016 bytes a value.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from atoll.aggregation.blocks import largest_magnitude
from atoll.aggregation.codecs.encoding import Encoding
from atoll.aggregation.rounding import Rounding
from atoll.wire.job import Strict

GROUP_VALUES = 256  # one outlier coarsens 255 neighbours; a scale costs 4 bytes, 1.6 %
LEVELS = 127  # -128 has no opposite and is never written
_SMALLEST_SCALE = torch.finfo(torch.float32).smallest_normal


class BlockInt8:
    """The encoding of the `int8` codec."""

    name = "int8/256"
    alignment = 4
    group = GROUP_VALUES
    two_limbs = False
    limit = torch.finfo(torch.float32).max

    def reach(self, bound: float) -> float:
        return torch.tensor(bound, dtype=torch.float32).item()  # 127 scales never exceed the largest magnitude

    def num_bytes(self, num_values: int) -> int:
        return 4 * _num_groups(num_values) + num_values

    def encode(self, values_P: Tensor, region: Tensor, start: int, rounding: Rounding, index: int) -> None:
        scales_G, levels_P = _parts(region)
        groups_GV = _grouped(values_P.to(torch.float32))
        scale_G = _scales(groups_GV)
        first = start // GROUP_VALUES
        scales_G[first : first + scale_G.numel()].copy_(scale_G)
        divisor_G = torch.where(scale_G > 0, scale_G, torch.inf)  # x / inf = 0
        ratio_P = (groups_GV / divisor_G[:, None]).reshape(-1)[: values_P.numel()]
        floor_P = torch.from_numpy(np.floor(ratio_P.numpy()))  # torch would split it over threads (see round_sum)
        # frac < 1 and u < 1 are exact in float32, so up is drawn with probability frac (to 2^-24).
        up_P = rounding.uniform(index, values_P.numel()) < ratio_P - floor_P
        levels_P[start : start + values_P.numel()].copy_((floor_P + up_P).clamp_(-LEVELS, LEVELS))

    def decode(self, region: Tensor, start: int, out_P: Tensor) -> None:
        scales_G, levels_P = _parts(region)
        num_values = out_P.numel()
        out_P.copy_(levels_P[start : start + num_values])
        first, whole = start // GROUP_VALUES, num_values // GROUP_VALUES * GROUP_VALUES
        last = first + whole // GROUP_VALUES
        # 7 and 24 significant bits: the product is exact in float64.
        out_P[:whole].view(-1, GROUP_VALUES).mul_(scales_G[first:last, None])
        if whole < num_values:
            out_P[whole:].mul_(scales_G[last])

    def magnitude(self, region: Tensor, start: int, stop: int) -> float:
        scales_G, levels_P = _parts(region)
        scale_G = scales_G[start // GROUP_VALUES : _num_groups(stop)]
        if torch.signbit(scale_G).any():
            raise ValueError("a negative scale")
        if levels_P[start:stop].min() < -LEVELS:
            raise ValueError("a level of -128")
        return largest_magnitude(scale_G) * LEVELS


class Int8:
    """Signed bytes with a float32 scale for each 256 values, rounded at random so that the mean is unbiased.

    Error: less than 1/126 of the largest magnitude in the group. Bytes: 1.016 a value.
    """

    class Options(Strict):
        pass

    def __init__(self, options: Options) -> None:
        self.name, self.additive = "int8", True

    def encoding(self, dtype: str) -> Encoding:
        return _BLOCK_INT8


_BLOCK_INT8 = BlockInt8()


def _num_groups(num_values: int) -> int:
    return -(-num_values // GROUP_VALUES)


def _parts(region: Tensor) -> tuple[Tensor, Tensor]:
    """Scales (float32) and levels (int8) of a region: n values take n + 4 ceil(n / 256) bytes, so the length says n."""
    num_bytes = region.numel()
    num_groups = -(-num_bytes // (GROUP_VALUES + 4))
    return region[: 4 * num_groups].view(torch.float32), region[4 * num_groups :].view(torch.int8)


def _grouped(values_P: Tensor) -> Tensor:
    """Values in rows of one group, the last one filled with zeros."""
    missing = -values_P.numel() % GROUP_VALUES
    return torch.nn.functional.pad(values_P, (0, missing)).view(-1, GROUP_VALUES)


def _scales(groups_GV: Tensor) -> Tensor:
    """m / 127 in float32, rounded towards zero so that 127 scales never exceed m; 0 for groups that are all but 0."""
    most_G = groups_GV.abs().amax(dim=1)
    scale_G = most_G / LEVELS
    over_G = scale_G.double() * LEVELS > most_G.double()
    scale_G = torch.where(over_G, torch.nextafter(scale_G, torch.zeros(())), scale_G)
    return torch.where(scale_G >= _SMALLEST_SCALE, scale_G, 0.0)
