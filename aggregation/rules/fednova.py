"""FedNova: sites that make different numbers of steps, without a bias to those that make many.

Wang et al. 2020, arXiv:2007.07481.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from atoll.aggregation.lanes import FACTOR_UNIT, Lane
from atoll.wire.errors import AppFailed
from atoll.wire.job import Strict

STEPS: Final = Lane("fednova.steps", "factor")


class FedNova:
    """Averages differences by step, then goes as many steps as the sites made on average.

    w <- w + (sum_i p_i ||a_i||_1) sum_i p_i (w_i - w) / ||a_i||_1 with p_i by examples (Wang et al. 2020,
    arXiv:2007.07481, section 4), where a_i holds what each local gradient counts in w_i - w, in units of the learning
    rate: [1, 1, ..] for SGD, (1 - m^(K - k)) / (1 - m) for momentum m, (1 - lr mu)^(K - 1 - k) for the proximal term mu
    (the same as fedprox's, an option here). Weight decay counts as part of the loss. Where a schedule of the app moves
    lr, a_i is in units of the first step's. Refused, since the paper has no formula: another optimizer than SGD,
    Nesterov, dampening, momentum that is kept over rounds or comes with mu, several learning rates.

    The server's factor is an exact sum over the sites, as the differences are. Memory at the site: 2 more copies of
    the trained parameters.
    """

    class Options(Strict):
        mu: float = Field(default=0.0, ge=0, le=1e6, allow_inf_nan=False)  # weight of the proximal term

    def __init__(self, options: Options) -> None:
        self.name = "fednova"
        self.mu = options.mu
        self.lanes: tuple[Lane, ...] = (STEPS,)
        self._optimizer: Optimizer | None = None
        self._base: dict[str, Tensor] = {}
        self._differences: dict[str, Tensor] = {}
        self._first_lr = self._lr = 0.0
        self._speed = self._norm = 0.0  # what all gradients so far count in the velocity, and in w_i - w: ||a_i||_1

    def watch(self, optimizer: Optimizer) -> None:
        _require_formula(optimizer, self.mu)
        self._optimizer = optimizer

    def resume(self, kept: Mapping[str, Tensor], lanes: Mapping[str, Mapping[str, Tensor]]) -> None:
        pass

    def begin(self, model: nn.Module) -> None:
        self._base = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
        self._first_lr = self._speed = self._norm = 0.0

    @torch.no_grad()
    def before_step(self, model: nn.Module) -> None:
        self._lr = self._group["lr"]
        if self.mu:
            for name, parameter in model.named_parameters():
                if parameter.grad is not None and name in self._base:
                    parameter.grad.add_(parameter - self._base[name], alpha=self.mu)

    def after_step(self, model: nn.Module) -> None:
        lr = float(self._lr)
        self._first_lr = self._first_lr or lr
        if not (lr > 0 and lr * self.mu <= 1):
            raise _refused("lr", f"{lr:g} with mu = {self.mu:g}", "above 0, and at most 1 / mu")
        self._speed = self._group["momentum"] * self._speed + 1
        self._norm = (1 - lr * self.mu) * self._norm + lr / self._first_lr * self._speed

    @torch.no_grad()
    def end(self, model: nn.Module) -> None:
        trained = dict(model.named_parameters())
        self._differences = {name: (trained[name] - base) / self._norm for name, base in self._base.items()}
        self._base = {}

    def differences(self) -> Mapping[str, Tensor]:
        return {**self._differences, STEPS.name: torch.tensor(self._norm * FACTOR_UNIT, dtype=torch.float64)}

    def settle(self, sent: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        self._differences = {}
        return {}

    @property
    def _group(self) -> Mapping[str, Any]:
        if self._optimizer is None:
            raise ValueError("fednova counts the steps of an optimizer: hand it to watch() before begin()")
        return self._optimizer.param_groups[0]


def _require_formula(optimizer: Optimizer, mu: float) -> None:
    if type(optimizer) is not SGD:
        raise _refused("optimizer", type(optimizer).__name__, "torch.optim.SGD")
    groups = optimizer.param_groups
    for key in ("lr", "momentum"):
        if len(values := {float(group[key]) for group in groups}) > 1:
            raise _refused(key, ", ".join(f"{value:g}" for value in sorted(values)), "the same for all parameters")
    group = groups[0]
    for key in ("nesterov", "dampening", "maximize"):
        if any(group[key] for group in groups):
            raise _refused(key, group[key], "none")
    if group["momentum"] and mu:
        raise _refused("momentum", f"{group['momentum']:g} with mu = {mu:g}", "one of the two")
    if any(state.get("momentum_buffer") is not None for state in optimizer.state.values()):
        raise _refused("momentum", "kept over rounds", "keeps_optimizer = False in the app")


def _refused(field: str, value: object, bound: str) -> AppFailed:
    return AppFailed(
        f"fednova cannot say what a local step counts with {field} = {value}: wanted {bound}; change the app's "
        "optimizer(), or take the strategy scaffold",
        field=field,
        value=str(value),
        bound=bound,
    )
