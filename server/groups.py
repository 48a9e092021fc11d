"""Versions of a run whose sites are in groups: one for each group in a round, and now and then one for all.

A group's version comes from its sum and its own optimizer's state, over the group's version before it. Every
`combines_every` versions the groups' differences to the last common version are averaged, weighted by the examples of
all their rounds since, and the job's optimizer moves the common version by that. In between it stays what it was.

Invariant: what is made is a function of the version before, on the disk, and of the sums; so it can be made again after a
crash. Groups are worked on one after the other: beside their sums, the memory of one version is needed.
"""

from __future__ import annotations

from collections.abc import Mapping

from atoll.aggregation.codecs.casts import Native
from atoll.aggregation.encode import encode_update
from atoll.aggregation.layout import UpdateLayout, update_layout
from atoll.aggregation.next_model import next_model
from atoll.aggregation.optimizer_state import OptimizerState
from atoll.aggregation.reducers.reduction import Reduction
from atoll.aggregation.round_sum import RoundSum
from atoll.aggregation.rounding import SECRET_BYTES, Rounding, rounding_key
from atoll.aggregation.schedule import Branching
from atoll.aggregation.server_optimizers import ServerOptimizer
from atoll.aggregation.strategy import Strategy
from atoll.server.models import RunModels
from atoll.server.round import Round
from atoll.server.round_work import NewVersion
from atoll.wire.checksum import crc32_of
from atoll.wire.manifest import Manifest
from atoll.wire.tensors import views

_WEIGHT = "atoll.weight"  # in the metadata of a group's version: examples since the last common version


class Groups:
    """Makes the versions of one run."""

    def __init__(self, strategy: Strategy, schedule: Branching, manifest: Manifest, models: RunModels) -> None:
        self._every = schedule.combines_every
        self._manifest = manifest
        self._models = models
        self._layout = update_layout(manifest, strategy.codec, strategy.buffers, strategy.local)
        # Of the groups' differences, which go no way: in the model's own precision.
        self._exact = update_layout(manifest, Native(Native.Options()), strategy.buffers, strategy.local)

    def make_version(
        self, round_: Round, current: int, reductions: Mapping[int, Reduction], strategy: Strategy
    ) -> NewVersion:
        """Version `current` + 1 of every group, and of all, durable on disk with their optimizers' states.

        Args:
            reductions: of a closing round, by group.
            strategy: as it is in this round.

        Raises:
            DiskFull: no room for it; may be tried again.
            BadUpdate: a value is out of range, or a group has moved beyond the bound.
        """
        version, optimizer = current + 1, strategy.optimizer
        inner: ServerOptimizer = strategy.schedule.inner_optimizer  # type: ignore[attr-defined]  # Branching, as at first
        weights = {group: self._move(round_, group, current, inner, sum_) for group, sum_ in sorted(reductions.items())}
        state = self._state(optimizer, current, None, self._layout)
        with (
            self._models.open(current) as base,
            self._models.create(version, {"atoll.round": str(round_.number)}) as out,
        ):
            if version % self._every:
                out[:] = base.map
            else:
                state = next_model(
                    self._summed(version, weights, base.map, strategy.bound),
                    optimizer=optimizer,
                    state=state,
                    base=base.map,
                    out=out,
                    manifest=self._manifest,
                )
            crc32 = crc32_of(out)
        self._models.save_optimizer(version, state)
        return NewVersion(version=version, crc32=crc32, num_bytes=self._manifest.num_bytes)

    def _move(self, round_: Round, group: int, current: int, optimizer: ServerOptimizer, reduction: Reduction) -> int:
        """Makes a group's next version; the examples that it has seen since the last common one."""
        begins = current % self._every == 0
        those = [site for site in round_.in_branch(group) if site in round_.closing]
        weight = reduction.sum_weights if round_.secured else sum(round_.updates[site].weight for site in those)
        with self._models.open(current, None if begins else group) as base:
            weight += 0 if begins else int(base.metadata[_WEIGHT])
            about = {"atoll.round": str(round_.number), _WEIGHT: str(weight)}
            with self._models.create(current + 1, about, branch=group) as out:
                state = next_model(
                    reduction,
                    optimizer=optimizer,
                    state=self._state(optimizer, current, group, self._layout),
                    base=base.map,
                    out=out,
                    manifest=self._manifest,
                )
        self._models.save_optimizer(current + 1, state, group)
        return weight

    def _summed(self, version: int, weights: Mapping[int, int], base: memoryview, bound: float) -> RoundSum:
        """The mean of the groups' differences to the common version, as the sum of so many updates."""
        largest = max(weights.values())
        total = RoundSum(self._exact, num_sites=len(weights), max_weight=largest, bound=bound)
        update = bytearray(self._exact.num_bytes)
        rounding = Rounding(rounding_key(bytes(SECRET_BYTES), version))  # this codec draws no lots
        for group, weight in weights.items():
            with self._models.open(version, group) as made:
                encode_update(
                    self._exact,
                    views(self._manifest, base, writable=False),
                    views(self._manifest, made.map, writable=False),
                    update,
                    rounding=rounding,
                    bound=bound,
                )
            total.fold(f"group-{group:06d}", update, weight)
        return total

    def _state(
        self, optimizer: ServerOptimizer, version: int, group: int | None, layout: UpdateLayout
    ) -> OptimizerState:
        """An optimizer's state after `version`; of a group, or of the common version."""
        if version == 0:
            return optimizer.init(layout)
        return self._models.load_optimizer(version, optimizer, layout, group)
