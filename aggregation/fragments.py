"""A model in fragments, of which each round exchanges one: which tensors and bytes, and the optimizer's state of each.

Fragment p of P is a range of neighbouring tensors in manifest order, of about a P-th of the bytes that travel; it is
exchanged in rounds p + 1, p + 1 + P, and so on (streaming DiLoCo: Douillard et al. 2025, arXiv:2501.18512, section 2.1).
So a version differs from the one before it in one fragment's bytes.

Invariant: fragments follow from manifest, codec and policies alone, so all parties of a run have the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from atoll.aggregation.blocks import whole_vector
from atoll.aggregation.codecs.encoding import Codec
from atoll.aggregation.layout import Buffers, UpdateLayout, update_layout
from atoll.aggregation.optimizer_state import OptimizerState
from atoll.aggregation.server_optimizers import ServerOptimizer
from atoll.wire.errors import ConfigError
from atoll.wire.manifest import Manifest, TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragment:
    """One part of a model. `start` to `stop` are its bytes in the data of a version."""

    layout: UpdateLayout  # of its updates
    names: frozenset[str]  # of its tensors that travel
    start: int
    stop: int


class Fragments:
    """The fragments of one run's model; one fragment is the whole of it."""

    def __init__(
        self, manifest: Manifest, codec: Codec, buffers: Buffers, local: Sequence[str] = (), *, count: int = 1
    ) -> None:
        """Raises ConfigError where there are fewer tensors than fragments, or as `update_layout` does."""
        self.manifest = manifest
        self.whole = update_layout(manifest, codec, buffers, local)
        if count == 1:
            names = frozenset(spec.name for spec in _travelling(self.whole))
            self.all: tuple[Fragment, ...] = (
                Fragment(layout=self.whole, names=names, start=0, stop=manifest.num_bytes),
            )
            return
        made = []
        for specs in _balanced(_travelling(self.whole), count):
            names = frozenset(spec.name for spec in specs)
            layout = update_layout(manifest, codec, buffers, local, only=names)
            start, stop = specs[0].offset, specs[-1].offset + specs[-1].num_bytes
            made.append(Fragment(layout=layout, names=names, start=start, stop=stop))
        self.all = tuple(made)

    @property
    def count(self) -> int:
        return len(self.all)

    def of_round(self, round_: int) -> Fragment:
        """What round `round_`, from 1 on, exchanges; the version that it makes differs in that alone."""
        return self.all[(round_ - 1) % self.count]

    # --- the server optimizer's state -------------------------------------------------------------------------------

    def state_of(self, round_: int, state: OptimizerState, optimizer: ServerOptimizer) -> OptimizerState:
        """The part of the optimizer's state that belongs to a round's fragment, after as many steps as it has had."""
        if self.count == 1:
            return state
        fresh = optimizer.init(self.of_round(round_).layout)
        num_steps = state.num_steps // self.count
        if num_steps == 0:
            return fresh
        places = self._places(round_, optimizer)
        tensors = {
            name: value_V[places[precision]]
            for name, value_V in state.tensors.items()
            if (precision := name.partition(".")[0]) in fresh.num_parameters
        }
        return replace(fresh, num_steps=num_steps, tensors=tensors)

    def with_state_of(
        self, round_: int, state: OptimizerState, part: OptimizerState, optimizer: ServerOptimizer
    ) -> OptimizerState:
        """The whole state once the fragment of `round_` has made its step; `state` stays as it is."""
        if self.count == 1:
            return part
        places = self._places(round_, optimizer)
        tensors: dict[str, Tensor] = dict(state.tensors)
        for name, value_V in part.tensors.items():
            precision = name.partition(".")[0]
            known = tensors.get(name)
            whole_V = whole_vector(state.num_parameters[precision], value_V.dtype) if known is None else known.clone()
            whole_V[places[precision]] = value_V
            tensors[name] = whole_V
        return replace(state, num_steps=state.num_steps + 1, tensors=tensors)

    def _places(self, round_: int, optimizer: ServerOptimizer) -> Mapping[str, slice]:
        """Where the fragment's parameters stand among all, by precision of the optimizer."""
        place = (round_ - 1) % self.count
        before: dict[str, int] = {}
        for fragment in self.all[:place]:
            for precision, number in optimizer.init(fragment.layout).num_parameters.items():
                before[precision] = before.get(precision, 0) + number
        own = optimizer.init(self.all[place].layout).num_parameters
        return {name: slice(before.get(name, 0), before.get(name, 0) + number) for name, number in own.items()}


def _travelling(layout: UpdateLayout) -> list[TensorSpec]:
    absent = {spec.name for spec in layout.absent}
    return [spec for spec in layout.manifest if spec.name not in absent]


def _balanced(specs: Sequence[TensorSpec], count: int) -> list[list[TensorSpec]]:
    """`count` ranges of neighbours; each border is the one nearest to its share of the bytes that leaves none empty."""
    if len(specs) < count:
        key = "strategy.schedule.fragments"
        raise ConfigError(
            f"{key} = {count}: the model has {len(specs)} tensors that travel, and a fragment holds one at least",
            key=key,
            value=str(count),
            bound=f"1 to {len(specs)}",
        )
    ends = [0, *itertools.accumulate(spec.num_bytes for spec in specs)]
    borders = [0]
    for number in range(1, count):
        share = ends[-1] * number / count
        possible = range(borders[-1] + 1, len(specs) - (count - number) + 1)
        borders.append(min(possible, key=lambda place: abs(ends[place] - share)))
    borders.append(len(specs))
    return [list(specs[start:stop]) for start, stop in itertools.pairwise(borders)]
