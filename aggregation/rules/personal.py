"""What a site keeps for itself: no model of its own, one trained beside the global model, or one made of it.

A personal model never leaves its site. It is judged on the site's test data beside the global one, and the metrics are
named after it ("personal_accuracy" beside "accuracy").
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from atoll.aggregation.rules.fedprox import FedProx
from atoll.aggregation.rules.rule import LocalRule, NoRule
from atoll.wire.job import Strict, WorkSection


class Personal(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def keeps(self) -> bool:
        """True: the site keeps a model, and trains it in each round that it takes part in. False: whenever a version
        is judged, the model is made of that version."""
        ...

    def work(self, section: WorkSection) -> WorkSection | None:
        """The training of the personal model, where `section` is that of a round; None: there is none."""
        ...

    def rule(self, anchor: Mapping[str, Tensor]) -> LocalRule:
        """What changes in the loop that trains it; `anchor` are those tensors of the global version
        that sites share."""
        ...


class NoPersonal:
    """None: the global model is everybody's."""

    class Options(Strict):
        pass

    def __init__(self, options: Options) -> None:
        self.name: str = "none"
        self.keeps = False

    def work(self, section: WorkSection) -> WorkSection | None:
        return None

    def rule(self, anchor: Mapping[str, Tensor]) -> LocalRule:
        return NoRule(NoRule.Options())


class _Work(Strict):
    """How much a personal model is trained, in epochs or in optimizer steps."""

    epochs: int | None = Field(default=None, ge=1, le=100_000)
    steps: int | None = Field(default=None, ge=1, le=100_000_000)

    @model_validator(mode="after")
    def _one_unit(self) -> _Work:
        if self.epochs is not None and self.steps is not None:
            raise ValueError("give epochs or steps, not both")
        return self

    def of(self, section: WorkSection) -> WorkSection:
        """`section` with these epochs or steps; as it is where neither is given."""
        if self.epochs is None and self.steps is None:
            return section
        return section.model_copy(update={"epochs": self.epochs, "steps": self.steps})


class Ditto:
    """A model of the site's own, trained after each round and pulled to the version that the round began with.

    v <- v - lr (g(v) + lam (v - w)), from the first version that the site trains, over as much work as the round's
    unless told (Li et al. 2021, arXiv:2012.04221, algorithm 1). The global model is what it would be without. Time: a
    round trains twice; disk at the site: two models.
    """

    class Options(_Work):
        lam: float = Field(default=0.1, ge=0, le=1e6, allow_inf_nan=False)  # lambda of the paper, 0.05 to 2 there

    def __init__(self, options: Options) -> None:
        self.name: str = "ditto"
        self.keeps = True
        self._options = options

    def work(self, section: WorkSection) -> WorkSection | None:
        return self._options.of(section)

    def rule(self, anchor: Mapping[str, Tensor]) -> LocalRule:
        return _Anchored(self._options.lam, anchor)


class FineTune:
    """Each version, trained a little at the site before it is judged there; nothing of that is sent or kept.

    As much as a round's work unless told (Wang et al. 2019, arXiv:1910.10252, section 3). Time: every evaluation trains first.
    """

    class Options(_Work):
        pass

    def __init__(self, options: Options) -> None:
        self.name: str = "fine_tune"
        self.keeps = False
        self._options = options

    def work(self, section: WorkSection) -> WorkSection | None:
        return self._options.of(section)

    def rule(self, anchor: Mapping[str, Tensor]) -> LocalRule:
        return NoRule(NoRule.Options())


class _Anchored(FedProx):
    """The proximal term to tensors that are given, where FedProx pulls to those that training begins with."""

    def __init__(self, strength: float, anchor: Mapping[str, Tensor]) -> None:
        super().__init__(FedProx.Options(mu=strength))
        self.name = "anchored"
        self._anchor = anchor

    @torch.no_grad()
    def begin(self, model: nn.Module) -> None:
        trained = ((name, p) for name, p in model.named_parameters() if p.requires_grad)
        self._base = {n: self._anchor[n].to(p.device, p.dtype, copy=True) for n, p in trained if n in self._anchor}
