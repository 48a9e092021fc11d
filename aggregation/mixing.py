"""A site's next model from its own and its neighbours': x_i <- sum_j W_ij z_j, block by block.

Parameters and float buffers under "mean" are summed in float64 in the order of names, each product rounded before it is
added, and rounded once to their own dtype: equal models and weights give equal bytes on every machine. Other tensors
go by the run's policy for buffers: the elementwise maximum, or those of the first name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.aggregation.blocks import blocks, largest_magnitude, reals
from atoll.aggregation.layout import UpdateLayout
from atoll.wire.errors import BadUpdate
from atoll.wire.tensors import Buffer, views


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One model of those that are mixed, as the manifest lays it out."""

    site: str
    weight: float  # above 0
    model: Buffer


def mix(layout: UpdateLayout, shares: Sequence[Share], out: Buffer) -> None:
    """Writes the mixed model into `out`, which is as long as each model.

    Raises:
        BadUpdate: a value of a model is not finite; names its site and the tensor.
        BadManifest: a model has another length than the manifest says.
        ValueError: nothing to mix, or something stays at the sites (`local`), which no mixing may touch.
    """
    if layout.absent or not shares:
        raise ValueError("models that are mixed travel whole, and there is at least one")
    ordered = sorted(shares, key=lambda share: share.site)
    tensors = [views(layout.manifest, share.model, writable=False) for share in ordered]
    target = views(layout.manifest, out, writable=True)
    with torch.no_grad():
        for entry in layout.means:
            name = entry.spec.name
            _mean(name, ordered, [reals(of[name]) for of in tensors], reals(target[name]))
        for raw in layout.raws:
            found = [of[raw.spec.name] for of in tensors]
            mixed = found[0].clone()
            for other in found[1:] if raw.choice == "max" else ():
                mixed = torch.maximum(mixed, other)
            target[raw.spec.name].copy_(mixed)


def _mean(name: str, shares: Sequence[Share], values: Sequence[Tensor], out_V: Tensor) -> None:
    for start, stop in blocks(out_V.numel()):
        sum_P = torch.zeros(stop - start, dtype=torch.float64)
        for share, value_V in zip(shares, values, strict=True):
            value_P = value_V[start:stop].to(torch.float64)
            if not largest_magnitude(value_P) < float("inf"):  # NaN compares false
                raise BadUpdate(
                    f'tensor "{name}" of the model of {share.site} holds a value that is not finite, so it cannot be '
                    "mixed; look at that site, or take it out of the job",
                    site=share.site,
                    field=name,
                    bound="finite",
                )
            sum_P.add_(value_P * share.weight)
        out_V[start:stop].copy_(sum_P)


def distance(layout: UpdateLayout, model: Buffer, other: Buffer) -> float:
    """Squared Euclidean distance of two models over all that is averaged, in float64."""
    one, two = (views(layout.manifest, buffer, writable=False) for buffer in (model, other))
    total = 0.0
    for entry in layout.means:
        one_V, two_V = reals(one[entry.spec.name]), reals(two[entry.spec.name])
        for start, stop in blocks(entry.num_values):
            difference_P = one_V[start:stop].to(torch.float64) - two_V[start:stop].to(torch.float64)
            total += float(difference_P.square_().sum())
    return total
