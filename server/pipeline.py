"""THE PATH: what becomes of an update, from whole bytes in a staging slot to the next model version on disk.

::

    decode -> validate -> (journal) -> fold -> finish -> server optimizer -> commit

Invariants. An update is checked whole before any of it is folded, so a refused one changes nothing. It is folded only
after the journal says that it was accepted. Sums are exact, so neither order nor a replay changes a byte of the model.
Everything here blocks and runs in threads; torch releases the interpreter lock while it computes.
"""

from __future__ import annotations

from dataclasses import dataclass

from atoll.aggregation.layout import UpdateLayout, update_layout
from atoll.aggregation.next_model import next_model
from atoll.aggregation.optimizer_state import OptimizerState
from atoll.aggregation.reducers import Reduction
from atoll.aggregation.strategy import Strategy
from atoll.server.models import RunModels
from atoll.server.round import Round
from atoll.wire.errors import BadUpdate
from atoll.wire.manifest import Manifest
from atoll.wire.model_file import crc32_of_buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class NewVersion:
    """A model version whose files are durable, not yet committed."""

    version: int
    crc32: int  # of the model's data
    num_bytes: int


@dataclass(slots=True, kw_only=True)
class _Open:
    """What is folded of a round so far."""

    reduction: Reduction
    num_sites: int
    max_weight: int
    folded: set[str]


class Pipeline:
    """Folds the updates of one run's open rounds and makes its model versions."""

    def __init__(self, *, run: str, strategy: Strategy, manifest: Manifest, models: RunModels) -> None:
        self._run = run
        self._strategy = strategy
        self._manifest = manifest
        self._models = models
        self._layout: UpdateLayout = update_layout(manifest, strategy.codec, strategy.buffers)
        self._open: dict[int, _Open] = {}
        self._optimizer_state: tuple[int, OptimizerState] | None = None  # with the version that it belongs to

    @property
    def update_bytes(self) -> int:
        """Length of an encoded update of this run."""
        return self._layout.num_bytes

    def open_round(self, round_: Round) -> None:
        """Get ready to fold updates of `round_`; a cohort that has grown starts the sum anew."""
        known = self._open.get(round_.number)
        num_sites = len(round_.asked)
        if known is not None and (known.num_sites, known.max_weight) == (num_sites, round_.max_weight):
            return
        reduction = self._strategy.reducer.init(
            self._layout, num_sites=num_sites, max_weight=round_.max_weight, bound=self._strategy.bound
        )
        self._open[round_.number] = _Open(
            reduction=reduction, num_sites=num_sites, max_weight=round_.max_weight, folded=set()
        )

    def lacks(self, round_: Round) -> tuple[str, ...]:
        """Sites whose update is accepted but not in the sum, as after a restart: they still keep it."""
        known = self._open.get(round_.number)
        return tuple(sorted(set(round_.updates) - (known.folded if known is not None else set())))

    def check(self, round_: Round, site: str, weight: int, update: memoryview) -> None:
        """Nothing where every byte of `update` can be folded.

        Raises:
            BadUpdate: names site, round, tensor, value and bound.
        """
        try:
            self._open[round_.number].reduction.check(update, weight, site=site, round=round_.number)
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
        """Add a checked and journalled update to its round's sum; once, however often it comes."""
        known = self._open[round_.number]
        if site not in known.folded:
            known.reduction.fold(site, update, weight)
            known.folded.add(site)

    def drop(self, number: int) -> None:
        """Forget the sum of a round that is committed or given up."""
        self._open.pop(number, None)

    def make_version(self, round_: Round, current: int) -> NewVersion:
        """Version `current` + 1 from the sum of a closing round, durable on disk with its optimizer state.

        Raises:
            DiskFull: no room for it; may be tried again.
        """
        state = self._state_of(current)
        version = current + 1
        with (
            self._models.open(current) as base,
            self._models.create(version, {"atoll.round": str(round_.number)}) as out,
        ):
            state = next_model(
                self._open[round_.number].reduction,
                optimizer=self._strategy.optimizer,
                state=state,
                base=base.map,
                out=out,
                manifest=self._manifest,
            )
            crc32 = crc32_of_buffer(out)
        state.save(self._models.optimizer_path(version))
        self._optimizer_state = (version, state)
        return NewVersion(version=version, crc32=crc32, num_bytes=self._manifest.num_bytes)

    def _state_of(self, version: int) -> OptimizerState:
        """The optimizer's state after `version`: the one in memory, the one on disk, or a fresh one at version 0."""
        if self._optimizer_state is not None and self._optimizer_state[0] == version:
            return self._optimizer_state[1]
        if version == 0:
            return self._strategy.optimizer.init(self._manifest)
        return OptimizerState.load(self._models.optimizer_path(version), self._strategy.optimizer, self._manifest)
