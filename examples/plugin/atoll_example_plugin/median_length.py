"""A bound on the length of updates that nobody has to guess: the sites' own median."""

import torch
from pydantic import Field

from atoll.aggregation.reducers.spooled import Columns, SpoolingReducer, Updates, linear
from atoll.wire.job import Strict


class MedianLength(SpoolingReducer):
    """The mean of updates, each shortened to `times` the median of their lengths.

    x = sum_i min(1, times m / ||x_i||) x_i / N with m the median of ||x_i||. Breakdown point: 0, but no update weighs
    more than `times` the median one while fewer than half of the sites are faulty. Memory: blocks; disk: every update.
    """

    class Options(Strict):
        times: float = Field(default=1.0, ge=1, le=1000)

    def __init__(self, options: Options) -> None:
        self.name = "median_length"
        self.times = options.times

    def columns(self, updates: Updates, seed: int) -> Columns:
        lengths_N = updates.products_NN.diagonal().sqrt()
        most = self.times * lengths_N.median()
        factors_N = torch.where(lengths_N > most, most / lengths_N, 1.0)
        return linear(factors_N / len(factors_N))
