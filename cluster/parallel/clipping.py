"""The norm of a gradient that is divided among processes, and its clipping."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


@torch.no_grad()
def clip_gradients(
    parameters: Iterable[nn.Parameter], max_norm: float, *, stages: dist.ProcessGroup | None = None
) -> Tensor:
    """Scales all gradients so that the 2-norm of the whole is at most `max_norm`; the norm before that, a scalar.

    Every element counts once, however many ranks hold it.

    Args:
        stages: the ranks whose parameters are others than this one's.
    """
    groups: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for parameter in parameters:
        if (grad := parameter.grad) is not None:
            groups.setdefault(grad.device_mesh if isinstance(grad, DTensor) else None, []).append(parameter)
    squares: Tensor | None = None
    for members in groups.values():
        norm = get_total_norm([parameter.grad for parameter in members if parameter.grad is not None])
        whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
        squares = whole**2 if squares is None else squares + whole**2
    if squares is None:
        squares = torch.zeros(())
    if stages is not None:
        dist.all_reduce(squares, group=stages)
    norm = squares.sqrt()
    for members in groups.values():
        clip_grads_with_norm_(members, max_norm, norm)
    return norm
