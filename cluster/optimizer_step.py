"""One move of the parameters: gradients cleared before, the optimizer's step after.

torch spends as long on what surrounds a step (hooks, records for its profiler, options looked up by name) as plain
gradient descent takes for a small model. Where there is no more to an optimizer than that, it is done here in one call,
by the same operation on each tensor and so with the same bytes; every other optimizer does its own step.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

_PLAIN = {"momentum": 0, "weight_decay": 0, "maximize": False, "differentiable": False, "fused": None}


class OptimizerStep(Protocol):
    def clear(self) -> None:
        """Leaves no gradient in any parameter."""
        ...

    def move(self) -> None:
        """Moves the parameters by their gradients."""
        ...


def optimizer_step(optimizer: Optimizer) -> OptimizerStep:
    """How an optimizer is stepped, as its settings and hooks are now; learning rates may change from step to step."""
    return _PlainDescent(optimizer) if _is_plain(optimizer) else _OwnStep(optimizer)


class _OwnStep:
    def __init__(self, optimizer: Optimizer) -> None:
        self.clear, self.move = optimizer.zero_grad, optimizer.step


class _PlainDescent:
    """p <- p - lr * gradient."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._groups: list[tuple[dict[str, Any], list[Tensor]]] = [
            (group, list(group["params"])) for group in optimizer.param_groups
        ]

    def clear(self) -> None:
        for _, parameters in self._groups:
            for parameter in parameters:
                parameter.grad = None

    @torch.no_grad()
    def move(self) -> None:
        moved = [[p for p in parameters if p.grad is not None] for _, parameters in self._groups]
        gradients = [[p.grad for p in parameters if p.grad is not None] for parameters in moved]
        if any(grad.is_sparse for grads in gradients for grad in grads):
            self._optimizer.step()
            return
        for (group, _), parameters, grads in zip(self._groups, moved, gradients, strict=True):
            if parameters:
                torch._foreach_add_(parameters, grads, alpha=-group["lr"])  # pyright: ignore[reportPrivateImportUsage]


def _is_plain(optimizer: Optimizer) -> bool:
    """Whether nothing but plain descent happens in a step, on the CPU."""
    if type(optimizer) is not SGD or {"step", "zero_grad"} & vars(optimizer).keys():  # a scheduler wraps `step`
        return False
    own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    if own or _global_optimizer_pre_hooks or _global_optimizer_post_hooks:
        return False
    return all(
        all(group.get(name) == value for name, value in _PLAIN.items())
        and isinstance(group["lr"], float | int)
        and all(type(p) is torch.nn.Parameter and p.device.type == "cpu" for p in group["params"])
        for group in optimizer.param_groups
    )
