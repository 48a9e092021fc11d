"""The next model version from a round's combined updates, written block by block.

* Parameters: base and mean difference go through the server optimizer in its precision, and the new value is rounded
  to the parameter's own dtype when it is stored. With SGD(lr = 1) that is base + mean in float64, one rounding.
* Float buffers under "mean": base + mean in float64, one rounding; they never meet the optimizer.
* Controls: the mean over all members, or the factor of the parameters' difference (`lanes.py`); no optimizer either.
* Tensors that travel as values: the combined value. Absent ones: the base's bytes.

Invariant: neither base nor state is changed, so making a version can be tried again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from atoll.aggregation.blocks import BLOCK_VALUES, blocks, byte_view, for_each, largest_magnitude, whole_vector
from atoll.aggregation.lanes import ALL, FACTOR_UNIT, Lane, Share, lane_of
from atoll.aggregation.layout import MeanEntry, UpdateLayout
from atoll.aggregation.optimizer_state import OptimizerState
from atoll.aggregation.reducers.reduction import Reduction
from atoll.aggregation.server_optimizers import ServerOptimizer, Sharing, is_wide, precision_name
from atoll.wire.errors import BadUpdate
from atoll.wire.manifest import Manifest
from atoll.wire.tensors import DTYPES, Buffer


def next_model(
    reduction: Reduction,
    *,
    optimizer: ServerOptimizer,
    state: OptimizerState,
    base: Buffer,
    out: Buffer,
    manifest: Manifest,
    lanes: Sequence[Lane] = (),
    share: Share = ALL,
) -> OptimizerState:
    """Writes the bytes of the next version into `out`; gives the optimizer's state that belongs to it.

    Args:
        base: bytes of the version that the updates differ from, as `manifest` lays them out; so is `out`.
        lanes: those of the run's rule.
        share: of the updates in all that the members of the run weigh.

    Raises:
        BadUpdate: a new value is beyond the range of its tensor's dtype; names the tensor.
        ValueError: no update was folded; a buffer has the wrong length; the state belongs to another model; a control
            belongs to no lane.
    """
    old, new = byte_view(base), byte_view(out)
    if not old.numel() == new.numel() == manifest.num_bytes or state.schema_hash != manifest.schema_hash:
        raise ValueError("base, out and optimizer state must belong to the manifest")
    layout = reduction.layout
    for spec in layout.absent:
        new[spec.offset : spec.offset + spec.num_bytes].copy_(old[spec.offset : spec.offset + spec.num_bytes])
    for entry in layout.raws:
        new[entry.spec.offset : entry.spec.offset + entry.spec.num_bytes].copy_(reduction.raw(entry.spec.name))
    _add_means(reduction, [e for e in layout.means if e.spec.role == "buffer"], old, new)
    _add_means(reduction, _controls(layout, lanes, "control"), old, new, share)
    factor = 1.0
    for number in _controls(layout, lanes, "factor"):
        _add_means(reduction, [number], old, new, Share(before=0.0))
        factor *= _mean_at(reduction, number.index) / FACTOR_UNIT
    if isinstance(optimizer, Sharing):
        optimizer = optimizer.in_round(share)
    tensors: dict[str, Tensor] = {}
    for precision in optimizer.init(layout).num_parameters:
        entries = [
            entry
            for entry in layout.means
            if entry.spec.role == "parameter" and precision_name(optimizer, entry.spec.dtype) == precision
        ]
        tensors.update(_move_parameters(reduction, entries, old, new, optimizer, state, precision, factor))
    return replace(state, num_steps=state.num_steps + 1, tensors=tensors)


def _controls(layout: UpdateLayout, lanes: Sequence[Lane], kind: str) -> list[MeanEntry]:
    controls = (entry for entry in layout.means if entry.spec.role == "control")
    return [entry for entry in controls if lane_of(entry.spec, lanes).kind == kind]


def _mean_at(reduction: Reduction, index: int) -> float:
    mean_P = torch.empty(1, dtype=torch.float64)
    reduction.difference(index, mean_P)
    return mean_P.item()


def _add_means(reduction: Reduction, entries: list[MeanEntry], old: Tensor, new: Tensor, share: Share = ALL) -> None:
    def move(piece: _Piece) -> None:
        values_P, mean_P = (torch.empty(piece.num_values, dtype=torch.float64) for _ in range(2))
        values_P.copy_(piece.of(old))
        reduction.difference(piece.entry.index + piece.start, mean_P)
        if share.before != 1:
            values_P.mul_(share.before)
        _store(values_P.add_(mean_P, alpha=share.cohort), piece, new)

    pieces = (
        _Piece(entry=entry, start=start, stop=stop, place=0)
        for entry in entries
        for start, stop in blocks(entry.num_values)
    )
    for_each(pieces, move)


def _move_parameters(
    reduction: Reduction,
    entries: list[MeanEntry],
    old: Tensor,
    new: Tensor,
    optimizer: ServerOptimizer,
    state: OptimizerState,
    precision: str,
    factor: float,
) -> dict[str, Tensor]:
    """Moves the flat vector of all parameters of one precision by `factor` mean differences; gives its new state."""
    num_values = sum(entry.num_values for entry in entries)
    prefix = f"{precision}."
    known = {name: value_V for name, value_V in state.tensors.items() if name.startswith(prefix)}
    made: dict[str, Tensor] = {}
    making = threading.Lock()

    def whole(name: str, dtype: torch.dtype) -> Tensor:
        with making:
            if name not in made:
                made[name] = whole_vector(num_values, dtype)
            return made[name]

    def move(block: tuple[int, list[_Piece]]) -> None:
        start, pieces = block
        stop = start + sum(piece.num_values for piece in pieces)
        parameters_P = torch.empty(stop - start, dtype=DTYPES[precision])
        mean_P = torch.empty(stop - start, dtype=torch.float64)
        for piece in pieces:
            parameters_P[piece.place : piece.place + piece.num_values].copy_(piece.of(old))
            reduction.difference(piece.entry.index + piece.start, mean_P[piece.place : piece.place + piece.num_values])
        if factor != 1:
            mean_P.mul_(factor)
        before = {name.removeprefix(prefix): value_V[start:stop].clone() for name, value_V in known.items()}
        after = optimizer.step(parameters_P, mean_P.to(parameters_P.dtype), before, state.num_steps)
        for name, value_P in after.items():
            whole(prefix + name, value_P.dtype)[start:stop].copy_(value_P)
        for piece in pieces:
            _store(parameters_P[piece.place : piece.place + piece.num_values], piece, new)

    for_each(_gathered(entries), move)
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """Values `start` to `stop` of one tensor, at `place` in a block."""

    entry: MeanEntry
    start: int
    stop: int
    place: int

    @property
    def num_values(self) -> int:
        return self.stop - self.start

    def of(self, model: Tensor) -> Tensor:
        """The values, as real numbers of the tensor's own dtype, in the bytes of a model."""
        spec = self.entry.spec
        values_V = model[spec.offset : spec.offset + spec.num_bytes].view(_real_dtype(spec.dtype))
        return values_V[self.start : self.stop]


def _gathered(entries: list[MeanEntry]) -> Iterator[tuple[int, list[_Piece]]]:
    """The flat vector of `entries` in blocks: place of the first value, and the pieces that make the block.

    Blocks start at multiples of their size and run over the borders of tensors, so a model of many small tensors
    costs no more than one large one, and the optimizer sees the blocks that it would see of one vector.
    """
    start, place = 0, 0
    pieces: list[_Piece] = []
    for entry in entries:
        taken = 0
        while taken < entry.num_values:
            stop = min(entry.num_values, taken + BLOCK_VALUES - place)
            pieces.append(_Piece(entry=entry, start=taken, stop=stop, place=place))
            place, taken = place + stop - taken, stop
            if place == BLOCK_VALUES:
                yield start, pieces
                start, place, pieces = start + place, 0, []
    if pieces:
        yield start, pieces


def _store(values_P: Tensor, piece: _Piece, new: Tensor) -> None:
    """Round to the tensor's own dtype and write."""
    target_P = piece.of(new)
    magnitude, most = largest_magnitude(values_P), torch.finfo(target_P.dtype).max
    if not magnitude <= most:  # NaN compares false
        name = piece.entry.spec.name
        raise BadUpdate(
            f'tensor "{name}" of the next model would hold {magnitude}, beyond the range of {piece.entry.spec.dtype}; '
            "lower the learning rate of server or sites",
            field=name,
            value=magnitude,
            bound=most,
        )
    target_P.copy_(values_P)


def _real_dtype(dtype: str) -> torch.dtype:
    """The dtype of the numbers of a tensor: of both parts, where it is complex."""
    if is_wide(dtype):
        return torch.float64
    return {"complex64": torch.float32, "complex32": torch.float16}.get(dtype, DTYPES[dtype])
