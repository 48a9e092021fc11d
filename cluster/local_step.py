"""How the gradients of one batch are made: by one process, or by a site's processes together (`cluster/parallel`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from atoll.cluster.app import App
from atoll.cluster.metric_sums import Sums


@dataclass(frozen=True, slots=True)
class Share:
    """What one process has seen of a batch."""

    loss: Tensor | float  # mean over its examples
    weight: int  # of its examples
    batch_weight: int  # of the whole batch, the same on every process


class LocalStep(Protocol):
    """One optimizer step's gradients, whatever the layout. Gradients are zero or None before."""

    def seed(self, seed: int) -> int:
        """Seed of what is random in this process's share of a batch, such as dropout."""
        ...

    def gradients(self, batch: Any) -> Share:
        """Leaves in the parameters that this process holds the gradient of the mean loss over the whole batch."""
        ...

    def before_update(self) -> None:
        """Called when the local rule has changed the gradients, before the optimizer's step."""
        ...

    def total(self, sums: Sums) -> Sums:
        """Sums and counts over all processes, from those of each."""
        ...


class OneProcess:
    """The step of a site with one process."""

    def __init__(self, app: App, model: nn.Module) -> None:
        self._app, self._model = app, model

    def seed(self, seed: int) -> int:
        return seed

    def gradients(self, batch: Any) -> Share:
        loss = self._app.loss(self._model(*self._app.inputs(batch)), batch)
        loss.backward()  # type: ignore[no-untyped-call]  # of torch
        weight = self._app.examples(batch)
        return Share(loss, weight, weight)

    def before_update(self) -> None:
        pass

    def total(self, sums: Sums) -> Sums:
        return sums
