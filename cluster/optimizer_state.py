"""An optimizer's state between two rounds: begun anew, or taken up where the site's last round left it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from atoll.cluster.site_state import Kept
from atoll.wire.errors import AppFailed

_PREFIX = "optimizer/"


class LocalOptimizer:
    """The app's optimizer of a run, made once; its hyper-parameters are those it was made with at each round's begin,
    whatever a scheduler did to them."""

    def __init__(self, optimizer: Optimizer, *, keeps_state: bool) -> None:
        self.torch = optimizer
        self._begin = copy.deepcopy(optimizer.state_dict())
        self._keeps_state = keeps_state

    def begin_round(self, kept: Kept) -> None:
        """Set the state that a round begins with."""
        if not self._keeps_state:
            self.torch.load_state_dict(self._begin)
            return
        state: dict[int, dict[str, Any]] = {}
        for key, value in {**kept.values, **kept.tensors}.items():
            if key.startswith(_PREFIX):
                index, name = key.removeprefix(_PREFIX).split("/", 1)
                state.setdefault(int(index), {})[name] = value
        self.torch.load_state_dict({**self._begin, "state": state})

    def end_round(self) -> Kept:
        """What the next round needs of it; nothing unless the app keeps its optimizer.

        Raises:
            AppFailed: the optimizer's state holds more than tensors and numbers, such as that of LBFGS.
        """
        if not self._keeps_state:
            return Kept()
        tensors: dict[str, Tensor] = {}
        values: dict[str, Any] = {}
        states: Mapping[int, Mapping[str, Any]] = self.torch.state_dict()["state"]
        for index, entries in states.items():
            for name, value in entries.items():
                if isinstance(value, Tensor):
                    tensors[f"{_PREFIX}{index}/{name}"] = value
                elif value is None or isinstance(value, bool | int | float | str):
                    values[f"{_PREFIX}{index}/{name}"] = value
                else:
                    raise AppFailed(
                        f"{type(self.torch).__name__} keeps {name!r} as {type(value).__name__}, which cannot be kept "
                        "between rounds; set keeps_optimizer = False in the app, and take another schedule than every_steps",
                        field=name,
                    )
        return Kept(tensors=tensors, values=values)
