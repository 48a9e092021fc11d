"""The exact sum of a round's updates: 64-bit fixed point, the same bytes in any order and any grouping.

A site's value x enters as the integer round(w / w_max * x / quantum); integers are added, and integer addition is
associative. So nothing of the result depends on who came first, on block sizes or threads, or on whether an edge
server summed some of the sites before (`merge`).

**No overflow.** Let B = 2^e >= bound and N = 2^c >= num_sites, both powers of two, and quantum = 2^(e + c - 62).
Each of at most num_sites terms has w / w_max <= 1 and, since `check` refused everything else, |x| <= B (the `reach`
of an encoding lies between bound and B). So |w / w_max * x / quantum| <= B / quantum = 2^(62 - c) before rounding to an
integer, and after it too, since 2^(62 - c) is one.
The sum is at most 2^c * 2^(62 - c) = 2^62 < 2^63. Dividing by a power of two is exact in float64.

**Two limbs.** Differences that travel in float64 leave a remainder r = t - round(t), exact, |r| <= 1/2. It enters a
second accumulator as round(r * 2^(63 - c)), at most 2^(62 - c): the same proof. Sums then resolve 2^(c - 63) of a
quantum (docs/exact-sums.md).

Assumption: every update that is folded has passed `check`; the server journals it in between.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping
from typing import Self

import numpy as np
import torch
from torch import Tensor

from atoll.aggregation.blocks import BLOCK_VALUES, blocks, byte_view, whole_vector
from atoll.aggregation.check import Terms, check_update
from atoll.aggregation.layout import RawEntry, Segment, UpdateLayout
from atoll.aggregation.partial import Part, PartialLayout, SumTerms, check_partial
from atoll.aggregation.quantum import SUM_BITS, bits, quantum_exponent
from atoll.aggregation.reducers.reduction import NO_METRICS, Metrics
from atoll.wire.errors import BadUpdate
from atoll.wire.manifest import TensorSpec
from atoll.wire.tensors import Buffer

__all__ = ["MAX_SITES", "MAX_WEIGHT", "SUM_BITS", "RoundSum", "quantum_exponent"]

MAX_SITES = 1 << 32
SMALLEST_BOUND, LARGEST_BOUND = 1e-30, 1e30  # quantum and factors then stay far inside float64's exponents
MAX_WEIGHT = 1 << 53  # weights up to here are exact in float64


class _Scratch(threading.local):
    """Blocks that each thread reuses, so that checking and folding allocate nothing."""

    def __init__(self) -> None:
        self.value_P = torch.empty(BLOCK_VALUES, dtype=torch.float64)
        self.whole_P = torch.empty(BLOCK_VALUES, dtype=torch.float64)
        self.term_P = torch.empty(BLOCK_VALUES, dtype=torch.int64)


class RoundSum:
    """The sum of at most `num_sites` updates, each of a weight up to `max_weight` and of values up to `bound`.

    `check` may run in many threads at once; `fold` and `merge` take turns.

    Memory: 8 bytes a value (16 where differences are float64) and three blocks a thread.
    """

    def __init__(self, layout: UpdateLayout, *, num_sites: int, max_weight: int, bound: float) -> None:
        in_range = 1 <= num_sites <= MAX_SITES and 1 <= max_weight <= MAX_WEIGHT
        if not (in_range and SMALLEST_BOUND <= bound <= LARGEST_BOUND):
            raise ValueError(f"a sum of {num_sites} sites, weights up to {max_weight}, values up to {bound}")
        self.layout = layout
        self.num_sites = num_sites
        self.max_weight = max_weight
        self.bound = bound
        self._exponent = quantum_exponent(bound, num_sites)
        self._low_exponent = bits(num_sites) - SUM_BITS - 1  # of the second limb's unit, in quanta
        self._high_V = whole_vector(layout.num_values, torch.int64)
        self._low_L = whole_vector(layout.num_low_values, torch.int64)
        self._raws: dict[str, Tensor] = {}  # uint8, by tensor name
        self._parts: dict[str, Part] = {}  # by site or region
        self._num_updates = 0  # in them
        self._partial = PartialLayout(layout)
        self._scratch = _Scratch()
        self._lock = threading.Lock()

    @property
    def sites(self) -> frozenset[str]:
        """Sites, and regions, whose updates are in the sum."""
        return frozenset(self._parts)

    @property
    def num_updates(self) -> int:
        return self._num_updates

    @property
    def sum_weights(self) -> int:
        return sum(part.weight for part in self._parts.values())

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
        terms = Terms(max_weight=self.max_weight, bound=self.bound)
        check_update(self.layout, terms, payload, weight, site=site, round=round, crc32=crc32)

    # --- fold -------------------------------------------------------------------------------------------------------

    def fold(
        self, site: str, payload: Buffer, weight: int, metrics: Metrics = NO_METRICS, *, scale: float = 1.0
    ) -> None:
        """Adds an update that passed `check`.

        Args:
            metrics: not used by sums.
            scale: of the update's values, from 0 to 1; the weight stays.

        Raises:
            ValueError: the site is in the sum already, the sum is full, or the weight was never checked.
        """
        data = byte_view(payload)
        with self._lock:
            part = Part(weight=weight, num_sites=1, first=site)
            self._admit({site: part})
            if not 1 <= weight <= self.max_weight or data.numel() != self.layout.num_bytes:
                raise ValueError(f"an update of weight {weight} and {data.numel()} bytes was folded unchecked")
            # w / w_max is rounded once, in float64; the power of two changes only the exponent.
            factor = math.ldexp(weight / self.max_weight * scale, -self._exponent)
            for segment in self.layout.segments:
                self._fold_segment(segment, data[segment.offset : segment.offset + segment.num_bytes], factor)
            for entry in self.layout.raws:
                self._fold_raw(entry, data[entry.offset : entry.offset + entry.num_bytes], {site: part})
            self._take({site: part})

    def _admit(self, parts: Mapping[str, Part]) -> None:
        if twice := sorted(name for name in parts if name in self._parts):
            raise ValueError(f"the update of {', '.join(twice)} is in the sum already")
        if sum(part.num_sites for part in parts.values()) + self.num_updates > self.num_sites:
            raise ValueError(f"the sum has room for {self.num_sites} sites")

    def _take(self, parts: Mapping[str, Part]) -> None:
        self._parts.update(parts)
        self._num_updates += sum(part.num_sites for part in parts.values())

    def _fold_segment(self, segment: Segment, region: Tensor, factor: float) -> None:
        scratch = self._scratch
        for start, stop in blocks(segment.num_values):
            value_P, term_P = scratch.value_P[: stop - start], scratch.term_P[: stop - start]
            segment.encoding.decode(region, start, value_P)
            value_P.mul_(factor)
            if segment.encoding.two_limbs:
                whole_P = scratch.whole_P[: stop - start]
                whole_P.copy_(value_P)
                _round(whole_P)
                _round(value_P.sub_(whole_P).mul_(2.0**-self._low_exponent))
                term_P.copy_(value_P)
                low = segment.low_index + start
                _add(self._low_L[low : low + stop - start], term_P)
            else:
                whole_P = _round(value_P)
            term_P.copy_(whole_P)
            _add(self._high_V[segment.index + start : segment.index + stop], term_P)

    def _fold_raw(self, entry: RawEntry, region: Tensor, parts: Mapping[str, Part]) -> None:
        name, known = entry.spec.name, self._raws.get(entry.spec.name)
        if known is None:
            self._raws[name] = region.clone()
        elif entry.choice == "max":
            maximum(entry.spec, known, region)
        elif _first(parts) < _first(self._parts):
            known.copy_(region)

    def merge(self, other: Self) -> None:
        """Adds the sum of other sites: the same bytes as folding their updates here.

        Raises:
            ValueError: the sums are of different layouts, bounds, cohorts or weights, or have a site in common.
        """
        if other._terms != self._terms:
            raise ValueError(f"sums of different terms cannot be added: {other._terms[1:]}, here {self._terms[1:]}")
        with self._lock:
            self._admit(other._parts)
            self._high_V.add_(other._high_V)
            self._low_L.add_(other._low_L)
            for entry in self.layout.raws:
                if other.sites:
                    self._fold_raw(entry, other._raws[entry.spec.name], other._parts)
            self._take(other._parts)

    @property
    def _terms(self) -> tuple[bytes, int, int, float]:
        return self.layout.header, self.num_sites, self.max_weight, self.bound

    # --- parts of a tree --------------------------------------------------------------------------------------------

    @property
    def terms(self) -> SumTerms:
        """What all parts of this sum have in common."""
        return SumTerms(num_sites=self.num_sites, max_weight=self.max_weight, bound=self.bound)

    @property
    def partial_bytes(self) -> int:
        """Length of this sum where it travels."""
        return self._partial.num_bytes

    def write_partial(self, out: Buffer) -> None:
        """Writes this sum, as a region sends it up, into `out` of `partial_bytes`.

        Raises:
            ValueError: no update was folded, or `out` has another length.
        """
        data = byte_view(out)
        if not self._parts or data.numel() != self.partial_bytes:
            raise ValueError(f"a sum of {self.num_updates} updates into {data.numel()} bytes")
        with self._lock:
            part = Part(weight=self.sum_weights, num_sites=self.num_updates, first=_first(self._parts)[0])
            header = self._partial.header(self.terms, part)
            data[: len(header)].copy_(byte_view(header))
            data[self._partial.high].view(torch.int64).copy_(self._high_V)
            data[self._partial.low].view(torch.int64).copy_(self._low_L)
            for gap in self._partial.gaps:
                data[gap].zero_()
            for entry, place in self._partial.raws:
                data[place].copy_(self._raws[entry.spec.name])

    def check_partial(self, payload: Buffer, weight: int, *, num_sites: int, site: str = "", round: int = 0) -> None:
        """Returns where the sum of a region of up to `num_sites` can be added; see `check_partial`. Raises BadUpdate."""
        try:
            check_partial(self._partial, self.terms, payload, weight=weight, num_sites=num_sites)
        except BadUpdate as error:
            error.site, error.round = site, round
            raise

    def merge_partial(self, region: str, payload: Buffer) -> None:
        """Adds a region's sum that passed `check_partial`: the same bytes as folding the updates of its sites here.

        Raises:
            ValueError: the region is in the sum already, or the sum is full.
        """
        part = self._partial.read_header(payload, self.terms)
        data = byte_view(payload)
        with self._lock:
            self._admit({region: part})
            self._high_V.add_(data[self._partial.high].view(torch.int64))
            self._low_L.add_(data[self._partial.low].view(torch.int64))
            for entry, place in self._partial.raws:
                self._fold_raw(entry, data[place], {region: part})
            self._take({region: part})

    # --- result -----------------------------------------------------------------------------------------------------

    def difference(self, index: int, out_P: Tensor) -> None:
        """Writes values from `index` on of the weighted mean of differences, sum(w x) / sum(w), as float64.

        Two roundings, both relative 2^-53: of the factor w_max / sum(w), and of the product.

        Raises:
            ValueError: no update was folded.
        """
        if not self._parts:
            raise ValueError("no update was folded, so there is no mean")
        stop = index + out_P.numel()
        out_P.copy_(self._high_V[index:stop])
        for start, end, low in self._low_parts(index, stop):
            part_P = self._low_L[low : low + end - start].double()
            out_P[start - index : end - index].add_(part_P, alpha=2.0**self._low_exponent)
        out_P.mul_(math.ldexp(self.max_weight / self.sum_weights, self._exponent))

    def _low_parts(self, index: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Parts of values `index` to `stop` that have a second limb: start, end, and place of the start in it."""
        for segment in self.layout.segments:
            start, end = max(index, segment.index), min(stop, segment.index + segment.num_values)
            if segment.encoding.two_limbs and start < end:
                yield start, end, segment.low_index + start - segment.index

    def raw(self, name: str) -> Tensor:
        """The combined bytes (uint8, flat) of a tensor that travels as values.

        Raises:
            ValueError: no update was folded.
        """
        if not self._parts:
            raise ValueError("no update was folded, so there are no values")
        return self._raws[name]


def _first(parts: Mapping[str, Part]) -> tuple[str, str]:
    """The site whose name sorts first, with the member that it came by: two regions may have sites of one name."""
    return min((part.first, member) for member, part in parts.items())


def _round(values_P: Tensor) -> Tensor:
    """To the nearest integer, ties to even, in place.

    By numpy, on one thread: torch splits this one over threads from 2,048 elements on, and on a busy machine they then
    wait for each other (measured: 10 ms a block instead of 0.02 at a load of 14 on 2 cores).
    """
    array = values_P.numpy()
    np.rint(array, out=array)
    return values_P


def _add(sum_P: Tensor, term_P: Tensor) -> None:
    """In place; by numpy, since torch multiplies each integer by its alpha of 1, for four times as long."""
    array = sum_P.numpy()
    np.add(array, term_P.numpy(), out=array)


def maximum(spec: TensorSpec, known: Tensor, region: Tensor) -> None:
    """Elementwise, in place; by numpy, since torch compares no unsigned integers wider than a byte."""
    kept, new = known.numpy().view(spec.dtype), region.numpy().view(spec.dtype)
    np.maximum(kept, new, out=kept)
