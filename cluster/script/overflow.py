"""Gradients that overflow on one process: all processes of a script skip that step, or none does.

`GradScaler` asks each process's own gradients, and skips `optimizer.step` where it finds an infinite one. Under
`DistributedDataParallel` all processes find the same. Where a script averages in another way they may not, and then one
makes a step that another skips: their counts of steps, scales and weights would part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer


def agree_on_overflow(optimizers: Sequence[Optimizer]) -> Callable[[], None]:
    """Has every `GradScaler` that unscales gradients of these optimizers hear of the overflows of all processes.

    It is the one place that both ways of `GradScaler.step` pass, those of optimizers that skip by themselves too.

    Returns:
        What takes it back.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return lambda: None
    own = {id(optimizer) for optimizer in optimizers}
    original: Any = GradScaler._unscale_grads_

    def unscale(scaler: GradScaler, optimizer: Optimizer, inv_scale: Any, found_inf: Any, allow_fp16: bool) -> Any:
        found = original(scaler, optimizer, inv_scale, found_inf, allow_fp16)
        if id(optimizer) in own:
            most = torch.stack([value.to(found_inf.device) for value in found.values()] or [found_inf]).amax()
            dist.all_reduce(most, dist.ReduceOp.MAX)
            for value in found.values():
                value.copy_(most)
        return found

    patched: Any = GradScaler
    patched._unscale_grads_ = unscale

    def undo() -> None:
        if patched._unscale_grads_ is unscale:
            patched._unscale_grads_ = original

    return undo
