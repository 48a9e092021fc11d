"""FedDyn: a dynamic regulariser at each site, and its mean at the server (Acar et al. 2021, arXiv:2111.04263)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from pydantic import Field
from torch import Tensor, nn

from atoll.aggregation.lanes import ALL, Lane, Share
from atoll.aggregation.layout import UpdateLayout
from atoll.aggregation.optimizer_state import OptimizerState
from atoll.aggregation.server_optimizers import Blocks, ServerOptimizer, initial_state
from atoll.wire.job import Strict


class FedDyn:
    """Has the stationary points of the sites' losses agree with that of all (Acar et al. 2021, algorithm 1).

    The loss of site k gains -<l_k, w> + alpha / 2 ||w - w_base||^2, and after the round l_k <- l_k - alpha (w_k - w_base)
    (arXiv:2111.04263, equation 1). Needs the optimizer feddyn at the server. l_k moves by what the codec left of the
    difference, so the server's h stays the mean of all l_k.
    Memory at the site: 2 copies of the trained parameters.
    """

    class Options(Strict):
        alpha: float = Field(default=0.01, gt=0, le=1e6, allow_inf_nan=False)  # 0.001 to 0.1 in the paper

    def __init__(self, options: Options) -> None:
        self.name = "feddyn"
        self.alpha = options.alpha
        self.lanes: tuple[Lane, ...] = ()
        self._own: Mapping[str, Tensor] = {}  # l_k, by parameter
        self._linear: dict[str, Tensor] = {}  # the same, where the model is
        self._base: dict[str, Tensor] = {}
        self._dtypes: dict[str, torch.dtype] = {}  # of l_k

    def resume(self, kept: Mapping[str, Tensor], lanes: Mapping[str, Mapping[str, Tensor]]) -> None:
        self._own = dict(kept)

    def begin(self, model: nn.Module) -> None:
        self._base = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
        self._dtypes = {name: torch.promote_types(base.dtype, torch.float32) for name, base in self._base.items()}
        self._linear = {
            name: self._own[name].to(base.device, base.dtype) for name, base in self._base.items() if name in self._own
        }

    @torch.no_grad()
    def before_step(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if parameter.grad is None or name not in self._base:
                continue
            parameter.grad.add_(parameter - self._base[name], alpha=self.alpha)
            if name in self._linear:
                parameter.grad.sub_(self._linear[name])

    def after_step(self, model: nn.Module) -> None:
        pass

    def end(self, model: nn.Module) -> None:
        self._base, self._linear = {}, {}

    def differences(self) -> Mapping[str, Tensor]:
        return {}

    def settle(self, sent: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        kept = {}
        for name, dtype in self._dtypes.items():
            if name in sent:  # a parameter that stays at this site has nothing to agree on with others
                moved = sent[name] * -self.alpha
                kept[name] = (moved + self._own[name] if name in self._own else moved).to(dtype)
        self._own = {}
        return kept


class FedDynOptimizer:
    """The server's part of FedDyn: the mean of the trained models, less what the sites' regularisers hold.

    h <- h - alpha |S|/N x, w <- w + x - h / alpha with the mean difference x, from h = 0 (Acar et al. 2021,
    arXiv:2111.04263, algorithm 1). What is kept is h / alpha, into which alpha does not enter: the rule feddyn, which
    this needs, has it alone. Memory: one model of state.
    """

    class Options(Strict):
        pass

    def __init__(self, options: Options, share: Share = ALL) -> None:
        self.name = "feddyn"
        self._share = share

    def in_round(self, share: Share) -> ServerOptimizer:
        return FedDynOptimizer(self.Options(), share)

    def precision(self, *, wide: bool) -> torch.dtype:
        return torch.float64 if wide else torch.float32

    def init(self, layout: UpdateLayout) -> OptimizerState:
        return initial_state(self, layout)

    def step(self, parameters_P: Tensor, difference_P: Tensor, state: Blocks, num_steps: int) -> Blocks:
        scaled_P = difference_P * -self._share.cohort  # h / alpha
        if "h" in state:
            scaled_P.add_(state["h"], alpha=self._share.before)
        parameters_P.add_(difference_P).sub_(scaled_P)
        return {"h": scaled_P}
