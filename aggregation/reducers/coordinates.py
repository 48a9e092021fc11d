"""Reducers that look at each coordinate by itself: median and trimmed mean. Every update counts the same."""

from __future__ import annotations

import math

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from atoll.aggregation.reducers.spooled import Columns, SpoolingReducer, Updates
from atoll.wire.job import Strict


class Median(SpoolingReducer):
    """The median of each coordinate, unweighted; between the two middle ones of an even number, their mean.

    (Yin et al. 2018, arXiv:1803.01498, option I.) Breakdown point: 1/2. Memory: blocks; disk: every update.
    """

    class Options(Strict):
        pass

    def __init__(self, options: Options) -> None:
        self.name = "median"

    def mixed(self, num_updates: int) -> int:
        return 2 - num_updates % 2

    def columns(self, updates: Updates, seed: int) -> Columns:
        def columns(values_NP: Tensor) -> Tensor:
            ordered_NP = values_NP.sort(dim=0).values
            count = len(ordered_NP)
            return (ordered_NP[(count - 1) // 2] + ordered_NP[count // 2]) / 2

        return columns


class TrimmedMean(SpoolingReducer):
    """The mean of each coordinate without a share of its smallest and of its largest values, unweighted.

    floor(fraction N) values go at each end (Yin et al. 2018, arXiv:1803.01498, option II). Breakdown point: `fraction`.
    Memory: blocks; disk: every update.
    """

    class Options(Strict):
        fraction: float = Field(default=0.2, ge=0, lt=0.5)  # at each end

    def __init__(self, options: Options) -> None:
        self.name = "trimmed_mean"
        self.fraction = options.fraction

    def mixed(self, num_updates: int) -> int:
        return num_updates - 2 * math.floor(self.fraction * num_updates)

    def columns(self, updates: Updates, seed: int) -> Columns:
        count = len(updates.sites)
        cut = math.floor(self.fraction * count)

        def columns(values_NP: Tensor) -> Tensor:
            return mean_of_rows(values_NP.sort(dim=0).values[cut : count - cut])

        return columns


def mean_of_rows(values_NP: Tensor) -> Tensor:
    """The mean over updates, added up in their order, so that no cutting into blocks changes its rounding."""
    total_P = np.zeros(values_NP.shape[1])
    for row_P in values_NP.numpy():
        total_P += row_P
    return torch.from_numpy(total_P / len(values_NP))
