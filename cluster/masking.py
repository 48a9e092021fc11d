"""An update that stays at its site, written once more as the input of a session: levels of a ring under masks.

The kernel is `privacy/secagg/masked_input.py`; here is where the layout of an update, the session's terms and the
run's secret of rounding come together. Each rank of a site can write the part of the lane that it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from atoll.aggregation.check import spec_at
from atoll.aggregation.codecs.casts import Cast
from atoll.aggregation.contribution import PLAIN, Contribution, contribution_of
from atoll.aggregation.lanes import Lane, factors_in
from atoll.aggregation.layout import HEADER_BYTES, MeanEntry, Segment, UpdateLayout
from atoll.aggregation.schedule import Asynchronous
from atoll.aggregation.strategy import Strategy
from atoll.cluster.messages import Mask, Masked, MaskKey
from atoll.cluster.update_file import create_update
from atoll.privacy.secagg.agreement import counted_factor
from atoll.privacy.secagg.keys import Mask as KeyedMask
from atoll.privacy.secagg.masked_input import Encoding, Reals, RealsLane, rounding_key, write_input
from atoll.wire.errors import BadUpdate, LocalError, NotAllowed
from atoll.wire.model_file import map_file

_DTYPES = {torch.float64: "<f8", torch.float32: "<f4", torch.float16: "<f2", torch.bfloat16: "<u2"}
_WEIGHT, _CLIPPED = 0, 1  # places of the weight, and of the number of clipped values, among an input's exact values


def discount_of(schedule: object, staleness: int) -> float:
    """What an update counts whose base is so many versions older than its round's.

    Raises:
        NotAllowed: the run sums no stale updates.
    """
    if staleness and not isinstance(schedule, Asynchronous):
        raise NotAllowed("a session counts this site's update as stale, and the job's schedule has none such")
    return schedule.discount(staleness) if staleness and isinstance(schedule, Asynchronous) else 1.0


def mask_by_strategy(
    strategy: Strategy, layout: UpdateLayout, request: Mask, secret: bytes, *, on_slice: Callable[[], None]
) -> Masked:
    """The masked input of a session of a job: `mask_update` with what its strategy says. Raises as that does."""
    contribution = contribution_of(strategy.reducer)
    if contribution is None:
        text = f"no sum of masked updates makes what the reducer {strategy.reducer.name} makes of single ones"
        raise NotAllowed(text, field="strategy.reducer", value=strategy.reducer.name)
    return mask_update(
        layout,
        request,
        secret,
        discount=discount_of(strategy.schedule, request.staleness),
        contribution=contribution,
        lanes=strategy.lanes,
        on_slice=on_slice,
    )


def mask_update(
    layout: UpdateLayout,
    request: Mask,
    secret: bytes,
    *,
    discount: float,
    on_slice: Callable[[], None],
    contribution: Contribution = PLAIN,
    lanes: Sequence[Lane] = (),
) -> Masked:
    """Writes the masked input into a file of `request`. The same request and update give the same bytes.

    Args:
        secret: of rounding, of this run at this site.
        discount: of a stale update's values, above 0 to 1.
        contribution: what the job's reducer makes of an update by itself. The bound is of what comes of it.
        lanes: those of the job's rule, whose factors go into the exact lane.

    Raises:
        BadUpdate: a value is not finite or beyond the bound, and may not be clipped; names the tensor.
        NotAllowed: the run has values in its updates that cannot be summed.
        LocalError: the update that was kept here is not that of the run; DiskFull where there is no room.
    """
    if layout.raws:
        name = layout.raws[0].spec.name
        raise NotAllowed(f'tensor "{name}" travels as it is, so nothing could mask it', field=name)
    with map_file(Path(request.private_path)) as update:
        if update.nbytes != layout.num_bytes or update[:HEADER_BYTES] != layout.header:
            raise LocalError(f"{request.private_path} is not an update of this run: {update.nbytes} bytes")
        factors, shortening = factors_in(layout, lanes), contribution.shortening(layout, update)
        weighted = request.scale * request.share if contribution.weighted else request.scale
        lane = RealsLane(
            _without([_reals(segment, update) for segment in layout.segments], factors),
            Encoding(
                bits=request.bits,
                scale=weighted * (discount * shortening),
                bound=request.bound / shortening,
                clips=request.max_clipped > 0,
                key=rounding_key(secret, request.round),
            ),
            _keys(request.masks),
            name_at=lambda index: f'tensor "{spec_at(layout, index).name}"',
        )
        exact, num_clipped = list(request.exact), lane.num_beyond() if request.max_clipped else 0
        for place, entry in enumerate(factors, start=len(exact) - len(factors)):
            exact[place] = counted_factor(
                _value_at(layout, update, entry.index), exact[_WEIGHT], request.num_sites, name=entry.spec.name
            )
        if num_clipped > request.max_clipped:
            raise BadUpdate(
                f"{num_clipped} values are beyond {request.bound:g}, at most {request.max_clipped} may be clipped; raise "
                "privacy.secure_aggregation.bound or .clipped in the job",
                field="clipped",
                value=num_clipped,
                bound=request.max_clipped,
            )
        exact[_CLIPPED] = num_clipped
        num_bytes = 8 * len(exact) + lane.dtype.itemsize * lane.num_values
        with create_update(Path(request.out_path), num_bytes) as out:
            written = write_input(out, exact, _keys(request.exact_masks), lane, on_slice=on_slice)
    return Masked(
        key=request.key,
        num_bytes=written.num_bytes,
        crc32=written.crc32,
        sha256_hex=written.sha256.hex(),
        num_clipped=num_clipped,
    )


def _reals(segment: Segment, update: memoryview) -> Reals:
    """The values of a segment, as they lie in the mapped update."""
    encoding = segment.encoding
    if not isinstance(encoding, Cast):
        raise NotAllowed(f"values that travel as {encoding.name} cannot be masked", field="strategy.codec")
    region = update[segment.offset : segment.offset + segment.num_bytes]
    values = np.frombuffer(region, dtype=_DTYPES[encoding.dtype])
    return Reals(segment.index, values)


def _without(pieces: Sequence[Reals], factors: Sequence[MeanEntry]) -> list[Reals]:
    """The pieces with 0 in place of factors, which travel in the exact lane."""
    places, found = [entry.index for entry in factors], list[Reals]()
    for piece in pieces:
        start = piece.index
        for place in [place for place in places if piece.index <= place < piece.stop]:
            found += [Reals(start, piece.part(start, place)), Reals(place, np.zeros(1))]
            start = place + 1
        found.append(Reals(start, piece.part(start, piece.stop)) if start > piece.index else piece)
    return [piece for piece in found if piece.values.size]


def _value_at(layout: UpdateLayout, update: memoryview, index: int) -> float:
    """Value number `index` of the flat vector."""
    segment = next(one for one in layout.segments if one.index <= index < one.index + one.num_values)
    return float(_reals(segment, update).part(index, index + 1)[0])


def _keys(keys: Sequence[MaskKey]) -> list[KeyedMask]:
    return [KeyedMask(key=bytes.fromhex(one.key_hex), negative=one.negative) for one in keys]
