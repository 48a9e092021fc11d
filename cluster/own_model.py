"""A site's own model over the rounds of a run in which a round exchanges one fragment of it (aggregation/fragments.py).

The fragments that others wait for are trained on here from where they are; the one that came back from the server takes
the new value's place, or is mixed with it. Nothing here knows the loop that trains: `begin` is called before the steps
of a round, `kept` after them, by the worker or by a script's hook.

Invariant: what a round begins with is a function of its base version and of what this site's round before it left, so
a round that is done again begins with the same values.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from atoll.aggregation.fragments import Fragments
from atoll.cluster.site_state import Kept

_MODEL = "model/"
_ROUND = "model.round"


class OwnModel:
    """Takes up and keeps the tensors that travel. `alpha` weighs a fragment's new value against the site's own."""

    def __init__(self, fragments: Fragments, alpha: float) -> None:
        self._fragments = fragments
        self._alpha = alpha
        self._names = frozenset[str]().union(*(fragment.names for fragment in fragments.all))

    @property
    def goes_on(self) -> bool:
        """Whether anything of a site's own is left at the begin of a round; else the base version replaces all."""
        return self._fragments.count > 1 or self._alpha < 1

    @torch.no_grad()
    def begin(self, tensors: Mapping[str, Tensor], kept: Kept, round_: int) -> None:
        """Puts the site's own values into the model.

        Args:
            tensors: of the model by name, which hold the round's base version; changed in place.
            kept: what the site's last round left; where that is nothing, the base version stays.
        """
        since = kept.values.get(_ROUND)
        if not self.goes_on or since is None:
            return
        renewed = frozenset[str]().union(*(self._fragments.of_round(r).names for r in range(int(since), round_)))
        for name in self._names:
            own, tensor = kept.tensors[_MODEL + name].to(tensors[name].device), tensors[name]
            if name not in renewed:
                tensor.copy_(own)
            elif self._alpha < 1 and tensor.is_floating_point():
                tensor.copy_(torch.lerp(own.double(), tensor.double(), self._alpha))

    def kept(self, tensors: Mapping[str, Tensor], round_: int) -> Kept:
        """What the next round needs, after the steps of `round_`."""
        if not self.goes_on:
            return Kept()
        own = {_MODEL + name: tensors[name].detach() for name in self._names}
        return Kept(tensors=own, values={_ROUND: round_})
