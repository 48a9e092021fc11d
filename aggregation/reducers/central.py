"""Reducers that look for the centre of whole updates: geometric median, centered clipping, FLTrust, q-FedAvg.

Each is a sum of updates with factors, and all its iterations are done on the N x N inner products: one pass over the
updates whatever the number of iterations, and one more for the sum.
"""

from __future__ import annotations

import math

import torch
from pydantic import Field
from torch import Tensor

from atoll.aggregation.reducers.reduction import Metrics
from atoll.aggregation.reducers.spooled import Columns, SpoolingReducer, Updates, linear
from atoll.wire.errors import BadUpdate
from atoll.wire.job import Strict


class GeometricMedian(SpoolingReducer):
    """The point whose weighted distances to the updates have the smallest sum, by smoothed Weiszfeld steps.

    z <- sum_i b_i x_i / sum_i b_i with b_i = w_i / max(nu, ||z - x_i||), begun at the weighted mean (Pillutla et al.
    2019, arXiv:1912.13445, algorithm 1). Breakdown point: half of the weight. Memory: blocks; disk: every update.
    """

    class Options(Strict):
        iterations: int = Field(default=10, ge=1, le=1000)
        nu: float = Field(default=1e-6, gt=0, le=1)  # smallest distance

    def __init__(self, options: Options) -> None:
        self.name = "geometric_median"
        self.options = options

    def columns(self, updates: Updates, seed: int) -> Columns:
        share_N = updates.weights_N / updates.weights_N.sum()
        factors_N = share_N
        for _ in range(self.options.iterations):
            near_N = share_N / distances_N(updates.products_NN, factors_N).clamp_(min=self.options.nu)
            factors_N = near_N / near_N.sum()
        return linear(factors_N)


class CenteredClipping(SpoolingReducer):
    """The mean of updates that are pulled to within a radius around it, found by iteration from the base model.

    v <- v + mean_i (x_i - v) min(1, radius / ||x_i - v||), from v = 0 (Karimireddy et al. 2021, arXiv:2012.10333,
    equation 9). Every update counts the same. Memory: blocks; disk: every update.
    """

    class Options(Strict):
        radius: float = Field(gt=0, le=1e30, allow_inf_nan=False)
        iterations: int = Field(default=1, ge=1, le=1000)

    def __init__(self, options: Options) -> None:
        self.name = "centered_clipping"
        self.options = options

    def columns(self, updates: Updates, seed: int) -> Columns:
        count = len(updates.sites)
        factors_N = torch.zeros(count, dtype=torch.float64)
        for _ in range(self.options.iterations):
            distance_N = distances_N(updates.products_NN, factors_N)
            kept_N = torch.where(distance_N > self.options.radius, self.options.radius / distance_N, 1.0) / count
            factors_N = factors_N * (1 - kept_N.sum()) + kept_N
        return linear(factors_N)


class FLTrust(SpoolingReducer):
    """Updates that point the way of a trusted site's, each as long as that one and weighted by the cosine between them.

    x = sum_i c_i ||x_0|| / ||x_i|| x_i / sum_i c_i with c_i = max(0, cos(x_i, x_0)), over all but x_0 itself (Cao et al.
    2020, arXiv:2012.13995, equations 2 and 4). x_0 comes from a site of the operator's own, which holds the root data.
    Where no update points its way, x_0 alone moves the model. Memory: blocks; disk: every update.
    """

    class Options(Strict):
        trusted: str = Field(min_length=1, max_length=64)  # name of a site

    def __init__(self, options: Options) -> None:
        self.name = "fltrust"
        self.trusted = options.trusted
        self.fewest_updates = 2

    def mixed(self, num_updates: int) -> int:
        return 1  # the trusted one, where no other points its way

    def columns(self, updates: Updates, seed: int) -> Columns:
        if self.trusted not in updates.sites:
            raise BadUpdate(
                f'reducer fltrust measures all updates by that of "{self.trusted}", which is not among them: '
                f"{', '.join(updates.sites)}; start it again, or name another site",
                field="strategy.reducer.trusted",
                value=self.trusted,
            )
        place = list(updates.sites).index(self.trusted)
        lengths_N = updates.products_NN.diagonal().sqrt()
        cosine_N = updates.products_NN[place] / (lengths_N * lengths_N[place])
        trust_N = torch.nan_to_num(cosine_N, nan=0.0, posinf=0.0, neginf=0.0).clamp_(min=0.0)  # of no length: no trust
        trust_N[place] = 0.0
        if not trust_N.any():
            return linear(torch.zeros_like(trust_N).index_fill_(0, torch.tensor(place), 1.0))
        scaled_N = torch.where(trust_N > 0, trust_N * lengths_N[place] / lengths_N, 0.0)
        return linear(scaled_N / trust_N.sum())


class QFedAvg(SpoolingReducer):
    """Sites with a higher loss count more: q = 0 is the plain mean, and the larger q is, the fairer.

    With L = 1 / lr: x = sum_i F_i^q L x_i / sum_i (q F_i^(q-1) ||L x_i||^2 + L F_i^q) (Li et al. 2019,
    arXiv:1905.10497, algorithm 2), where F_i is the mean loss of site i's training (in the paper, of the base model before
    it). Memory: blocks; disk: every update.
    """

    class Options(Strict):
        q: float = Field(default=0.2, ge=0, le=100)
        lr: float = Field(gt=0, le=1e6, allow_inf_nan=False)  # of the sites: 1 / L

    def __init__(self, options: Options) -> None:
        self.name = "qfedavg"
        self.options = options

    def mixed(self, num_updates: int) -> int:
        return num_updates if self.options.q == 0 else 1  # a site's loss may outweigh all others'

    def check(self, site: str, metrics: Metrics) -> None:
        total, count = metrics.get("loss", (math.nan, 1.0))
        loss = total / count if count else math.nan
        if self.options.q > 0 and not 0 < loss < math.inf:
            raise BadUpdate(
                f"reducer qfedavg weights by the training loss, and that of {site} is {loss}; it needs one above 0: "
                "change the app's loss, or take another reducer",
                field="loss",
                value=loss,
                bound="above 0",
            )

    def columns(self, updates: Updates, seed: int) -> Columns:
        q, smoothness = self.options.q, 1.0 / self.options.lr
        losses_N = updates.losses_N
        fair_N = losses_N.pow(q) if q > 0 else torch.ones_like(losses_N)
        squares_N = updates.products_NN.diagonal() * smoothness**2
        slope_N = q * losses_N.pow(q - 1) * squares_N if q > 0 else torch.zeros_like(losses_N)
        return linear(fair_N * smoothness / (slope_N + smoothness * fair_N).sum())


def distances_N(products_NN: Tensor, factors_N: Tensor) -> Tensor:
    """||x_i - z|| of every update to z = sum_j factors_j x_j, from inner products."""
    toward_N = products_NN @ factors_N
    squared_N = products_NN.diagonal() - 2 * toward_N + factors_N @ toward_N
    return squared_N.clamp(min=0.0).sqrt()
