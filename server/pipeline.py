"""THE PATH: what becomes of an update, from whole bytes in a staging slot to the next model version on disk.

::

    decode -> validate -> (journal) -> fold -> finish -> server optimizer -> commit
                                            `-> write_partial: the sum of a region, which the upper server commits

Invariants. An update is checked whole before any of it is folded, so a refused one changes nothing. It is folded only
after the journal says that it was accepted. Sums are exact, so neither order nor a replay changes a byte of the model.
Everything here blocks and runs in threads; torch releases the interpreter lock while it computes.
"""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass
from pathlib import Path

from atoll.aggregation.by_round import ByRound
from atoll.aggregation.layout import UpdateLayout
from atoll.aggregation.next_model import next_model
from atoll.aggregation.optimizer_state import OptimizerState
from atoll.aggregation.partial import PartialLayout
from atoll.aggregation.reducers.reduction import NO_METRICS, Mergeable, Metrics, Reduction, RoundTerms
from atoll.aggregation.schedule import Asynchronous, Branching
from atoll.aggregation.stages import Strategies
from atoll.aggregation.strategy import Strategy
from atoll.cluster.update_file import create_update
from atoll.server.groups import Groups
from atoll.server.models import RunModels
from atoll.server.round import Round
from atoll.server.round_work import NewVersion
from atoll.wire import runs_pb2
from atoll.wire.checksum import crc32_of
from atoll.wire.errors import BadUpdate
from atoll.wire.manifest import Manifest


@dataclass(slots=True, kw_only=True)
class OpenSum:
    """What is folded of a round so far."""

    reduction: Reduction
    num_sites: int
    max_weight: int
    folded: set[str]

    @property
    def sum(self) -> Mergeable:
        """The reduction, where it is a sum: planning has refused regions to every other."""
        if not isinstance(self.reduction, Mergeable):
            raise BadUpdate("this run's reducer cannot add the sums of regions", field="strategy.reducer")
        return self.reduction


class Pipeline:
    """Folds the updates of one run's open rounds and makes its model versions."""

    grows = False  # the layout says how long an update is

    def __init__(
        self,
        *,
        run: str,
        strategy: Strategy,
        seed: int,
        manifest: Manifest,
        models: RunModels,
        stages: Strategies | None = None,
    ) -> None:
        """`strategy` is that of the first round; `stages` those of all, where they differ."""
        self._run = run
        self._seed = seed
        self._strategy = strategy
        self._stages = stages
        self._manifest = manifest
        self._models = models
        self._fragments = stages.fragments(manifest) if stages else ByRound.always(strategy.fragments(manifest))
        self._layout: UpdateLayout = self._fragments.first.whole  # by which the optimizer's state goes: of any codec
        self._open: dict[tuple[int, int | None], OpenSum] = {}  # by round and group
        self._opening = threading.Lock()
        self._groups = (
            Groups(strategy, strategy.schedule, manifest, models) if isinstance(strategy.schedule, Branching) else None
        )
        self._optimizer_state: tuple[int, OptimizerState] | None = None  # with the version that it belongs to

    def mixed(self, num_updates: int) -> int:
        """Updates that every value of a version mixes, at least, which is made of so many."""
        return (self._stages or self._strategy.reducer).mixed(num_updates)

    def update_bytes(self, round_: int) -> int:
        """Length of an encoded update of a round."""
        return self.layout_of(round_).num_bytes

    def partial_bytes(self, round_: int) -> int:
        """Length of a region's sum of a round."""
        return PartialLayout(self.layout_of(round_)).num_bytes

    def layout_of(self, round_: int) -> UpdateLayout:
        """Of the updates of a round."""
        return self._fragments.at(round_).of_round(round_).layout

    def open_round(self, round_: Round) -> None:
        """Get ready to fold updates of `round_`; a cohort that has grown starts its sum anew.

        So does a round that is asked for again after it was abandoned.
        """
        with self._opening:
            for branch in round_.sums:
                self._begin(round_, branch)

    def _opened(self, round_: Round, branch: int | None) -> OpenSum:
        """A sum of a round, begun where it is not: its first update may be in before the run has got that far."""
        with self._opening:
            if (round_.number, branch) not in self._open:
                self._begin(round_, branch)
            return self._open[round_.number, branch]

    def _begin(self, round_: Round, branch: int | None) -> None:
        known = self._open.get((round_.number, branch))
        num_sites, max_weight = round_.terms_of(branch)
        same = known is not None and (known.num_sites, known.max_weight) == (num_sites, max_weight)
        if known is not None and same and known.folded <= set(round_.updates):
            return
        terms = RoundTerms(
            num_sites=num_sites,
            max_weight=max_weight,
            bound=self._at(round_.number).bound,
            seed=_seed(self._seed, round_.number),
            spool=self._models.spool,
        )
        reducer = self._at(round_.number).reducer
        reduction = reducer.init(self.layout_of(round_.number), terms)
        self._open[round_.number, branch] = OpenSum(
            reduction=reduction, num_sites=num_sites, max_weight=max_weight, folded=set()
        )

    def lacks(self, round_: Round) -> tuple[str, ...]:
        """Sites whose update is accepted but not in the sum, as after a restart: they still keep it."""
        known = list(self._open.items())  # a copy at once: threads open rounds meanwhile
        folded = [one.folded for (number, _), one in known if number == round_.number]
        return tuple(sorted(set(round_.updates).difference(*folded)))

    def check(self, round_: Round, site: str, weight: int, update: memoryview, metrics: Metrics = NO_METRICS) -> None:
        """Nothing where every byte of `update` can be folded; that of a region is the sum over its sites.

        Raises:
            BadUpdate: names site, round, tensor, value and bound.
        """
        try:
            known = self._opened(round_, round_.branches.get(site))
            if below := round_.regions.get(site):
                known.sum.check_partial(update, weight, num_sites=below, site=site, round=round_.number)
            else:
                known.reduction.check(update, weight, site=site, round=round_.number, metrics=metrics)
        except BadUpdate as error:
            text = f"update from {site}, round {round_.number}: {error.message}"
            raise BadUpdate(
                text,
                site=site,
                run=self._run,
                round=round_.number,
                field=error.field,
                value=error.value,
                bound=error.bound,
            ) from None

    def fold(self, round_: Round, site: str, weight: int, update: memoryview) -> None:
        """Add a checked and journalled update to its round's sum; once, however often it comes.

        Raises:
            DiskFull: the reducer keeps all updates and there is no room for this one; may be tried again.
        """
        known = self._opened(round_, round_.branches.get(site))
        if site in known.folded:
            return
        if site in round_.regions:
            known.sum.merge_partial(site, update)
        else:
            known.reduction.fold(site, update, weight, round_.updates[site].metrics, scale=self._scale(round_, site))
        known.folded.add(site)

    def _scale(self, round_: Round, site: str) -> float:
        """What an update counts that began with an older version than its round's."""
        staleness, schedule = round_.staleness(site), self._at(round_.number).schedule
        return schedule.discount(staleness) if staleness > 0 and isinstance(schedule, Asynchronous) else 1.0

    def write_partial(self, round_: Round, path: Path) -> tuple[int, int]:
        """Writes the sum of a closing round as a region sends it up; length and crc32 of the file.

        The agent makes it durable.

        Raises:
            DiskFull: no room for it; may be tried again.
        """
        total = self._open[round_.number, None].sum
        with create_update(path, total.partial_bytes) as out:
            total.write_partial(out)
            return total.partial_bytes, crc32_of(out)

    def complete(self, record: runs_pb2.RoundRecord, round_: Round) -> None:
        """Nothing more is known of a round of training."""

    def drop(self, number: int) -> None:
        """Forget the sum of a round that is committed or given up."""
        for key in [key for key in list(self._open) if key[0] == number]:
            self._open.pop(key, None)

    def make_version(self, round_: Round, current: int) -> NewVersion:
        """Version `current` + 1 from the sum of a closing round, durable on disk with its optimizer state.

        Raises:
            DiskFull: no room for it; may be tried again.
        """
        if self._groups is not None:
            reductions = {branch: self._reduction(round_, branch) for branch in round_.branch_weights}
            return self._groups.make_version(round_, current, reductions, self._at(round_.number))
        before, version = self._state_of(current), current + 1
        number, optimizer = round_.number, self._at(round_.number).optimizer
        fragments = self._fragments.at(number)
        with (
            self._models.open(current) as base,
            self._models.create(version, {"atoll.round": str(number)}) as out,
        ):
            moved = next_model(
                self._reduction(round_, None),
                optimizer=optimizer,
                state=fragments.state_of(number, before, optimizer),
                base=base.map,
                out=out,
                manifest=self._manifest,
                lanes=self._strategy.lanes,
                share=round_.share,
            )
            crc32 = crc32_of(out)
        state = fragments.with_state_of(number, before, moved, optimizer)
        self._models.save_optimizer(version, state)
        self._optimizer_state = (version, state)
        return NewVersion(version=version, crc32=crc32, num_bytes=self._manifest.num_bytes)

    def _reduction(self, round_: Round, branch: int | None) -> Reduction:
        """What a closing round makes of its updates, or of those of a group."""
        return self._open[round_.number, branch].reduction

    def _at(self, round_: int) -> Strategy:
        return self._strategy if self._stages is None else self._stages.at(round_)

    def _state_of(self, version: int) -> OptimizerState:
        """The optimizer's state after `version`: the one in memory, the one on disk, or a fresh one at version 0."""
        if self._optimizer_state is not None and self._optimizer_state[0] == version:
            return self._optimizer_state[1]
        if version == 0:
            return self._strategy.optimizer.init(self._layout)
        return self._models.load_optimizer(version, self._strategy.optimizer, self._layout)


def _seed(seed: int, round: int) -> int:
    """Of what a reducer draws by lot in a round: from the job's seed, another one each round."""
    return int.from_bytes(hashlib.sha256(f"reducer {seed} {round}".encode()).digest()[:8], "little")
