"""FedProx: local training that is held near the model it began from (Li et al. 2018, arXiv:1812.06127)."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor, nn

from atoll.wire.job import Strict


class FedProx:
    """Holds local training near the base model: the loss gains mu / 2 ||w - w_base||^2.

    g <- g + mu (w - w_base), for each parameter that has a gradient (Li et al. 2018, arXiv:1812.06127, equation 2).
    Memory: one more copy of the trained parameters at the site.
    """

    class Options(Strict):
        mu: float = Field(ge=0, le=1e6, allow_inf_nan=False)  # weight of the proximal term; 0.001 to 1 in the paper

    def __init__(self, options: Options) -> None:
        self.name = "fedprox"
        self.mu = options.mu
        self._base: dict[str, Tensor] = {}

    def begin(self, model: nn.Module) -> None:
        self._base = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}

    @torch.no_grad()
    def before_step(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if parameter.grad is not None and name in self._base:
                parameter.grad.add_(parameter - self._base[name], alpha=self.mu)

    def after_step(self, model: nn.Module) -> None:
        pass

    def end(self, model: nn.Module) -> None:
        self._base = {}
