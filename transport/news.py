"""What happens to a run, as typed values for callbacks: the same at the server and on a researcher's machine.

A few kinds, for programs that watch; nothing here decides anything. A server that is killed may tell the last ones again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from atoll.wire import control_pb2, errors_pb2, runs_pb2

ENDED = frozenset({"finished", "failed", "stopped"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted:
    """The first tasks are given out."""

    run: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundClosed:
    """A round has its updates. `metrics` are those of the local training."""

    run: str
    round: int
    sites: int
    missing: tuple[str, ...]
    weight: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionCommitted:
    """The round's version is durable."""

    run: str
    round: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """No more evaluations of a version are awaited. `best`: it is the best so far, where the job says by what."""

    run: str
    round: int
    version: int
    sites: Mapping[str, float]
    server: Mapping[str, float]
    best: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnded:
    """`status` is "finished", "failed" or "stopped"."""

    run: str
    status: str
    reason: str


RunNews = RunStarted | RoundClosed | VersionCommitted | Evaluated | RunEnded


class Run(Protocol):
    """A row of the server's table of runs, or a snapshot of one."""

    @property
    def run(self) -> str: ...
    @property
    def name(self) -> str: ...


def news_of_status(run: Run, status: str, reason: errors_pb2.ErrorDetail | None) -> RunNews | None:
    """What a new status of a run says; None of one that a person need not hear of."""
    if status == "running":
        return RunStarted(run=run.run, name=run.name)
    if status in ENDED:
        return RunEnded(run=run.run, status=status, reason=reason.message if reason is not None else "")
    return None


def news_of_round(run: Run, record: runs_pb2.RoundRecord) -> RoundClosed:
    return RoundClosed(
        run=run.run,
        round=record.round,
        sites=record.num_sites,
        missing=tuple(record.missing),
        weight=record.weight,
        metrics=means(record.train_metrics),
    )


def news_of_commit(run: Run, record: runs_pb2.RoundRecord) -> VersionCommitted:
    return VersionCommitted(run=run.run, round=record.round, version=record.version)


def news_of_evaluation(run: Run, record: runs_pb2.RoundRecord) -> Evaluated:
    return Evaluated(
        run=run.run,
        round=record.round,
        version=record.version,
        sites=means(record.evaluate_metrics),
        server=means(record.server_metrics),
        best=record.best,
    )


def means(sums: Mapping[str, control_pb2.MetricSum]) -> dict[str, float]:
    """The metrics that have a finite value, by name."""
    values = {name: sums[name].sum / sums[name].count for name in sorted(sums) if sums[name].count > 0}
    return {name: value for name, value in values.items() if math.isfinite(value)}


@dataclass(slots=True)
class SnapshotReader:
    """Finds what is new in each snapshot of one run that is watched."""

    _started: bool = False
    _closed: set[int] = field(default_factory=set)
    _evaluated: set[int] = field(default_factory=set)

    def read(self, snapshot: runs_pb2.RunSnapshot) -> Iterator[RunNews]:
        """The news since the last snapshot, oldest first."""
        ended = snapshot.status in ENDED
        if not self._started and (snapshot.status == "running" or snapshot.rounds):
            self._started = True
            yield RunStarted(run=snapshot.run, name=snapshot.name)
        last = max((record.round for record in snapshot.rounds), default=0)
        for record in snapshot.rounds:
            if record.round not in self._closed:
                self._closed.add(record.round)
                yield news_of_round(snapshot, record)
                yield news_of_commit(snapshot, record)
            judged = record.evaluate_metrics or record.server_metrics
            if judged and record.round not in self._evaluated and (ended or record.round < last):
                self._evaluated.add(record.round)
                yield news_of_evaluation(snapshot, record)
        if ended:
            yield RunEnded(run=snapshot.run, status=snapshot.status, reason=snapshot.reason.message)
