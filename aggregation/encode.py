"""An update written at the site: the difference of trained to base model, by blocks, into the bytes that will travel.

Invariant: what `encode_update` wrote passes the server's check. A value that is not finite or beyond the bound is an
error here, before anything is sent, and never clipped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from atoll.aggregation.blocks import BLOCK_VALUES, blocks, byte_view, largest_magnitude, reals
from atoll.aggregation.codecs.casts import FLOAT32
from atoll.aggregation.layout import HEADER_BYTES, MeanEntry, RawEntry, UpdateLayout
from atoll.aggregation.rounding import Rounding
from atoll.wire.errors import BadUpdate
from atoll.wire.manifest import TensorSpec
from atoll.wire.tensors import Buffer

MOST_AT_ONCE = 1 << 18  # values: 1 MiB each of base, trained and difference, beyond which blocks stay in the cache
_DEVICE_BLOCK_VALUES = 1 << 22  # a copy from an accelerator costs tens of microseconds, whatever its size


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """What a site carries from its last update to this one, and from this one to the next (`codecs/feedback.py`).

    Vectors by tensor name, for each entry that `carries`: float64 where the tensor is, else float32, on the CPU. Both
    mappings hold each of them, or `before` none: then all are zeros.
    """

    kind: Literal["error", "difference"]
    before: Mapping[str, Tensor]
    after: Mapping[str, Tensor]  # is written to

    def with_difference(self, name: str, difference_P: Tensor, start: int) -> Tensor:
        """What is encoded for values from `start` on."""
        before_P = self._before(name, difference_P, start)
        return difference_P + before_P if self.kind == "error" else difference_P - before_P

    def keep(self, name: str, encoded_P: Tensor, sent_P: Tensor, start: int) -> None:
        """Note what the server reads (`sent_P`, float64) of what was encoded."""
        after_P = self.after[name][start : start + len(sent_P)]
        if self.kind == "error":
            after_P.copy_(encoded_P.double() - sent_P)
        else:
            after_P.copy_(sent_P + self._before(name, encoded_P, start))

    def _before(self, name: str, like_P: Tensor, start: int) -> Tensor:
        vector = self.before.get(name)
        return torch.zeros_like(like_P) if vector is None else vector[start : start + len(like_P)]


def carries(entry: MeanEntry) -> bool:
    """Whether feedback is about this tensor: one that moves by sums of steps, as statistics do not."""
    return entry.spec.role != "buffer"


def encode_update(
    layout: UpdateLayout,
    base: Mapping[str, Tensor],
    trained: Mapping[str, Tensor],
    out: Buffer,
    *,
    rounding: Rounding,
    bound: float,
    differences: Mapping[str, Tensor] = MappingProxyType({}),
    carried: Carried | None = None,
) -> None:
    """Writes the update from `base` to `trained` (tensors by name, on any device) into `out`.

    Args:
        out: writable, `layout.num_bytes` long.
        bound: largest magnitude that a difference may have.
        differences: what to write for the averaged tensors that it names, in place of trained minus base.
        carried: what this site carries from one update to the next.

    Raises:
        BadUpdate: a difference is NaN, infinite or beyond the bound, a raw value is not finite, or a trained tensor is
            missing or has another shape or dtype than the manifest's; names the tensor.
        ValueError: the same of a base tensor, or `out` has another length.
    """
    begin_update(layout, out)
    entries: tuple[MeanEntry | RawEntry, ...] = (*layout.means, *layout.raws)
    data = byte_view(out)
    for entry in entries:
        if carried is None and _encode_at_once(entry, base, trained, differences, data, bound):
            continue
        given = differences if entry.spec.name in differences else trained
        encode_tensor(entry, base, given, out, rounding=rounding, bound=bound, carried=carried, whole=given is trained)


@torch.no_grad()
def _encode_at_once(
    entry: MeanEntry | RawEntry,
    base: Mapping[str, Tensor],
    trained: Mapping[str, Tensor],
    differences: Mapping[str, Tensor],
    data: Tensor,
    bound: float,
) -> bool:
    """Writes the difference of a small tensor in one operation where it travels as it is; False where it does not, or
    where something is wrong with it, which `encode_tensor` then says. The same bytes."""
    name = entry.spec.name
    if (
        isinstance(entry, RawEntry)
        or entry.encoding != FLOAT32
        or entry.num_values > MOST_AT_ONCE
        or name in differences
    ):
        return False
    old, new = base.get(name), trained.get(name)
    if old is None or new is None or not (_is_plain(old, entry) and _is_plain(new, entry)):
        return False
    difference_V = data[entry.offset : entry.offset + entry.num_bytes].view(torch.float32)
    torch.sub(new.view(-1), old.view(-1), out=difference_V)
    return largest_magnitude(difference_V) <= min(bound, entry.encoding.limit)


def _is_plain(tensor: Tensor, entry: MeanEntry) -> bool:
    return (
        tensor.dtype is torch.float32 and tensor.shape == entry.spec.shape and tensor.is_cpu and tensor.is_contiguous()
    )


def begin_update(layout: UpdateLayout, out: Buffer) -> None:
    """Writes what belongs to no tensor.

    Raises:
        ValueError: `out` has another length than the layout's.
    """
    data = byte_view(out)
    if data.numel() != layout.num_bytes:
        raise ValueError(f"the update takes {layout.num_bytes} bytes, the buffer has {data.numel()}")
    data[:HEADER_BYTES].copy_(byte_view(layout.header))
    for start, stop in layout.gaps:
        data[start:stop].zero_()


@torch.no_grad()
def encode_tensor(
    entry: MeanEntry | RawEntry,
    base: Mapping[str, Tensor],
    trained: Mapping[str, Tensor],
    out: Buffer,
    *,
    rounding: Rounding,
    bound: float,
    carried: Carried | None = None,
    whole: bool = True,
) -> None:
    """Writes one tensor into its place in the update `out`: several processes may each write some of them.

    Args:
        whole: False where `trained` has the difference itself.

    Raises:
        BadUpdate, ValueError: as `encode_update`.
    """
    region = byte_view(out)[entry.offset : entry.offset + entry.num_bytes]
    new = _trained(trained, entry.spec)
    if isinstance(entry, RawEntry):
        _copy_values(entry, new, region)
        return
    old = _found(base, entry.spec) if whole else None
    kept = carried if carries(entry) else None
    _encode_difference(entry, old, new, region, rounding=rounding, bound=bound, carried=kept)


def _trained(tensors: Mapping[str, Tensor], spec: TensorSpec) -> Tensor:
    """The tensor that the user's code has trained, which may have become another."""
    try:
        return _found(tensors, spec)
    except ValueError as error:
        raise BadUpdate(
            f"{error}; the app's model has changed while it was trained: build it in model() as it is to stay",
            field=spec.name,
            value=_text(tensors.get(spec.name)),
            bound=f"{spec.dtype} {list(spec.shape)}",
        ) from None


def _found(tensors: Mapping[str, Tensor], spec: TensorSpec) -> Tensor:
    tensor, wanted = tensors.get(spec.name), f"{spec.dtype} {list(spec.shape)}"
    if tensor is None or _text(tensor) != wanted:
        raise ValueError(f'tensor "{spec.name}" is {_text(tensor)}, manifest says {wanted}')
    return tensor


def _text(tensor: Tensor | None) -> str:
    return "absent" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}".removeprefix("torch.")


def _encode_difference(
    entry: MeanEntry,
    base: Tensor | None,
    trained: Tensor,
    region: Tensor,
    *,
    rounding: Rounding,
    bound: float,
    carried: Carried | None,
) -> None:
    """Without a base, `trained` is the difference itself."""
    old_V, new_V = None if base is None else reals(base), reals(trained)
    # Differences of narrow floats are taken in float32, so that the encoding's rounding is the only one.
    working = torch.float64 if new_V.dtype is torch.float64 else torch.float32
    devices = {values_V.device.type for values_V in (old_V, new_V) if values_V is not None}
    size = BLOCK_VALUES if devices == {"cpu"} else _DEVICE_BLOCK_VALUES
    limit = min(bound, entry.encoding.limit) / entry.encoding.gain
    for start, stop in blocks(entry.num_values, size):
        difference_P = new_V[start:stop].to("cpu", working)
        if old_V is not None:
            difference_P = difference_P - old_V[start:stop].to("cpu", working)
        if carried is not None:
            difference_P = carried.with_difference(entry.spec.name, difference_P, start)
        if not largest_magnitude(difference_P) <= limit:  # NaN compares false
            raise _out_of_bounds(entry.spec, difference_P, start, limit, carried)
        entry.encoding.encode(difference_P, region, start, rounding, entry.index + start)
        if carried is not None:
            sent_P = torch.empty(stop - start, dtype=torch.float64)
            entry.encoding.decode(region, start, sent_P)
            carried.keep(entry.spec.name, difference_P, sent_P, start)


def _out_of_bounds(
    spec: TensorSpec, difference_P: Tensor, start: int, limit: float, carried: Carried | None
) -> BadUpdate:
    place = int((~(difference_P.abs() <= limit)).nonzero()[0])
    value = difference_P[place].item()
    counted = "" if carried is None else f", with what strategy.codec carries over from earlier rounds ({carried.kind})"
    return BadUpdate(
        f'tensor "{spec.name}" moved by {value} at element {start + place}{counted}, the bound is {limit:g}; lower the '
        "learning rate, or raise strategy.sum.bound in the job if such a step is meant",
        field=spec.name,
        value=value,
        bound=limit,
    )


def _copy_values(entry: RawEntry, trained: Tensor, region: Tensor) -> None:
    values = trained.detach().to("cpu").contiguous()
    if values.is_floating_point() or values.is_complex():
        require_finite(entry.spec, values)
    region.copy_(values.reshape(-1).view(torch.uint8))


def require_finite(spec: TensorSpec, values: Tensor) -> None:
    """Returns where all of a floating tensor's values are finite.

    Raises:
        BadUpdate: names the tensor.
    """
    if spec.dtype == "float4_e2m1fn_x2":  # has no other values
        return
    values_V = reals(values)
    magnitude = max(
        (largest_magnitude(values_V[start:stop].float()) for start, stop in blocks(values_V.numel())), default=0.0
    )
    if not magnitude < float("inf"):
        raise BadUpdate(
            f'tensor "{spec.name}" holds a value that is not finite; lower the learning rate or look at the data',
            field=spec.name,
            value=magnitude,
            bound="finite",
        )
