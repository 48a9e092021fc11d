"""SCAFFOLD: control variates against the drift of sites whose data differ (Karimireddy et al. 2020, arXiv:1910.06378)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor, nn

from atoll.aggregation.lanes import Lane
from atoll.wire.job import Strict

CONTROL: Final = Lane("scaffold.control", "control")


class Scaffold:
    """Corrects each local gradient by how the site's gradients differ from those of all (algorithm 1, option II).

    y <- y - lr (g(y) - c_i + c); c_i+ = mean of g(y) over the round's steps; c <- c + |S|/N mean over S of (c_i+ - c_i)
    (Karimireddy et al. 2020, arXiv:1910.06378). In exact arithmetic that mean is option II's
    c_i - c + (x - y) / (K lr) for plain SGD. Measured like this it needs neither K nor lr, does not cancel, and is
    defined for schedules, weight decay, momentum and Adam too, whose steps are made with the corrected gradient.

    A parameter counts the steps in which it had a gradient. c_i moves by what the codec left of c_i+ - c_i, so c stays
    the mean of all c_i. Memory at the site: 3 copies of the trained parameters, 2 of them in the round alone.
    """

    class Options(Strict):
        pass

    def __init__(self, options: Options) -> None:
        self.name = "scaffold"
        self.lanes: tuple[Lane, ...] = (CONTROL,)
        self._own: Mapping[str, Tensor] = {}  # c_i, by parameter
        self._all: Mapping[str, Tensor] = {}  # c
        self._corrections: dict[str, Tensor] = {}  # c - c_i
        self._sums: dict[str, Tensor] = {}  # of the round's gradients
        self._num_steps: dict[str, int] = {}

    def resume(self, kept: Mapping[str, Tensor], lanes: Mapping[str, Mapping[str, Tensor]]) -> None:
        self._own, self._all = dict(kept), lanes[CONTROL.name]

    @torch.no_grad()
    def begin(self, model: nn.Module) -> None:
        self._sums, self._num_steps, self._corrections = {}, {}, {}
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            wide = torch.promote_types(parameter.dtype, torch.float32)
            self._sums[name] = torch.zeros_like(parameter, dtype=wide)
            self._num_steps[name] = 0
            if name in self._all:
                everybody = self._all[name]
                correction = everybody - self._own[name] if name in self._own else everybody
                self._corrections[name] = correction.to(parameter.device, parameter.dtype)

    @torch.no_grad()
    def before_step(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if parameter.grad is None or name not in self._sums:
                continue
            self._sums[name].add_(parameter.grad)
            self._num_steps[name] += 1
            if name in self._corrections:
                parameter.grad.add_(self._corrections[name])

    def after_step(self, model: nn.Module) -> None:
        pass

    def end(self, model: nn.Module) -> None:
        self._corrections = {}

    def differences(self) -> Mapping[str, Tensor]:
        return {CONTROL.tensor(name): self._moved(name, control) for name, control in self._all.items()}

    def settle(self, sent: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        kept = {}
        for name, control in self._all.items():
            moved = sent[CONTROL.tensor(name)]
            kept[name] = (moved + self._own[name] if name in self._own else moved).to(control.dtype)
        self._sums, self._own, self._all = {}, {}, {}
        return kept

    def _moved(self, name: str, control: Tensor) -> Tensor:
        """c_i+ - c_i, on the CPU in the control's dtype."""
        num_steps = self._num_steps.get(name, 0)
        if not num_steps:
            return torch.zeros_like(control)
        mean = (self._sums[name] / num_steps).to("cpu", control.dtype)
        return mean - self._own[name] if name in self._own else mean
