"""Can every byte of an update be taken? Asked before any of it is folded, so a refused update changes nothing.

Invariant: what passes has the layout's header, zeros between regions, and only finite values within the reach of the
bound. Reads the update once, in blocks, and allocates nothing of its size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.aggregation.blocks import blocks, byte_view
from atoll.aggregation.encode import require_finite
from atoll.aggregation.layout import HEADER_BYTES, RawEntry, Segment, UpdateLayout
from atoll.wire.checksum import crc32_of
from atoll.wire.errors import BadUpdate
from atoll.wire.manifest import TensorSpec
from atoll.wire.tensors import DTYPES, Buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a round promises of each of its updates: weights from 1 to `max_weight`, values up to `bound`."""

    max_weight: int
    bound: float


def check_update(
    layout: UpdateLayout,
    terms: Terms,
    payload: Buffer,
    weight: int,
    *,
    site: str = "",
    round: int = 0,
    crc32: int | None = None,
) -> None:
    """Returns where the update keeps to layout and terms.

    Args:
        site, round: named in the error.
        crc32: of all bytes (zlib), where the caller has not compared it while receiving.

    Raises:
        BadUpdate: names tensor, value and bound.
    """
    try:
        _check_weight(weight, terms)
        _check_frame(layout, payload, crc32)
        data = byte_view(payload)
        for segment in layout.segments:
            _check_segment(layout, segment, data[segment.offset : segment.offset + segment.num_bytes], terms.bound)
        for entry in layout.raws:
            check_raw(entry, data[entry.offset : entry.offset + entry.num_bytes])
    except BadUpdate as error:
        error.site, error.round = site, round
        raise


def _check_weight(weight: int, terms: Terms) -> None:
    if not 1 <= weight <= terms.max_weight:
        raise BadUpdate(
            f"weight is {weight}, wanted 1 to {terms.max_weight}, the largest that the cohort declared",
            field="weight",
            value=weight,
            bound=f"1 to {terms.max_weight}",
        )


def _check_frame(layout: UpdateLayout, payload: Buffer, crc32: int | None) -> None:
    data, wanted = memoryview(payload).cast("B"), layout.num_bytes
    if data.nbytes != wanted:
        raise BadUpdate(
            f"update is {data.nbytes} bytes, this model and codec make {wanted}",
            field="update",
            value=data.nbytes,
            bound=wanted,
        )
    if data[:HEADER_BYTES] != layout.header:
        raise BadUpdate(
            "update was made for another model, codec or policy of buffers than this run's; update the older side",
            field="header",
            value=bytes(data[:HEADER_BYTES]).hex(),
            bound=layout.header.hex(),
        )
    if crc32 is not None and (found := crc32_of(data)) != crc32:
        raise BadUpdate("update is damaged: its checksum differs", field="crc32", value=found, bound=crc32)
    for start, stop in layout.gaps:
        if any(data[start:stop]):
            raise BadUpdate(f"bytes {start} to {stop} between tensors are not zero", field="padding", bound=0)


def _check_segment(layout: UpdateLayout, segment: Segment, region: Tensor, bound: float) -> None:
    reach = segment.encoding.reach(bound)
    for start, stop in blocks(segment.num_values):
        try:
            magnitude = segment.encoding.magnitude(region, start, stop)
        except ValueError as error:
            name = spec_at(layout, segment.index + start).name
            text = f'tensor "{name}" holds {error}, which {segment.encoding.name} never writes'
            raise BadUpdate(text, field=name) from None
        if not magnitude <= reach:  # NaN compares false
            raise _out_of_bounds(layout, segment, region, start, stop, bound)


def _out_of_bounds(
    layout: UpdateLayout, segment: Segment, region: Tensor, start: int, stop: int, bound: float
) -> BadUpdate:
    value_P = torch.empty(stop - start, dtype=torch.float64)
    segment.encoding.decode(region, start, value_P)
    beyond = (~(value_P.abs() <= segment.encoding.reach(bound))).nonzero()
    # A scale may be out of bounds though the levels beside it are small: then the first value of the block names it.
    place = int(beyond[0]) if beyond.numel() else 0
    spec, value = spec_at(layout, segment.index + start + place), value_P[place].item()
    return BadUpdate(
        f'tensor "{spec.name}" moves by {value}, the bound is {bound:g}; lower the learning rate, or raise '
        "strategy.sum.bound in the job",
        field=spec.name,
        value=value,
        bound=bound,
    )


def spec_at(layout: UpdateLayout, index: int) -> TensorSpec:
    """The tensor that value `index` of the flat vector belongs to."""
    return next(entry.spec for entry in layout.means if entry.index <= index < entry.index + entry.num_values)


def check_raw(entry: RawEntry, region: Tensor) -> None:
    """Returns where the bytes of a tensor that travels as values are such. Raises BadUpdate."""
    name, dtype = entry.spec.name, DTYPES[entry.spec.dtype]
    if dtype is torch.bool and region.numel() and int(region.max()) > 1:
        raise BadUpdate(
            f'tensor "{name}" is bool and holds bytes other than 0 and 1',
            field=name,
            value=int(region.max()),
            bound="0 or 1",
        )
    if dtype.is_floating_point or dtype.is_complex:
        require_finite(entry.spec, region.view(dtype))
