"""A robust reducer over the sums of buckets, each of a session of its own: all that it sees is their means.

B = buckets, P = values of one block. Memory: 4 or 2 bytes a value for each bucket, and blocks.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from atoll.aggregation.blocks import BLOCK_VALUES, blocks
from atoll.aggregation.layout import UpdateLayout
from atoll.aggregation.reducers.reduction import NO_METRICS, Metrics
from atoll.aggregation.reducers.spooled import Columns, SpoolingReducer
from atoll.server.masked_sum import MaskedSum
from atoll.wire.errors import BadUpdate
from atoll.wire.tensors import Buffer


class BucketSums:
    """`Reduction` of `next_model`, and the `Updates` that the inner reducer looks at."""

    def __init__(self, sums: Mapping[str, MaskedSum], inner: SpoolingReducer, *, seed: int) -> None:
        """
        Args:
            sums: unmasked ones, by what names their sites.
            seed: of what the inner reducer draws by lot.
        """
        self.sites: Sequence[str] = tuple(sorted(sums))
        self._sums = [sums[site] for site in self.sites]
        self._inner, self._seed = inner, seed
        self._products_BB: Tensor | None = None
        self._columns: Columns | None = None
        self._lock = threading.RLock()

    @property
    def layout(self) -> UpdateLayout:
        return self._sums[0].layout

    @property
    def num_updates(self) -> int:
        return sum(one.num_updates for one in self._sums)

    @property
    def sum_weights(self) -> int:
        return sum(one.sum_weights for one in self._sums)

    # --- Updates ----------------------------------------------------------------------------------------------------

    @property
    def weights_N(self) -> Tensor:
        return torch.tensor([one.sum_weights for one in self._sums], dtype=torch.float64)

    @property
    def losses_N(self) -> Tensor:
        """Of the examples of a bucket together, where the job names the metric."""
        pairs = [one.counted.metrics.get("loss", (float("nan"), 1.0)) for one in self._sums]
        return torch.tensor([total / count for total, count in pairs], dtype=torch.float64)

    @property
    def products_NN(self) -> Tensor:
        with self._lock:
            if self._products_BB is None:
                count = len(self._sums)
                self._products_BB = torch.zeros(count, count, dtype=torch.float64)
                for start, stop in blocks(self.layout.num_values, BLOCK_VALUES):
                    means_BP = self._means_BP(start, stop)
                    self._products_BB += means_BP @ means_BP.T
            return self._products_BB

    def _means_BP(self, start: int, stop: int) -> Tensor:
        means_BP = torch.empty(len(self._sums), stop - start, dtype=torch.float64)
        for mean_P, one in zip(means_BP, self._sums, strict=True):
            one.difference(start, mean_P)
        return means_BP

    # --- Reduction --------------------------------------------------------------------------------------------------

    def difference(self, index: int, out_P: Tensor) -> None:
        """Writes values from `index` on of what the inner reducer makes of the buckets' means.

        Raises:
            BadUpdate: it cannot be made of these.
        """
        with self._lock:
            if self._columns is None:
                self._columns = self._inner.columns(self, self._seed)
        for start, stop in blocks(out_P.numel(), BLOCK_VALUES):
            out_P[start:stop].copy_(self._columns(self._means_BP(index + start, index + stop)))

    def raw(self, name: str) -> Tensor:
        raise ValueError(f"{name} is not averaged, and nothing else is in a masked sum")

    def check(self, payload: Buffer, weight: int, **about: Any) -> None:
        raise BadUpdate("updates of this run come masked, within a session alone")

    def fold(
        self, site: str, payload: Buffer, weight: int, metrics: Metrics = NO_METRICS, *, scale: float = 1.0
    ) -> None:
        raise ValueError("updates of this run come masked, within a session alone")

    def merge(self, other: Self) -> None:
        raise ValueError("sums of two sessions have masks of their own")
