"""What people see of a run: its status, who does what, and the record of each round. Never an input to a decision."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from atoll.aggregation.metrics import MetricRules, combine_metrics
from atoll.server.events import EvaluationEnded, RunEvent, ServerEvaluated, SiteEvaluated
from atoll.server.records import RoundRow, RunRow
from atoll.server.round import Metrics, Round
from atoll.server.run_state import RunState
from atoll.transport.news import (
    RunNews,
    news_of_commit,
    news_of_evaluation,
    news_of_round,
    news_of_status,
)
from atoll.wire import control_pb2, errors_pb2, gossip_pb2, runs_pb2
from atoll.wire.errors import Unavailable, Unknown, to_detail


@dataclass(slots=True)
class _Opened:
    at_s: float  # monotonic
    transferred: tuple[int, int]  # bytes up and down so far


class RunSummary:
    """The view of one run. `changed` wakes those who watch."""

    def __init__(self, row: RunRow, num_rounds: int, done_rounds: int = 0, first_version: int = 0) -> None:
        """`done_rounds` and `first_version`: of a run that goes on from another one."""
        self._row = row
        self._num_rounds = num_rounds
        self._first = (done_rounds, first_version)
        self._best = 0  # version
        self._reason = errors_pb2.ErrorDetail.FromString(row.reason) if row.reason else None
        self._trouble = ""
        self._records: dict[int, runs_pb2.RoundRecord] = {}
        self._opened: dict[int, _Opened] = {}
        self._sites: dict[str, runs_pb2.SiteProgress] = {}
        self._reasons: dict[str, str] = {}  # why a site has no update in the present round
        self._exchange: gossip_pb2.ExchangeRecord | None = None
        self._changes = 0
        self._waiters: set[asyncio.Future[None]] = set()
        self.status: str = row.status
        self.show()

    def show(
        self,
        *,
        continues: str = "",
        rules: MetricRules | None = None,
        tell: Callable[[RunNews], None] = lambda news: None,
        complete: Callable[[runs_pb2.RoundRecord, Round], None] = lambda record, round_: None,
    ) -> None:
        """Say which run this one goes on from, what its metrics are made by, and who hears of it by program.

        `complete` adds to a record what only the run's own kind of work knows.
        """
        self._continues, self._rules, self._tell, self._complete = continues, rules, tell, complete

    # --- changes ----------------------------------------------------------------------------------------------------

    def restore(self, rows: Iterable[RoundRow]) -> None:
        """Take over the records of rounds that are committed."""
        for row in rows:
            record = self._records[row.round] = runs_pb2.RoundRecord.FromString(row.record)
            self._exchange = record.exchange if record.HasField("exchange") else self._exchange

    def set_status(self, status: str, reason: errors_pb2.ErrorDetail | None = None) -> None:
        self.status, self._reason = status, reason
        if (news := news_of_status(self._row, status, reason)) is not None:
            self._tell(news)
        self.wake()

    def set_trouble(self, text: str) -> None:
        """Say why a run does not go on for now; "" when it does again."""
        if text != self._trouble:
            self._trouble = text
            self.wake()

    def site_is(self, site: str, state: str, *, done: int = 0, total: int = 0, detail: str = "") -> None:
        self._sites[site] = runs_pb2.SiteProgress(site=site, state=state, done=done, total=total, detail=detail)
        if state in ("failed", "gone"):
            self._reasons[site] = detail
        self.wake()

    def exchange_is(self, exchange: gossip_pb2.ExchangeRecord) -> None:
        """How neighbours have exchanged their models so far; a round that has no pairs yet leaves the last one's."""
        if exchange.num_pairs:
            self._exchange = exchange
            self.wake()

    def round_opened(self, number: int, at_s: float, transferred: tuple[int, int]) -> None:
        self._opened.setdefault(number, _Opened(at_s=at_s, transferred=transferred))
        self.wake()

    def record_of(self, round_: Round, version: int, at_s: float, transferred: tuple[int, int]) -> runs_pb2.RoundRecord:
        """The record of a round that is about to be committed; nobody sees it before `round_committed`."""
        opened = self._opened.get(round_.number, _Opened(at_s=at_s, transferred=transferred))
        sums = combine_metrics({site: round_.updates[site].metrics for site in round_.closing})
        record = runs_pb2.RoundRecord(
            round=round_.number,
            version=version,
            num_sites=len(round_.closing),
            weight=round_.sum_weights,
            seconds=at_s - opened.at_s,
            train_metrics=_metric_sums(sums),
            missing=round_.missing,
            bytes_up=transferred[0] - opened.transferred[0],
            bytes_down=transferred[1] - opened.transferred[1],
            reasons={site: self._reasons[site] for site in round_.missing if site in self._reasons},
            exchange=self._exchange,
        )
        self._complete(record, round_)
        self._tell(news_of_round(self._row, record))
        return record

    def round_committed(self, record: runs_pb2.RoundRecord) -> None:
        """A round is durable: from now on people see it."""
        self._tell(news_of_commit(self._row, record))
        self._opened.pop(record.round, None)
        self._reasons.clear()
        self._records[record.round] = record
        self.wake()

    def observe(self, event: RunEvent | None, state: RunState) -> int | None:
        """Take in an event that was applied; the round whose evaluation it changed, if any."""
        self.wake()
        # Judged by its successor; -1: none, since a run that trains nothing judges version 0.
        version = state.judgement.version if state.judgement.version != self._best else -1
        self._best = state.judgement.version
        if isinstance(event, SiteEvaluated):
            version = int(event.task.split(".", 1)[0].removeprefix("e"))
        elif isinstance(event, ServerEvaluated | EvaluationEnded):
            version = event.version
        evaluation = state.evaluations.get(version)
        if evaluation is None or evaluation.round not in self._records:
            return None
        record = self._records[evaluation.round]
        if evaluation.by_site:
            record.evaluate_metrics.clear()
        for name, metric in _metric_sums(self._combined(evaluation.by_site)).items():
            record.evaluate_metrics[name].CopyFrom(metric)
        for name, metric in _metric_sums(evaluation.at_server).items():
            record.server_metrics[name].CopyFrom(metric)
        record.best = record.best or 0 < version == self._best
        if self.evaluation_settled(evaluation.round, state):
            self._tell(news_of_evaluation(self._row, record))
        return evaluation.round

    def _combined(self, by_site: Mapping[str, Metrics]) -> Metrics:
        return combine_metrics(by_site) if self._rules is None else self._rules.combine(by_site)

    def evaluation_settled(self, number: int, state: RunState) -> bool:
        """Whether no more metrics are awaited for round `number`."""
        evaluation = next((e for e in state.evaluations.values() if e.round == number), None)
        waiting = any(task.kind == "evaluate" and task.round == number for task in state.tasks.values())
        return not waiting and not (evaluation is not None and evaluation.server_pending)

    # --- views ------------------------------------------------------------------------------------------------------

    @property
    def open_rounds(self) -> Sequence[int]:
        return list(self._opened)

    @property
    def best_version(self) -> int:
        """The best one by the metric that the job names; 0 where there is none."""
        # Versions are judged in their order, so the last that was the best when it was judged is the best.
        return max((record.version for record in self._records.values() if record.best), default=0)

    def require_best(self) -> int:
        """The best version. Raises Unknown where there is none."""
        if not self.best_version:
            run = self._row.run
            raise Unknown(
                f"run {run} has no best version: its job names no [control.best], or nothing was evaluated yet", run=run
            )
        return self.best_version

    @property
    def version(self) -> int:
        """The newest one."""
        return self._records[max(self._records)].version if self._records else self._first[1]

    def record(self, number: int) -> runs_pb2.RoundRecord:
        return self._records[number]

    def snapshot(self, *, with_rounds: bool = True) -> runs_pb2.RunSnapshot:
        """The run as it stands."""
        newest = max(self._records, default=self._first[0])
        snapshot = runs_pb2.RunSnapshot(
            run=self._row.run,
            name=self._row.name,
            status=self.status,
            round=max([newest, *self._opened]),
            num_rounds=self._num_rounds,
            version=self.version,
            sites=[self._sites[site] for site in sorted(self._sites)],
            submitted_by=self._row.submitted_by,
            submitted_at_unix_s=self._row.submitted_at.timestamp(),
            best_version=self.best_version,
            continues=self._continues,
            exchange=self._exchange,
        )
        if self._trouble:
            snapshot.reason.CopyFrom(to_detail(Unavailable(self._trouble, run=self._row.run)))
        elif self._reason is not None:
            snapshot.reason.CopyFrom(self._reason)
        if with_rounds:
            snapshot.rounds.extend(self._records[number] for number in sorted(self._records))
        return snapshot

    @property
    def changes(self) -> int:
        """Rises with every change."""
        return self._changes

    async def changed(self, since: int) -> int:
        """Returns when there was a change after `since`."""
        while self._changes == since:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.add(waiter)
            try:
                await waiter
            finally:
                self._waiters.discard(waiter)
        return self._changes

    def wake(self) -> None:
        """Count a change, and wake those who wait for one."""
        self._changes += 1
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)


def _metric_sums(metrics: Metrics) -> Mapping[str, control_pb2.MetricSum]:
    return {name: control_pb2.MetricSum(sum=pair[0], count=pair[1]) for name, pair in metrics.items()}
