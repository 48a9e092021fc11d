"""The exact sum of a region's updates as bytes: what a region sends up a tree in place of an update.

::

    header of 192 bytes | first limbs, int64 | second limbs, int64 | tensors that travel as values, each aligned to 8

The header names the layout of updates, the terms of the whole round's sum, and what this part holds: how many sites,
the sum of their weights, and the name that sorts first among them. Everything is little endian, bytes between regions
are zero, and the length follows from the model, so equal sums have equal bytes.

**What the check proves.** The limbs are integers, so nothing in them is infinite or NaN. n updates of weights w_i and
values up to R make first limbs of at most sum(w_i) / w_max * R / quantum, but for 2^-51 of it and one half each
(`RoundSum.fold`), and of at most n * 2^(62 - c). What is beyond could not have come from n updates that passed their
own check, so a region can move the model no further than that many sites of that weight could, and the sum of all
parts stays below 2^62. Whether its sites really sent this is the region's word.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import floor

import torch
from torch import Tensor

from atoll.aggregation.blocks import blocks, byte_view
from atoll.aggregation.check import check_raw, spec_at
from atoll.aggregation.layout import MAGIC, RawEntry, UpdateLayout
from atoll.aggregation.quantum import SUM_BITS, bits, in_quanta
from atoll.wire.errors import BadUpdate, Malformed
from atoll.wire.names import check_site_name
from atoll.wire.tensors import Buffer

PARTIAL_MAGIC = b"ATOLLSM1"
PARTIAL_HEADER_BYTES = 192  # three cache lines, so that the limbs keep their alignment
_FIXED = struct.Struct("<8s32sQQdQQB63s")  # magic, layout, num_sites, max_weight, bound, then what the part holds
_LIMB_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SumTerms:
    """What all parts of one round's sum have in common (docs/exact-sums.md)."""

    num_sites: int
    max_weight: int
    bound: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one member brings into a sum: a site its update, a region those of its sites."""

    weight: int  # sum of the weights
    num_sites: int
    first: str  # the name that sorts first


@dataclass(frozen=True)  # not slotted: the properties are worked out once and kept
class PartialLayout:
    """Where everything stands in a partial sum of updates of `update`."""

    update: UpdateLayout

    @property
    def high(self) -> slice:
        return slice(PARTIAL_HEADER_BYTES, PARTIAL_HEADER_BYTES + _LIMB_BYTES * self.update.num_values)

    @property
    def low(self) -> slice:
        return slice(self.high.stop, self.high.stop + _LIMB_BYTES * self.update.num_low_values)

    @cached_property
    def raws(self) -> tuple[tuple[RawEntry, slice], ...]:
        places: list[tuple[RawEntry, slice]] = []
        end = PARTIAL_HEADER_BYTES + _LIMB_BYTES * (self.update.num_values + self.update.num_low_values)
        for entry in self.update.raws:
            start = -(-end // _LIMB_BYTES) * _LIMB_BYTES
            end = start + entry.num_bytes
            places.append((entry, slice(start, end)))
        return tuple(places)

    @cached_property
    def num_bytes(self) -> int:
        end: int = self.raws[-1][1].stop if self.raws else self.low.stop
        return end

    @cached_property
    def gaps(self) -> tuple[slice, ...]:
        """The bytes between regions."""
        ends = [self.low.stop, *(place.stop for _, place in self.raws)]
        return tuple(slice(end, place.start) for end, (_, place) in zip(ends, self.raws, strict=False))

    @property
    def _digest(self) -> bytes:
        """Names the layout of updates."""
        return self.update.header[len(MAGIC) : len(MAGIC) + 32]

    def header(self, terms: SumTerms, part: Part) -> bytes:
        """The header of a part. Raises ValueError where the first name is none."""
        name = part.first.encode()
        if not 1 <= len(name) <= 63:
            raise ValueError(f"{part.first!r} is no site's name")
        fixed = _FIXED.pack(
            PARTIAL_MAGIC,
            self._digest,
            terms.num_sites,
            terms.max_weight,
            terms.bound,
            part.num_sites,
            part.weight,
            len(name),
            name,
        )
        return fixed.ljust(PARTIAL_HEADER_BYTES, b"\x00")

    def read_header(self, payload: Buffer, terms: SumTerms) -> Part:
        """What a part says that it holds.

        Raises:
            BadUpdate: it has another length than this model's, is of another layout or sum, or not as `header` writes it.
        """
        data = memoryview(payload).cast("B")
        if data.nbytes != self.num_bytes:
            raise BadUpdate(
                f"partial sum is {data.nbytes} bytes, those of this model have {self.num_bytes}",
                field="sum",
                value=data.nbytes,
                bound=self.num_bytes,
            )
        magic, of, num_sites, max_weight, bound, num_updates, sum_weights, length, name = _FIXED.unpack_from(data)
        if (magic, of) != (PARTIAL_MAGIC, self._digest):
            raise BadUpdate(
                "partial sum was made for another model, codec or policy of buffers than this run's; update the older "
                "side",
                field="header",
                value=(magic + of).hex(),
                bound=(PARTIAL_MAGIC + self._digest).hex(),
            )
        for field, found, wanted in (
            ("num_sites", num_sites, terms.num_sites),
            ("max_weight", max_weight, terms.max_weight),
            ("bound", bound, terms.bound),
        ):
            if found != wanted:
                raise BadUpdate(
                    f"partial sum was made with {field} {found}, this round's sum has {wanted}",
                    field=field,
                    value=found,
                    bound=wanted,
                )
        part = Part(weight=sum_weights, num_sites=num_updates, first=_site_name(name[:length]))
        if data[:PARTIAL_HEADER_BYTES] != self.header(terms, part):
            raise BadUpdate("partial sum: its header has bytes that nothing stands in", field="header", bound="zeros")
        return part


def check_partial(layout: PartialLayout, terms: SumTerms, payload: Buffer, *, weight: int, num_sites: int) -> Part:
    """What a part holds, where every byte of it can be added; changes nothing.

    Args:
        weight: the sum of weights that came with it.
        num_sites: most sites that it may hold.

    Raises:
        BadUpdate: names field or tensor, value and bound.
    """
    part = layout.read_header(payload, terms)
    if not 1 <= part.num_sites <= min(num_sites, terms.num_sites):
        raise BadUpdate(
            f"partial sum holds {part.num_sites} updates, the region has {num_sites} sites",
            field="num_updates",
            value=part.num_sites,
            bound=f"1 to {num_sites}",
        )
    if part.weight != weight or not part.num_sites <= weight <= part.num_sites * terms.max_weight:
        raise BadUpdate(
            f"partial sum of {part.num_sites} updates weighs {part.weight}, said were {weight}; each update weighs "
            f"1 to {terms.max_weight}",
            field="weight",
            value=part.weight,
            bound=f"{part.num_sites} to {part.num_sites * terms.max_weight}",
        )
    data = byte_view(payload)
    _check_limbs(layout, terms, part, data)
    for gap in layout.gaps:
        if bool(data[gap].any()):
            raise BadUpdate(f"bytes {gap.start} to {gap.stop} between tensors are not zero", field="padding", bound=0)
    for entry, place in layout.raws:
        check_raw(entry, data[place])
    return part


def _check_limbs(layout: PartialLayout, terms: SumTerms, part: Part, data: Tensor) -> None:
    """Bounds of both limbs; see the proof above."""
    high_V, low_L = data[layout.high].view(torch.int64), data[layout.low].view(torch.int64)
    most = part.num_sites << (SUM_BITS - bits(terms.num_sites))
    for segment in layout.update.segments:
        scaled = in_quanta(segment.encoding.reach(terms.bound), terms.bound, terms.num_sites)
        largest = scaled * part.weight / terms.max_weight
        limit = min(most, floor(largest * (1 + Fraction(1, 1 << 50))) + part.num_sites)
        for start, stop in blocks(segment.num_values):
            index = segment.index + start
            _require_within(layout, high_V[index : index + stop - start], index, limit)
            if segment.encoding.two_limbs:
                low = segment.low_index + start
                _require_within(layout, low_L[low : low + stop - start], index, most)


def _require_within(layout: PartialLayout, limbs_P: Tensor, index: int, limit: int) -> None:
    if limbs_P.numel() == 0:
        return
    low, high = (int(end) for end in torch.aminmax(limbs_P))
    if -limit <= low and high <= limit:
        return
    value = low if low < -limit else high
    name = spec_at(layout.update, index + int((limbs_P == value).nonzero()[0])).name
    raise BadUpdate(
        f'partial sum: tensor "{name}" sums to {value} quanta; that many sites of that weight make at most {limit}',
        field=name,
        value=value,
        bound=limit,
    )


def _site_name(name: bytes) -> str:
    try:
        return check_site_name(name.decode("ascii"), "first site")
    except (UnicodeDecodeError, Malformed):
        raise BadUpdate(
            "partial sum: the name of its first site is none", field="first_site", value=name.hex(), bound="a name"
        ) from None
