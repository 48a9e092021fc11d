"""Rounds of payloads that nobody looks into: each version is the last one with what the sites have sent behind it."""

from __future__ import annotations

import threading
from pathlib import Path

from atoll.aggregation.layout import update_layout
from atoll.aggregation.reducers.append import Append, Appending
from atoll.aggregation.reducers.reduction import NO_METRICS, Metrics, RoundTerms
from atoll.aggregation.strategy import Strategy
from atoll.server.models import RunModels
from atoll.server.round import Round
from atoll.server.round_work import NewVersion
from atoll.wire import runs_pb2
from atoll.wire.checksum import crc32_of
from atoll.wire.errors import BadUpdate, RemoteError
from atoll.wire.manifest import Manifest
from atoll.wire.payload_list import manifest_of


class PayloadRounds:
    """Keeps the payloads of open rounds and makes versions of them. `RoundWork` of a driver."""

    grows = True

    def __init__(self, *, run: str, strategy: Strategy, reducer: Append, manifest: Manifest, models: RunModels) -> None:
        self._run = run
        self._reducer = reducer
        self._models = models
        self._layout = update_layout(manifest, strategy.codec, strategy.buffers)
        self._open: dict[int, tuple[int, Appending, set[str]]] = {}  # with the number of sites, and those that are in
        self._opening = threading.Lock()

    def update_bytes(self, round_: int) -> int:
        return self._reducer.options.max_bytes

    def partial_bytes(self, round_: int) -> int:
        return 0

    def mixed(self, num_updates: int) -> int:
        return self._reducer.mixed(num_updates)

    def open_round(self, round_: Round) -> None:
        with self._opening:
            self._opened(round_)

    def _opened(self, round_: Round) -> tuple[Appending, set[str]]:
        num_sites, kept, folded = self._open.get(round_.number, (0, None, set()))
        if kept is None or num_sites != round_.num_sites or not folded <= set(round_.updates):
            terms = RoundTerms(num_sites=round_.num_sites, max_weight=1, bound=1.0, spool=self._models.spool)
            kept, folded = self._reducer.init(self._layout, terms), set()
            self._open[round_.number] = round_.num_sites, kept, folded
        return kept, folded

    def lacks(self, round_: Round) -> tuple[str, ...]:
        _, _, folded = self._open.get(round_.number, (0, None, set[str]()))
        return tuple(sorted(set(round_.updates) - folded))

    def check(self, round_: Round, site: str, weight: int, update: memoryview, metrics: Metrics = NO_METRICS) -> None:
        with self._opening:
            kept, _ = self._opened(round_)
        try:
            kept.check(update, weight, site=site, round=round_.number)
        except RemoteError as error:
            error.run = self._run
            raise

    def fold(self, round_: Round, site: str, weight: int, update: memoryview) -> None:
        with self._opening:
            kept, folded = self._opened(round_)
            if site not in folded:
                kept.fold(site, update, weight)
                folded.add(site)

    def write_partial(self, round_: Round, path: Path) -> tuple[int, int]:
        raise BadUpdate("payloads cannot be added, so no region takes part", run=self._run, field="strategy.reducer")

    def drop(self, number: int) -> None:
        with self._opening:
            self._open.pop(number, None)

    def make_version(self, round_: Round, current: int) -> NewVersion:
        """Version `current` + 1. Raises BadUpdate where it is over the job's `max_version_bytes`; DiskFull."""
        _, kept, _ = self._open[round_.number]
        version = current + 1
        with self._models.open(current) as base:
            num_bytes = kept.version_bytes(base.num_bytes)
            about = {"atoll.round": str(round_.number)}
            with self._models.create(version, about, manifest_of(num_bytes)) as out:
                kept.write(base.map, out)
                crc32 = crc32_of(out)
        return NewVersion(version=version, crc32=crc32, num_bytes=num_bytes)

    def complete(self, record: runs_pb2.RoundRecord, round_: Round) -> None:
        """Nothing more is known of payloads."""
