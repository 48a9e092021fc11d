"""A run without a network: the server's state table and pipeline, sites that an engine simulates, a virtual clock.

::

    state table --SendTask--> clock: when the site is done --> engine trains --> check, UpdateAccepted, fold
         ^                                                                                |
         `------- Committed <-- pipeline makes the version <-- CommitRound <--------------'

A task is trained when its update would arrive, so one that is taken back before costs nothing. Updates that arrive at
one time come in the order in which their tasks were given.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import assert_never

from atoll.aggregation.schedule import Committed, Joined, Ready, Selective, TimerFired
from atoll.client.version_parts import part_of_version
from atoll.cluster.messages import Evaluate, Train
from atoll.server.events import Broken, RunEvent, ServerEvaluated, SiteEvaluated, TaskLost, UpdateAccepted
from atoll.server.gathering import gathered
from atoll.server.pipeline import Pipeline
from atoll.server.records import RunRow
from atoll.server.round import Round
from atoll.server.run import advance, begin
from atoll.server.run_state import (
    AnnounceCommit,
    ArmTimer,
    CommitRound,
    EndRun,
    EvaluateHere,
    Exchanging,
    OpenRound,
    Phase,
    Plan,
    RunAction,
    RunState,
    SendTask,
    Task,
    WithdrawTask,
)
from atoll.server.secure_events import SecureEvent
from atoll.server.summary import RunSummary
from atoll.simulations.conditions import Conditions
from atoll.simulations.engine import Engine
from atoll.simulations.keeping import Keeper, Kept
from atoll.simulations.masked import MaskedWork
from atoll.simulations.standing import Standing
from atoll.simulations.versions import Versions, server_path, site_path
from atoll.simulations.waits import Waited
from atoll.wire.errors import BadUpdate, RemoteError, TooFewSites, to_detail
from atoll.wire.runs_pb2 import RoundRecord, RunSnapshot

Labels = Mapping[str, Mapping[str, str]]  # by site
Spread = Mapping[str, tuple[float, ...]]  # over sites, by metric
OnRound = Callable[
    [RoundRecord, float, Waited, Spread], None
]  # a round whose metrics are all there, when it was committed
SHOW_EVERY_S = 0.1


class SimulatedRun:
    """One run from its first event to its last."""

    def __init__(
        self,
        *,
        row: RunRow,
        plan: Plan,
        pipeline: Pipeline,
        versions: Versions,
        engine: Engine,
        conditions: Conditions,
        labels: Labels,
        on_round: OnRound,
        show: Callable[[RunSnapshot], None] | None,
        keeper: Keeper | None = None,
        kept: Kept | None = None,
    ) -> None:
        """
        Args:
            conditions: of the sites that take part, in the order of their joining.
            on_round: called once for each committed round, when its evaluations are in.
            show: called with the run as it stands, a few times a second.
            keeper: keeps each committed round, for a later process to go on from.
            kept: what an earlier one has kept of this run, which goes on from there.
        """
        self.state: RunState = begin(plan)
        self._now = Standing()
        self.summary = RunSummary(row, plan.num_rounds)
        self.summary.show(complete=pipeline.complete)
        self._plan, self._pipeline, self._versions, self._engine = plan, pipeline, versions, engine
        self._conditions, self._labels = conditions, labels
        self._on_round, self._show = on_round, show
        self._keeper, self._kept = keeper, kept
        self._fragments = engine.fragments
        self._update = memoryview(b"")  # the one that came last
        self._pending: deque[Callable[[], RunEvent | None]] = deque()  # what is done before time passes
        self._committed_s: dict[int, float] = {}  # simulated time of rounds that are not told of yet
        self._shown_s = 0.0
        # What people see beside a round is simulated time where there is any, else that of this machine.
        self._timed = conditions.timed

    def run(self) -> RunState:
        """The state that the run ends with.

        Raises:
            AppFailed: a site has no examples; names it.
            LocalError: this machine cannot go on.
        """
        schedule, sites = self._plan.schedule, self._conditions.sites
        selective = schedule if isinstance(schedule, Selective) else None
        joined = [*filter(None, (self._join(s, selective) for s in sites))]
        self.state = gathered(self._plan, self.state, joined)
        if self._kept is None:
            self._tell(Ready())
        else:
            self._go_on(self._kept)
        while self.state.phase is not Phase.ENDED:
            event = self._pending.popleft()() if self._pending else self._next()
            if event is not None:
                self._tell(event)
        for number in list(self._committed_s):
            self._hand_on(number)
        self._look(at_once=True)
        return self.state

    @property
    def simulated_s(self) -> float:
        """Simulated seconds since the run began."""
        return self._now.clock.now_s

    def _go_on(self, kept: Kept) -> None:
        """Stand where the last committed round was made durable, and do what followed from its commit."""
        *before, committed = kept.events
        assert isinstance(committed, Committed)  # with it the run was kept
        for event in before:
            self.state, _ = advance(self._plan, self.state, event)
        self._now = kept.standing
        self.summary.restore(kept.rows)
        self._committed_s[committed.round] = self._now.clock.now_s
        _, actions = advance(self._plan, self.state, committed)
        for action in actions:
            if isinstance(action, WithdrawTask) and self._keeper is not None:  # it may have been begun, by a process
                self._keeper.forget(action.task.site, action.task.given_in)
        self._after(committed)

    def _join(self, site: str, schedule: Selective | None) -> Joined | None:
        """A site that the schedule cannot ask is not offered the run, as in a deployment."""
        labels = dict(self._labels.get(site, {}))
        if schedule is not None and not schedule.takes(site, labels):
            self.summary.site_is(site, "declined", detail="the job's schedule asks for other sites or labels")
            return None
        return Joined(site=site, max_weight=self._engine.max_weight(site), labels=labels)

    # --- events -----------------------------------------------------------------------------------------------------

    def _tell(self, event: RunEvent) -> None:
        state, actions = advance(self._plan, self.state, event)
        if state is self.state:
            return
        self.state = state
        if self._keeper is not None:
            self._keeper.note(event)
        if isinstance(event, UpdateAccepted) and (round_ := state.rounds.get(event.round)) is not None:
            self._pipeline.fold(round_, event.site, event.weight, self._update)
        self._observe(event)
        for action in actions:
            self._act(action)
        if not isinstance(event, SecureEvent):
            self._commit_if_whole()

    def _next(self) -> RunEvent | None:
        """What happens next in simulated time; None where it concerns nobody any more."""
        due = self._now.clock.next()
        if isinstance(due, Task):
            return self._arrive(due)
        if due is None:
            open_ = ", ".join(sorted(self.state.tasks)) or "none"
            raise TooFewSites(f"the run waits, and nothing is under way that could end the wait (open tasks: {open_})")
        name, setting = due
        return TimerFired(name=name) if self._now.timers.get(name) == setting else None

    def _arrive(self, sent: Task) -> RunEvent | None:
        """Train, and hand in the update; nothing where the task was taken back, or given again."""
        task = self._still_asked(sent)
        if task is None:
            return None
        if (reason := self._conditions.failure(task)) is not None:
            self.summary.site_is(task.site, "failed", detail=reason)
            return TaskLost(task=task.task, attempt=task.attempt, site=task.site, reason=reason)
        try:
            outcome, honest = self._engine.train(task.site, self._training(task))
            update = self._conditions.sent(task, honest)
            self._pipeline.check(self.state.rounds[task.round], task.site, outcome.weight, update, outcome.metrics)
        except RemoteError as error:
            self.summary.site_is(task.site, "failed", detail=error.message)
            return TaskLost(task=task.task, attempt=task.attempt, site=task.site, reason=error.message)
        self._update = update
        staleness = self.state.version - task.base_version
        self._now.waits.came(task.task, task.site, task.round, self._now.clock.now_s, staleness)
        masked = self._plan.masked  # then all that is known of it stays with its site until the round's sessions
        self._now.num_bytes = (self._now.num_bytes[0] + (0 if masked else len(update)), self._now.num_bytes[1])
        self.summary.site_is(task.site, "accepted")
        return UpdateAccepted(
            task=task.task,
            attempt=task.attempt,
            site=task.site,
            round=task.round,
            weight=0 if masked else outcome.weight,
            metrics={} if masked else dict(outcome.metrics),
        )

    def _evaluate(self, sent: Task) -> RunEvent | None:
        task = self._still_asked(sent)
        if task is None:
            return None
        self._fetch(task)
        try:
            metrics = self._engine.evaluate(task.site, self._judging(task))
        except RemoteError as error:
            return TaskLost(task=task.task, attempt=task.attempt, site=task.site, reason=error.message)
        self._now.waits.judged(task.round, metrics)
        return SiteEvaluated(task=task.task, attempt=task.attempt, site=task.site, metrics=metrics)

    def _still_asked(self, sent: Task) -> Task | None:
        """The task as it stands now; None where it was taken back, or given again."""
        task = self.state.tasks.get(sent.task)
        if task is not None and task.attempt == sent.attempt:
            return task
        self._engine.withdraw(_key(sent))
        return None

    def _training(self, task: Task) -> Train:
        return Train(
            key=_key(task),
            round=task.given_in,
            base_version=task.base_version,
            base_path=self._base_path(task),
            out_path="",  # the engine knows
            counted_round=self.state.counted.get(task.site, 0),
        )

    def _judging(self, task: Task) -> Evaluate:
        return Evaluate(
            key=_key(task),
            round=task.round,
            base_version=task.base_version,
            base_path=self._base_path(task),
        )

    def _base_path(self, task: Task) -> str:
        """The version that a task begins with or judges, in the form of its site's group."""
        branch = self.state.branch_of(self._plan, task.site, task.base_version)
        return site_path(task.base_version, branch)

    def _evaluate_here(self, version: int) -> RunEvent | None:
        evaluation = self.state.evaluations.get(version)
        if evaluation is None or not evaluation.server_pending:
            return None
        try:
            metrics = self._engine.evaluate(None, _judging_here(version, evaluation.round))
        except RemoteError as error:
            return ServerEvaluated(version=version, metrics={}, error=error.message)
        return ServerEvaluated(version=version, metrics=metrics)

    # --- actions ----------------------------------------------------------------------------------------------------

    def _act(self, action: RunAction) -> None:
        match action:
            case OpenRound(round=round_):
                self._pipeline.open_round(round_)
                self.summary.round_opened(round_.number, self._now_s, self._now.num_bytes)
                self.summary.set_status("running")
            case SendTask(task=task):
                self._send(task)
            case Exchanging():
                raise ValueError("sites of a simulation meet nobody: `simulate` refuses gossip")
            case WithdrawTask(task=task):
                self._engine.withdraw(_key(task))
            case CommitRound():
                pass  # what is open is in the state; `_commit_if_whole` follows
            case ArmTimer(name=name, after_s=after_s):
                self._arm(name, after_s)
            case EvaluateHere(version=version):
                self._engine.expect(None, _judging_here(version, self.state.evaluations[version].round), -math.inf)
                self._pending.append(lambda: self._evaluate_here(version))
            case AnnounceCommit():
                self._prune()
            case EndRun(outcome=outcome, reason=reason):
                self.summary.set_status(outcome.value, to_detail(action.error("")) if reason else None)
            case _:
                assert_never(action)

    def _send(self, task: Task) -> None:
        if task.kind == "evaluate":
            self._engine.expect(task.site, self._judging(task), -math.inf)  # before any time passes
            self._pending.append(lambda: self._evaluate(task))
            return
        self._fetch(task)
        self.summary.site_is(task.site, "training")
        # A version that was fetched to be judged has taken no time yet.
        now_s, down_bytes = self._now.clock.now_s, self._now.fetched.pop(task.site, 0)
        after_s = self._conditions.task_s(task, self._engine.num_steps, now_s=now_s, down_bytes=down_bytes)
        self._now.waits.given(task.task, now_s)
        self._now.clock.set(after_s, task)
        if self._conditions.failure(task) is None:
            self._engine.expect(task.site, self._training(task), self._now.clock.now_s + after_s)

    def _fetch(self, task: Task) -> None:
        """A site fetches each version once; of one that follows the one that it has, what differs."""
        version, had = task.base_version, self._now.has.get(task.site)
        if had == version:
            return
        self._now.has[task.site] = version
        part = part_of_version(self._fragments, version) if had == version - 1 else None
        num_bytes = part.num_bytes if part else self._versions.bytes_of(version)
        self._now.num_bytes = (self._now.num_bytes[0], self._now.num_bytes[1] + num_bytes)
        self._now.fetched[task.site] = self._now.fetched.get(task.site, 0) + num_bytes

    def _arm(self, name: str, after_s: float) -> None:
        self._now.timers.pop(name, None)
        if after_s > 0:
            self._now.settings += 1
            self._now.timers[name] = self._now.settings
            self._now.clock.set(after_s, (name, self._now.settings))

    def _commit_if_whole(self) -> None:
        while (round_ := self.state.first_closing()) and not set(round_.closing) & set(self._pipeline.lacks(round_)):
            event = self._pipeline.next_event(self.state, round_) if isinstance(self._pipeline, MaskedWork) else None
            if event is None:
                self._commit(round_)
            else:
                self._tell(event)

    def _commit(self, round_: Round) -> None:
        try:
            new = self._pipeline.make_version(round_, self.state.version)
        except BadUpdate as error:
            self._tell(Broken(reason=error.message, ours=False))
            return
        if isinstance(self._pipeline, MaskedWork):
            self._now.num_bytes = (self._now.num_bytes[0] + self._pipeline.take_bytes(), self._now.num_bytes[1])
        record = self.summary.record_of(round_, new.version, self._now_s, self._now.num_bytes)
        self.summary.round_committed(record)
        self._committed_s[round_.number] = self._now.clock.now_s
        committed = Committed(round=round_.number, version=new.version)
        if self._keeper is not None:  # before anybody is asked for more
            self._keeper.keep(committed, record, self._now, self._versions)
        self._after(committed)

    def _after(self, committed: Committed) -> None:
        self.state, actions = advance(self._plan, self.state, committed)
        self._pipeline.drop(committed.round)
        for action in actions:
            self._act(action)
        self._observe(None)
        self._look()

    def _prune(self) -> None:
        begun = {task.base_version for task in self.state.tasks.values()}
        in_use = begun | {round_.base_version for round_ in self.state.rounds.values()} | set(self.state.evaluations)
        self._versions.prune(in_use | {self.state.version})

    # --- what people see --------------------------------------------------------------------------------------------

    def _observe(self, event: RunEvent | None) -> None:
        self.summary.observe(event, self.state)
        for number in [number for number in self._committed_s if self.summary.evaluation_settled(number, self.state)]:
            self._hand_on(number)

    def _hand_on(self, number: int) -> None:
        waited, spread = self._now.waits.take(number), self._now.waits.take_spread(number)
        if self._keeper is not None:
            self._keeper.note_record(self.summary.record(number))
        self._on_round(self.summary.record(number), self._committed_s.pop(number), waited, spread)

    @property
    def _now_s(self) -> float:
        return self._now.clock.now_s if self._timed else time.monotonic()

    def _look(self, *, at_once: bool = False) -> None:
        now_s = time.monotonic()
        if self._show is not None and (at_once or now_s - self._shown_s >= SHOW_EVERY_S):
            self._shown_s = now_s
            self._show(self.summary.snapshot())


def _key(task: Task) -> str:
    return f"{task.task}#{task.attempt}"


def _judging_here(version: int, round_: int) -> Evaluate:
    return Evaluate(key=f"e{version}", round=round_, base_version=version, base_path=server_path(version))
