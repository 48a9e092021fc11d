"""Bucketing: another robust reducer on means of a few updates each, so that it bears uneven data."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from atoll.aggregation.reducers.central import FLTrust
from atoll.aggregation.reducers.reduction import Metrics
from atoll.aggregation.reducers.spooled import Columns, SpoolingReducer, Updates
from atoll.wire.errors import ConfigError
from atoll.wire.job import Part, Strict


class Bucketing(SpoolingReducer):
    """Updates are dealt at random into buckets of `size`, and the inner reducer works on the buckets' means.

    (Karimireddy et al. 2022, arXiv:2006.09365, algorithm 1.) A faulty site spoils its whole bucket: the inner reducer's
    `faulty` counts buckets. Weights and losses of a bucket are the sum and the mean of its sites'. Memory: blocks; disk:
    every update.
    """

    class Options(Strict):
        size: int = Field(default=2, ge=1, le=1000)
        inner: Part

    def __init__(self, options: Options) -> None:
        from atoll.aggregation.parts import build  # parts lists this class

        self.name = "bucketing"
        self.size = options.size
        self.inner: Any = build("reducer", options.inner.kind, options.inner.options)
        if not isinstance(self.inner, SpoolingReducer) or isinstance(self.inner, Bucketing | FLTrust):
            raise ConfigError(
                f"strategy.reducer.inner.kind = {options.inner.kind!r}: bucketing works with reducers that look at "
                "each update and know no site by name, such as krum, median or geometric_median",
                key="strategy.reducer.inner.kind",
                value=options.inner.kind,
            )
        self.fewest_updates = (self.inner.fewest_updates - 1) * self.size + 1

    def mixed(self, num_updates: int) -> int:
        smallest = num_updates % self.size or self.size
        return int(self.inner.mixed(-(-num_updates // self.size))) * smallest

    def check(self, site: str, metrics: Metrics) -> None:
        self.inner.check(site, metrics)

    def columns(self, updates: Updates, seed: int) -> Columns:
        dealt = sorted(range(len(updates.sites)), key=lambda row: _lot(seed, updates.sites[row]))
        rows = [sorted(dealt[start : start + self.size]) for start in range(0, len(dealt), self.size)]
        mixing_BN = torch.zeros(len(rows), len(dealt), dtype=torch.float64)
        for bucket, members in enumerate(rows):
            mixing_BN[bucket, members] = 1.0 / len(members)
        inner: Columns = self.inner.columns(_Buckets(updates, mixing_BN, rows), seed)

        def columns(values_NP: Tensor) -> Tensor:
            means_BP = torch.empty(len(rows), values_NP.shape[1], dtype=torch.float64)
            for mean_P, members in zip(means_BP, rows, strict=True):
                mean_P.copy_(values_NP[members[0]])
                for row in members[1:]:
                    mean_P += values_NP[row]
                mean_P /= len(members)
            return inner(means_BP)

        return columns


class _Buckets:
    """Means of updates, as the inner reducer sees them. B = buckets."""

    def __init__(self, updates: Updates, mixing_BN: Tensor, rows: Sequence[Sequence[int]]) -> None:
        self.sites = ["+".join(updates.sites[row] for row in members) for members in rows]
        self.weights_N = torch.stack([updates.weights_N[list(members)].sum() for members in rows])
        self.losses_N = torch.stack([updates.losses_N[list(members)].mean() for members in rows])
        self._updates, self._mixing_BN = updates, mixing_BN

    @property
    def products_NN(self) -> Tensor:
        return self._mixing_BN @ self._updates.products_NN @ self._mixing_BN.T


def whole_buckets(sites: Sequence[str], size: int, seed: int) -> tuple[tuple[str, ...], ...]:
    """Sites dealt into buckets of `size` or more each, sorted within; one bucket where they are fewer.

    The lots are those of `Bucketing`. Where sites are left over, they go to the first buckets, one each in turn.
    """
    dealt = sorted(sites, key=lambda site: _lot(seed, site))
    count = max(1, len(dealt) // size)
    rows = [dealt[start : start + size] for start in range(0, count * size, size)]
    for place, site in enumerate(dealt[count * size :]):
        rows[place % count].append(site)
    return tuple(tuple(sorted(row)) for row in rows)


def _lot(seed: int, site: str) -> bytes:
    return hashlib.sha256(f"bucket {seed} {site}".encode()).digest()
