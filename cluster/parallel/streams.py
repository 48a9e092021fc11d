"""Tensors into a layout and out of it, one after the other under the whole model's names.

No process ever holds a whole copy of a model that is divided: on the way in each takes its slice out of the mapped
file, on the way out the processes of one stage put one tensor together at a time (nodes.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from atoll.cluster.parallel.dims import ParallelDims
from atoll.wire.errors import BadManifest
from atoll.wire.tensors import state_of


def own_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Those of which this process holds something, by name."""
    return {name: tensor.detach() for name, (tensor, _) in state_of(model).items()}


def load_slices(model: nn.Module, sources: Mapping[str, Tensor], *, frozen: Collection[str] = ()) -> None:
    """Copies this process's part of each tensor from whole ones, such as views of a mapped file: no more is read.

    Args:
        frozen: tensors that stay as they are.

    Raises:
        BadManifest: a tensor of the model has no source, or one of another shape or dtype.
    """
    with torch.no_grad():
        for name, target in own_tensors(model).items():
            if name in frozen:
                continue
            load_slice(name, target, sources.get(name))


def load_slice(name: str, target: Tensor, source: Tensor | None) -> None:
    """Copies this process's part of one tensor from a whole one.

    Raises:
        BadManifest: there is no source, or it has another shape or dtype.
    """
    if source is None or source.shape != target.shape or source.dtype != target.dtype:
        found = "absent" if source is None else f"{source.dtype} {list(source.shape)}"
        raise BadManifest(
            f'tensor "{name}" of the version is {found}, the model has {target.dtype} {list(target.shape)}',
            field=name,
        )
    if isinstance(target, DTensor):
        target.to_local().copy_(_slice_of(source, target))
    else:
        target.copy_(source)


def _slice_of(source: Tensor, target: DTensor) -> Tensor:
    """What of a whole tensor this process holds in `target`, as a view."""
    shape, offset = compute_local_shape_and_global_offset(target.shape, target.device_mesh, target.placements)
    found = source
    for dim, (start, length) in enumerate(zip(offset, shape, strict=True)):
        found = found.narrow(dim, min(start, source.shape[dim]), length)
    return found


def whole_tensors(model: nn.Module, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """Each named tensor that this process's stage holds, whole, in turn.

    All processes of a stage go through the same names in the same order, and each to the end: one that stops leaves
    the others waiting.
    """
    own = own_tensors(model)
    for name in names:
        if (tensor := own.get(name)) is not None:
            yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def average_buffers(model: nn.Module, dims: ParallelDims) -> None:
    """Statistics that each share has gathered for itself become their mean; whole numbers the largest of them."""
    if dims.num_shares == 1:
        return
    group = dims.mesh["dp_replicate", "dp_shard"]._flatten("shares").get_group()
    parameters = {id(parameter) for parameter in model.parameters()}
    with torch.no_grad():
        for tensor, _ in state_of(model).values():
            if id(tensor) in parameters:
                continue
            if tensor.is_floating_point():
                dist.all_reduce(tensor, group=group)
                tensor /= dims.num_shares
            elif tensor.dtype != torch.bool and not tensor.is_complex():
                dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
