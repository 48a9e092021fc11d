"""Reducers that take each update in and forget it: the weighted mean, and the mean of updates of bounded length."""

from __future__ import annotations

import math
from typing import Literal

import torch
from pydantic import Field

from atoll.aggregation.blocks import BLOCK_VALUES, blocks, byte_view
from atoll.aggregation.layout import UpdateLayout
from atoll.aggregation.reducers.reduction import NO_METRICS, Metrics, Reduction, RoundTerms
from atoll.aggregation.round_sum import RoundSum
from atoll.wire.job import Strict
from atoll.wire.tensors import Buffer


class Mean:
    """The mean of differences, weighted by examples, summed exactly.

    x = sum_i w_i x_i / sum_i w_i (McMahan et al. 2016, arXiv:1602.05629, algorithm 1).
    Breakdown point: 0; one site can move it anywhere within the bound. Memory: 2 float32 models.
    """

    class Options(Strict):
        pass

    def __init__(self, options: Options) -> None:
        self.name: str = "mean"
        self.needs: Literal["sum", "all"] = "sum"
        self.fewest_updates = 1

    def mixed(self, num_updates: int) -> int:
        return num_updates

    def init(self, layout: UpdateLayout, terms: RoundTerms) -> Reduction:
        return RoundSum(layout, num_sites=terms.num_sites, max_weight=terms.max_weight, bound=terms.bound)


class NormBound:
    """The weighted mean of updates that are shortened to a length: no site moves the model further than that.

    x = sum_i w_i min(1, norm / ||x_i||) x_i / sum_i w_i (Sun et al. 2019, arXiv:1911.07963, section 4.1), where ||x_i||
    is the Euclidean length over all values that are averaged. Breakdown point: 0, but with damage of at most `norm`
    for each site's share of the weight. Memory: 2 float32 models.
    """

    class Options(Strict):
        norm: float = Field(gt=0, le=1e30, allow_inf_nan=False)

    def __init__(self, options: Options) -> None:
        self.name: str = "norm_bound"
        self.needs: Literal["sum", "all"] = "sum"
        self.fewest_updates = 1
        self.norm = options.norm

    def mixed(self, num_updates: int) -> int:
        return num_updates

    def init(self, layout: UpdateLayout, terms: RoundTerms) -> Reduction:
        return _BoundedSum(self.norm, layout, terms)


class _BoundedSum(RoundSum):
    """A sum whose terms are shortened before they are rounded to the quantum."""

    def __init__(self, norm: float, layout: UpdateLayout, terms: RoundTerms) -> None:
        super().__init__(layout, num_sites=terms.num_sites, max_weight=terms.max_weight, bound=terms.bound)
        self._norm = norm

    def fold(
        self, site: str, payload: Buffer, weight: int, metrics: Metrics = NO_METRICS, *, scale: float = 1.0
    ) -> None:
        length = norm_of(self.layout, payload)
        super().fold(site, payload, weight, scale=scale * min(1.0, self._norm / length) if length > 0 else scale)


def norm_of(layout: UpdateLayout, payload: Buffer) -> float:
    """The Euclidean length of an update: of all values that are averaged."""
    data = byte_view(payload)
    scratch_P = torch.empty(BLOCK_VALUES, dtype=torch.float64)
    squares: list[float] = []
    for segment in layout.segments:
        region = data[segment.offset : segment.offset + segment.num_bytes]
        for start, stop in blocks(segment.num_values):
            values_P = scratch_P[: stop - start]
            segment.encoding.decode(region, start, values_P)
            squares.append(float(torch.dot(values_P, values_P)))
    return math.sqrt(math.fsum(squares))
