"""Reducers that need every update: kept in files until the version is made, then combined block by block.

A reducer says how, as a `Combination`: from what is known of the updates as wholes (weights, lengths, the angles
between them) it makes a function of N values of one coordinate, which runs over blocks of coordinates. So a reducer is
its formula and nothing else.

N = updates, P = values of one block, d = values of the model.

Invariant: updates are worked on in the order of their sites' names, and every result is a function of positions alone,
so neither the order of arrival nor the cutting into blocks changes a bit. Memory: blocks only; disk: N updates.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from atoll.aggregation.blocks import BLOCK_VALUES, blocks, byte_view
from atoll.aggregation.check import Terms, check_update
from atoll.aggregation.layout import UpdateLayout
from atoll.aggregation.reducers.reduction import NO_METRICS, Metrics, Reduction, RoundTerms
from atoll.aggregation.round_sum import maximum
from atoll.wire.errors import BadUpdate, DiskFull, LocalError
from atoll.wire.room import NO_ROOM, reserve
from atoll.wire.tensors import Buffer

_MATRIX_VALUES = 1 << 20  # of one block of all updates together: 8 MiB in float64

Columns = Callable[[Tensor], Tensor]  # values of a block, (N, P) float64, to the combined ones, (P,)


class Updates(Protocol):
    """What a combination may look at before it sees single values. All sequences are in the order of `sites`."""

    @property
    def sites(self) -> Sequence[str]:
        """Sorted; N of them."""
        ...

    @property
    def weights_N(self) -> Tensor:
        """Examples, float64."""
        ...

    @property
    def losses_N(self) -> Tensor:
        """Mean training loss as each site reported it, float64; NaN where it did not."""
        ...

    @property
    def products_NN(self) -> Tensor:
        """Inner products of all pairs of updates, float64. One pass over all updates; worked out when first asked."""
        ...


class Combination(Protocol):
    """A robust reducer's formula."""

    def check(self, site: str, metrics: Metrics) -> None:
        """Returns where an update with these metrics can be combined. Raises BadUpdate."""
        ...

    def columns(self, updates: Updates, seed: int) -> Columns:
        """How the values of one coordinate combine.

        Args:
            seed: of what is drawn by lot in this round.

        Raises:
            BadUpdate: these updates cannot be combined; names what is missing.
        """
        ...


class SpoolingReducer:
    """Base of reducers that need all updates: a formula, and how many updates it takes."""

    name: str
    needs: Literal["sum", "all"] = "all"
    fewest_updates: int = 1

    def mixed(self, num_updates: int) -> int:
        """All of them, unless a formula says otherwise."""
        return num_updates

    def check(self, site: str, metrics: Metrics) -> None:
        """Nothing but the update itself is looked at, unless a formula says otherwise."""

    def columns(self, updates: Updates, seed: int) -> Columns:
        raise NotImplementedError

    def init(self, layout: UpdateLayout, terms: RoundTerms) -> Reduction:
        return Spooled(layout, terms, self)


@dataclass(frozen=True, slots=True)
class _Kept:
    data: Tensor  # uint8, the whole update
    weight: int
    loss: float


class Spooled:
    """All updates of a round, and what a combination makes of them.

    `check` may run in many threads at once, and so may `difference` once everything is folded.
    """

    def __init__(self, layout: UpdateLayout, terms: RoundTerms, combination: Combination) -> None:
        self.layout = layout
        self._terms = terms
        self._combination = combination
        self._kept: dict[str, _Kept] = {}
        self._columns: tuple[frozenset[str], Columns] | None = None  # with the sites that they are made for
        self._lock = threading.Lock()

    @property
    def num_updates(self) -> int:
        return len(self._kept)

    @property
    def sum_weights(self) -> int:
        return sum(kept.weight for kept in self._kept.values())

    def check(
        self,
        payload: Buffer,
        weight: int,
        *,
        site: str = "",
        round: int = 0,
        crc32: int | None = None,
        metrics: Metrics = NO_METRICS,
    ) -> None:
        """Returns where the update can be folded; see `check_update`. Raises BadUpdate."""
        self._combination.check(site, metrics)
        terms = Terms(max_weight=self._terms.max_weight, bound=self._terms.bound)
        check_update(self.layout, terms, payload, weight, site=site, round=round, crc32=crc32)

    def fold(
        self, site: str, payload: Buffer, weight: int, metrics: Metrics = NO_METRICS, *, scale: float = 1.0
    ) -> None:
        if scale != 1.0:
            raise ValueError("an update that is combined by itself cannot be discounted")
        data = byte_view(payload)
        with self._lock:
            self._require_new([site])
            if not 1 <= weight <= self._terms.max_weight or data.numel() != self.layout.num_bytes:
                raise ValueError(f"an update of weight {weight} and {data.numel()} bytes was folded unchecked")
            total, count = metrics.get("loss", (float("nan"), 1.0))
            kept = kept_copy(payload, self._terms.spool)
            self._kept[site] = _Kept(byte_view(kept), weight, total / count if count else float("nan"))

    def merge(self, other: Self) -> None:
        """Takes in the updates of `other`. Raises ValueError for a site in both, or for another layout."""
        if other.layout.header != self.layout.header:
            raise ValueError("updates of different layouts cannot be combined")
        with self._lock:
            self._require_new(other._kept)
            self._kept.update(other._kept)

    def _require_new(self, sites: Sequence[str] | Mapping[str, _Kept]) -> None:
        if twice := sorted(set(sites) & self._kept.keys()):
            raise ValueError(f"the update of {', '.join(twice)} is in the sum already")
        if len(sites) + len(self._kept) > self._terms.num_sites:
            raise ValueError(f"the sum has room for {self._terms.num_sites} sites")

    # --- result -----------------------------------------------------------------------------------------------------

    def difference(self, index: int, out_P: Tensor) -> None:
        """Writes values from `index` on of what the combination makes, as float64.

        Raises:
            ValueError: no update was folded.
            BadUpdate: the combination cannot be made of these updates.
        """
        updates = self._updates()
        columns = self._columns_of(updates)
        step = max(256, min(BLOCK_VALUES, _MATRIX_VALUES // len(updates.sites)))
        for start, stop in blocks(out_P.numel(), step):
            out_P[start:stop].copy_(columns(updates.values_NP(index + start, index + stop)))

    def raw(self, name: str) -> Tensor:
        """The combined bytes (uint8, flat) of a tensor that travels as values. Raises ValueError where empty."""
        updates = self._updates()
        entry = next(entry for entry in self.layout.raws if entry.spec.name == name)
        regions = [data[entry.offset : entry.offset + entry.num_bytes] for data in updates.data]
        combined = regions[0].clone()  # of the site whose name sorts first
        if entry.choice == "max":
            for region in regions[1:]:
                maximum(entry.spec, combined, region)
        return combined

    def _updates(self) -> _Sorted:
        if not self._kept:
            raise ValueError("no update was folded, so there is nothing to combine")
        return _Sorted(self.layout, self._kept)

    def _columns_of(self, updates: _Sorted) -> Columns:
        with self._lock:
            folded = frozenset(self._kept)
            if self._columns is None or self._columns[0] != folded:
                self._columns = folded, self._combination.columns(updates, self._terms.seed)
            return self._columns[1]


class _Sorted:
    """The updates by the names of their sites."""

    def __init__(self, layout: UpdateLayout, kept: Mapping[str, _Kept]) -> None:
        self.sites = tuple(sorted(kept))
        self.data = [kept[site].data for site in self.sites]
        self.weights_N = torch.tensor([kept[site].weight for site in self.sites], dtype=torch.float64)
        self.losses_N = torch.tensor([kept[site].loss for site in self.sites], dtype=torch.float64)
        self._layout = layout
        self._starts = [segment.index for segment in layout.segments]
        self._products_NN: Tensor | None = None

    def values_NP(self, start: int, stop: int) -> Tensor:
        """Values `start` to `stop` of every update."""
        values_NP = torch.empty(len(self.sites), stop - start, dtype=torch.float64)
        for row_P, data in zip(values_NP, self.data, strict=True):
            self._decode(data, start, row_P)
        return values_NP

    def _decode(self, data: Tensor, start: int, out_P: Tensor) -> None:
        stop = start + out_P.numel()
        for segment in self._layout.segments[max(0, bisect_right(self._starts, start) - 1) :]:
            if segment.index >= stop:
                return
            first = max(start, segment.index) - segment.index
            last = min(stop, segment.index + segment.num_values) - segment.index
            if first >= last:
                continue
            group = segment.encoding.group
            aligned, end = first // group * group, min(segment.num_values, -(-last // group) * group)
            block_P = torch.empty(end - aligned, dtype=torch.float64)
            segment.encoding.decode(data[segment.offset : segment.offset + segment.num_bytes], aligned, block_P)
            out_P[segment.index + first - start : segment.index + last - start].copy_(
                block_P[first - aligned : last - aligned]
            )

    @property
    def products_NN(self) -> Tensor:
        if self._products_NN is None:
            self._products_NN = self._multiplied()
        return self._products_NN

    def _multiplied(self) -> Tensor:
        """By blocks whose borders depend on N alone."""
        total_NN = torch.zeros(len(self.sites), len(self.sites), dtype=torch.float64)
        step = max(256, min(BLOCK_VALUES, _MATRIX_VALUES // len(self.sites)))
        for start, stop in blocks(self._layout.num_values, step):
            values_NP = self.values_NP(start, stop)
            total_NN += values_NP @ values_NP.T
        return total_NN


# --- what formulas are made of --------------------------------------------------------------------------------------


def linear(factors_N: Tensor) -> Columns:
    """The sum of updates times their factors.

    Product and sum are rounded one after the other, update by update: a library's dot product may round otherwise at
    the end of a block than within it.
    """
    used = [(row, float(factor)) for row, factor in enumerate(factors_N.tolist()) if factor != 0.0]

    def columns(values_NP: Tensor) -> Tensor:
        total_P = np.zeros(values_NP.shape[1])
        for row, factor in used:
            total_P += values_NP[row].numpy() * factor
        return torch.from_numpy(total_P)

    return columns


def squared_distances_NN(products_NN: Tensor) -> Tensor:
    """||x_i - x_j||^2 of all pairs, from their inner products."""
    squares_N = products_NN.diagonal()
    return (squares_N[:, None] + squares_N[None, :] - 2 * products_NN).clamp_(min=0.0).fill_diagonal_(0.0)


def kept_copy(payload: Buffer, spool: Path | None) -> Buffer:
    """A copy of an update that outlives the buffer it came in: in memory, or in a file that has no name.

    The file goes with the last view of it, or with the process: after a crash the sites send their updates again.
    """
    data = memoryview(payload).cast("B")
    if spool is None:
        return bytes(data)
    try:
        spool.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=spool) as file:
            reserve(file.fileno(), data.nbytes)
            mapping = mmap.mmap(file.fileno(), data.nbytes)
    except OSError as error:
        if error.errno in NO_ROOM:
            raise DiskFull(f"{spool}: no room to keep an update of {data.nbytes} bytes; free some") from None
        raise LocalError(f"{spool}: cannot be written: {os.strerror(error.errno or 0)}") from None
    mapping[:] = data
    return mapping


def require_updates(name: str, found: int, wanted: int, why: str) -> None:
    """Returns where there are enough updates. Raises BadUpdate, which names the reducer and the condition."""
    if found < wanted:
        raise BadUpdate(
            f"reducer {name} needs at least {wanted} updates ({why}), there are {found}; start more sites, or lower "
            "the number of faulty ones in the job",
            field="strategy.reducer",
            value=found,
            bound=wanted,
        )
