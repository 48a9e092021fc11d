"""Reducers that choose updates by their distances to the others: Krum, multi-Krum, Bulyan. Every update counts the same.

`faulty` is f, the number of sites that may send anything at all; N is the number of updates that came.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from atoll.aggregation.reducers.coordinates import mean_of_rows
from atoll.aggregation.reducers.spooled import (
    Columns,
    SpoolingReducer,
    Updates,
    linear,
    require_updates,
    squared_distances_NN,
)
from atoll.wire.job import Strict


class Krum(SpoolingReducer):
    """The one update that lies closest to its N - f - 2 nearest neighbours.

    (Blanchard et al. 2017, arXiv:1703.02757, section 4.) Needs N >= 2 f + 3. Memory: blocks; disk: every update.
    """

    class Options(Strict):
        faulty: int = Field(ge=0, le=100_000)

    def __init__(self, options: Options) -> None:
        self.name = "krum"
        self.faulty = options.faulty
        self.fewest_updates = 2 * options.faulty + 3

    def mixed(self, num_updates: int) -> int:
        return 1

    def columns(self, updates: Updates, seed: int) -> Columns:
        return linear(_chosen(updates, self.name, self.faulty, 1))


class MultiKrum(SpoolingReducer):
    """The mean of the `select` updates that lie closest to their N - f - 2 nearest neighbours.

    (Blanchard et al. 2017, arXiv:1703.02757, section 5.) Needs N >= 2 f + 3; `select` is N - f where it is not given.
    Memory: blocks; disk: every update.
    """

    class Options(Strict):
        faulty: int = Field(ge=0, le=100_000)
        select: int | None = Field(default=None, ge=1, le=100_000)

    def __init__(self, options: Options) -> None:
        self.name = "multi_krum"
        self.faulty, self.select = options.faulty, options.select
        self.fewest_updates = max(2 * options.faulty + 3, (options.select or 0) + options.faulty)

    def mixed(self, num_updates: int) -> int:
        return self.select or num_updates - self.faulty

    def columns(self, updates: Updates, seed: int) -> Columns:
        select = self.select or len(updates.sites) - self.faulty
        return linear(_chosen(updates, self.name, self.faulty, select))


class Bulyan(SpoolingReducer):
    """Updates chosen by repeated Krum, then of each coordinate the mean of the values nearest to the median.

    N - 2 f are chosen, N - 4 f values of each coordinate are averaged (El Mhamdi et al. 2018, arXiv:1802.07927,
    section 4). Needs N >= 4 f + 3. Memory: blocks; disk: every update.
    """

    class Options(Strict):
        faulty: int = Field(ge=0, le=100_000)

    def __init__(self, options: Options) -> None:
        self.name = "bulyan"
        self.faulty = options.faulty
        self.fewest_updates = 4 * options.faulty + 3

    def mixed(self, num_updates: int) -> int:
        return num_updates - 4 * self.faulty

    def columns(self, updates: Updates, seed: int) -> Columns:
        count = len(updates.sites)
        require_updates(self.name, count, self.fewest_updates, f"4 faulty + 3, faulty = {self.faulty}")
        distances_NN = squared_distances_NN(updates.products_NN)
        remaining = list(range(count))
        chosen: list[int] = []
        while len(chosen) < count - 2 * self.faulty:
            scores = krum_scores_N(distances_NN[remaining][:, remaining], self.faulty)
            chosen.append(remaining.pop(int(scores.argmin())))
        rows = sorted(chosen)
        keep = len(rows) - 2 * self.faulty

        def columns(values_NP: Tensor) -> Tensor:
            ordered_NP = values_NP[rows].sort(dim=0).values
            middle_P = (ordered_NP[(len(rows) - 1) // 2] + ordered_NP[len(rows) // 2]) / 2
            nearest_NP = (ordered_NP - middle_P).abs().sort(dim=0, stable=True).indices[:keep]
            return mean_of_rows(ordered_NP.gather(0, nearest_NP.sort(dim=0).values))

        return columns


def _chosen(updates: Updates, name: str, faulty: int, select: int) -> Tensor:
    """1 / `select` for each chosen update, 0 for the others."""
    count = len(updates.sites)
    wanted = max(2 * faulty + 3, select + faulty if select > 1 else 0)
    require_updates(name, count, wanted, f"2 faulty + 3, and select + faulty; faulty = {faulty}, select = {select}")
    scores_N = krum_scores_N(squared_distances_NN(updates.products_NN), faulty)
    best = scores_N.sort(stable=True).indices[:select]
    return torch.zeros(count, dtype=torch.float64).index_fill_(0, best, 1.0 / select)


def krum_scores_N(distances_NN: Tensor, faulty: int) -> Tensor:
    """The sum of squared distances of each update to its N - f - 2 nearest others, and to 1 at least."""
    near = max(1, len(distances_NN) - faulty - 2)
    return distances_NN.sort(dim=1).values[:, 1 : 1 + near].sum(dim=1)  # column 0 is the distance to itself
