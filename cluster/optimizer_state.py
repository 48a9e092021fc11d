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
        self._plain = _is_plain(optimizer, self._begin)
        self._keeps_state = keeps_state

    def begin_round(self, kept: Kept) -> None:
        """Set the state that a round begins with."""
        if not self._keeps_state:
            if self._plain:
                self._reset()
            else:
                self.torch.load_state_dict(self._begin)
            return
        state: dict[int, dict[str, Any]] = {}
        for key, value in {**kept.values, **kept.tensors}.items():
            if key.startswith(_PREFIX):
                index, name = key.removeprefix(_PREFIX).split("/", 1)
                state.setdefault(int(index), {})[name] = value
        self.torch.load_state_dict({**self._begin, "state": state})

    def _reset(self) -> None:
        """What `load_state_dict` comes to where there is no state and every option is a number or the like."""
        self.torch.state.clear()
        for group, begin in zip(self.torch.param_groups, self._begin["param_groups"], strict=True):
            parameters = group["params"]
            group.clear()
            group.update(begin, params=parameters)

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


def _is_plain(optimizer: Optimizer, begin: Mapping[str, Any]) -> bool:
    """Whether an optimizer begins without state, and loads one as torch has it, with options that are copied by naming."""
    values = (value for group in begin["param_groups"] for key, value in group.items() if key != "params")
    own = type(optimizer).load_state_dict is not Optimizer.load_state_dict
    hooks = optimizer._optimizer_load_state_dict_pre_hooks or optimizer._optimizer_load_state_dict_post_hooks
    simple = all(value is None or isinstance(value, bool | int | float | str) for value in values)
    return simple and not begin["state"] and not own and not hooks
