"""One run being done: takes events one after the other, writes each down, then does what the state table says.

Invariant: nothing is sent, folded or committed before the event that causes it is in the journal. A driver that starts
over a journal goes on where the last one stopped; every action may happen twice without harm.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from atoll.aggregation.schedule import Committed, Left, Ready, TimerFired
from atoll.server.events import (
    Broken,
    EvaluationEnded,
    RunEvent,
    ServerEvaluated,
    TaskLost,
    decode_event,
    encode_event,
)
from atoll.server.messages import cancel_message, committed_message, offer_message, task_message
from atoll.server.models import RunModels
from atoll.server.records import RoundRow, RunRow
from atoll.server.round import Round
from atoll.server.round_work import RoundWork
from atoll.server.run import advance, begin, end_of, kept_for_good, outstanding, replay
from atoll.server.run_state import (
    AnnounceCommit,
    ArmTimer,
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
from atoll.server.steps import Observer, Step
from atoll.server.store import Store
from atoll.server.summary import RunSummary
from atoll.server.surroundings import Surroundings
from atoll.wire import control_pb2 as pb
from atoll.wire.errors import BadUpdate, DiskFull, RemoteError, Stale
from atoll.wire.job import Job
from atoll.wire.manifest import Manifest

log = logging.getLogger(__name__)

DISK_PATIENCE_S = 5.0  # between tries while the disk is full; a person frees space within minutes
EVALUATION_PATIENCE_S = 300.0  # how long a run that has its last version waits for evaluations

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Item:
    event: RunEvent | None
    then: Callable[[], Awaitable[None]] | None  # after the journal, before the actions; also where nothing changed


class RunDriver:
    """The one task that changes the state of a run."""

    def __init__(
        self,
        *,
        row: RunRow,
        job: Job,
        plan: Plan,
        pipeline: RoundWork,
        models: RunModels,
        manifest: Manifest,
        store: Store,
        around: Surroundings,
        keep_versions: int,
        on_step: Observer,
    ) -> None:
        self.run = row.run
        self.job = job
        self.plan = plan
        self.pipeline = pipeline
        self.models = models
        self.manifest = manifest
        self.state: RunState = begin(plan)
        self.summary = RunSummary(row, plan.num_rounds, plan.done_rounds, plan.first_version)
        self._row = row
        self._keep_versions = keep_versions
        self._on_step = on_step
        self._store = store
        self._around = around
        self._inbox: asyncio.Queue[_Item] = asyncio.Queue()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._started = asyncio.Event()
        self._evaluating = asyncio.Lock()
        self._waits = True  # for sites, as long as the job says
        self._over = False  # nobody reads the inbox any more

    # --- from outside -----------------------------------------------------------------------------------------------

    def tell(self, event: RunEvent | None, then: Callable[[], Awaitable[None]] | None = None) -> None:
        """Put an event in the run's queue; `then` runs once the event is durable and before its consequences.

        Of a run that is over events change nothing; `then` still runs, and finds the state that the run ended with.
        """
        if not self._over:
            self._inbox.put_nowait(_Item(event=event, then=then))
        elif then is not None:
            self._spawn(then())

    @property
    def takes_sites(self) -> bool:
        """Whether a site that joins now can still be of use."""
        return self._started.is_set() and self.state.phase in (Phase.WAITING, Phase.RUNNING)

    def offer(self) -> pb.RunOffer:
        """What a site is asked."""
        return offer_message(self._row, self.manifest, self.pipeline.mixed(self.plan.fewest_updates))

    @property
    def only(self) -> frozenset[str]:
        """The sites that may be asked to join; empty means any. In a region, those that it has declared."""
        if self.plan.delegated:
            return frozenset(member.site for member in self.state.schedule.declared)
        return frozenset(self.job.job.sites)

    def wait_no_more(self) -> None:
        """An upper server counts on this run: it is not given up as long as no round is asked for."""
        self._waits = False

    def site_gone(self, site: str, reason: str) -> None:
        """A member's lease ran out, or it left: nobody waits for it, and what only it still held is lost."""
        self.tell(Left(site=site, reason=reason))
        for round_ in self.state.rounds.values():
            update = round_.updates.get(site)
            if update is not None and site in self.pipeline.lacks(round_):
                self.tell(TaskLost(task=update.task, attempt=update.attempt, site=site, reason=reason))

    def resend_tasks(self, site: str) -> None:
        """Tell a site that is back again what is open for it, and how far the run is."""
        if self.state.committed is not None:
            self._around.send(site, committed=committed_message(self.run, self.state, site))
        for task in self.state.tasks.values():
            if task.site == site:
                self._send_task(task)

    async def started(self) -> None:
        """Returns when the journal is replayed and `state` can be read."""
        await self._started.wait()

    # --- the loop ---------------------------------------------------------------------------------------------------

    async def drive(self) -> None:
        """Do the run to its end. A fault of the server's own ends it as failed and says why."""
        try:
            await self._go_on()
            while self.state.phase is not Phase.ENDED:
                item = await self._inbox.get()
                await self._take(item)
        except asyncio.CancelledError:
            raise
        except BadUpdate as error:
            await self._break(Broken(reason=error.message, ours=False))
        except Exception as error:
            log.exception("run %s: the server cannot go on with it", self.run)
            await self._break(Broken(reason=f"{type(error).__name__}: {error}"))
        finally:
            self._quiet()
        await self._answer_the_rest()

    async def _answer_the_rest(self) -> None:
        """Whoever waits for an event that came too late is told so by the state of the run."""
        self._over = True
        while not self._inbox.empty():
            if (then := self._inbox.get_nowait().then) is not None:
                await then()

    async def _go_on(self) -> None:
        entries = await asyncio.to_thread(self._store.events, self.run)
        self.state = replay(self.plan, [decode_event(entry) for entry in entries])
        self.summary.restore(await asyncio.to_thread(self._store.rounds, self.run))
        self.models.prepare()
        self._started.set()
        for version in self.state.evaluations:  # killed between an evaluation and the record of its round
            await self._after(EvaluationEnded(version=version))
        if self.state.phase is Phase.ENDED:  # killed between the last event and the status that people see
            await self._act(end_of(self.state))
        for action in outstanding(self.plan, self.state):
            await self._act(action)
        if self.state.phase is Phase.WAITING:
            self._later("wait for sites", self.plan.wait_share * self.job.job.wait_for_sites, self._end_wait)

    async def _take(self, item: _Item) -> None:
        actions: tuple[RunAction, ...] = ()
        if item.event is not None:
            state, actions = advance(self.plan, self.state, item.event)
            if state is not self.state:
                await self.durably(self._store.append, self.run, [encode_event(item.event)])
                self._on_step(Step.JOURNALLED, self.run)
                self.state = state
        if item.then is not None:
            await item.then()
        await self._after(item.event)  # first: the record of a run that ends with this is then whole
        for action in actions:
            await self._act(action)
        await self._commit_if_whole()

    async def _after(self, event: RunEvent | None) -> None:
        """Keep what people see in step with the state."""
        number = self.summary.observe(event, self.state)
        if number is not None:
            self._on_step(Step.EVALUATED, self.run)
        if number is not None and self.summary.evaluation_settled(number, self.state):
            record = self.summary.record(number).SerializeToString()
            await self.durably(self._store.update_round_record, self.run, number, record)

    async def _act(self, action: RunAction) -> None:
        match action:
            case OpenRound(round=round_):
                await asyncio.to_thread(self.pipeline.open_round, round_)
                await self._opened(round_.number)
            case Exchanging(round=number):
                await self._opened(number)
                self._around.introduce(self.run)
            case SendTask(task=task):
                self._send_task(task)
            case WithdrawTask(task=task, reason=reason):
                self._withdraw(task, reason)
            case ArmTimer(name=name, after_s=after_s):
                self._arm(name, after_s)
            case EvaluateHere(version=version):
                self._spawn(self._evaluate(version))
            case AnnounceCommit():
                self._announce()
            case EndRun():
                await self._end(action)
        # Of CommitRound: `_commit_if_whole` follows, here and whenever bytes that were lacking arrive.

    # --- committing -------------------------------------------------------------------------------------------------

    async def _commit_if_whole(self) -> None:
        if self.plan.delegated:
            return  # the upper server commits (upstream.py)
        while (round_ := self.state.first_closing()) and not set(round_.closing) & set(self.pipeline.lacks(round_)):
            await self._commit(round_)  # which may close the next one

    async def _commit(self, round_: Round) -> None:
        """The one durable point of a round: journal entry, record and model version in one transaction."""
        self._on_step(Step.CLOSING, self.run)
        new = await self.durably(self.pipeline.make_version, round_, self.state.version)
        self._on_step(Step.MADE, self.run)
        event = Committed(round=round_.number, version=new.version)
        record = self.summary.record_of(round_, new.version, time.monotonic(), self._around.transferred(self.run))
        row = RoundRow(
            round=round_.number,
            version=new.version,
            record=record.SerializeToString(),
            model_crc32=new.crc32,
            num_bytes=new.num_bytes,
        )
        await self.durably(self._store.commit_round, self.run, [encode_event(event)], row)
        self.summary.round_committed(record)
        self._on_step(Step.COMMITTED, self.run)
        self.state, actions = advance(self.plan, self.state, event)
        self.pipeline.drop(round_.number)
        log.info("run %s: round %d committed as version %d", self.run, round_.number, new.version)
        await self._after(event)  # first, as in `_take`
        for action in actions:
            await self._act(action)
        if self.state.phase is Phase.FINISHING:
            version = self.state.version
            self._later("evaluation", EVALUATION_PATIENCE_S, lambda: self.tell(EvaluationEnded(version=version)))

    def _announce(self) -> None:
        for site in {**self.state.members, **self.state.former}:
            self._around.send(site, committed=committed_message(self.run, self.state, site))
        self._on_step(Step.ANNOUNCED, self.run)
        self._spawn(self._prune())

    async def _prune(self) -> None:
        begun = {task.base_version for task in self.state.tasks.values()}
        bases = {base for r in self.state.rounds.values() for base in (r.base_version, *r.bases.values())}
        in_use = begun | bases | set(self.state.evaluations)
        newest = set(range(max(0, self.state.version - self._keep_versions + 1), self.state.version + 1))
        await asyncio.to_thread(self.models.prune, in_use | newest | kept_for_good(self.plan, self.state))

    # --- tasks and timers -------------------------------------------------------------------------------------------

    def _send_task(self, task: Task) -> None:
        message = task_message(self.run, task, self.state, self.plan.asks)
        self._around.send(task.site, task=message)
        self._on_step(Step.DISPATCHED, self.run)

    def _withdraw(self, task: Task, reason: str) -> None:
        error = Stale(f"task {task.task} is withdrawn: {reason}", site=task.site, run=self.run, round=task.round)
        self._around.send(task.site, cancel_task=cancel_message(self.run, task, error))
        if task.kind == "train":
            self._around.withdraw_transfers(self.run, task.site, error)

    def _arm(self, name: str, after_s: float) -> None:
        if (timer := self._timers.pop(name, None)) is not None:
            timer.cancel()
        if after_s > 0:
            self._later(name, after_s, lambda: self.tell(TimerFired(name=name)))

    def _later(self, name: str, after_s: float, do: Callable[[], None]) -> None:
        self._timers[name] = asyncio.get_running_loop().call_later(after_s, do)

    def _end_wait(self) -> None:
        if self._waits:
            self.tell(self.state.wait_over(self.plan, self._around.shortfall(self.run)))

    def nobody_left_to_ask(self) -> None:
        """All offers are answered: the members so far are who there is."""
        if self.state.phase is Phase.WAITING and self.state.may_begin(self.plan):
            self.tell(Ready())

    async def _evaluate(self, version: int) -> None:
        """Judge a version here, one at a time; who is behind skips to the newest."""
        async with self._evaluating:
            pending = [other for other, e in self.state.evaluations.items() if e.server_pending]
            if version not in pending or version < max(pending):
                self.tell(ServerEvaluated(version=version, metrics={}, error="a newer version is there"))
                return
            await self._judge(version)

    async def _judge(self, version: int) -> None:
        try:
            metrics = await self._around.evaluate(self.run, version)
        except RemoteError as error:
            log.warning("run %s: version %d is not evaluated here: %s", self.run, version, error.message)
            self.tell(ServerEvaluated(version=version, metrics={}, error=error.message))
        else:
            self.tell(ServerEvaluated(version=version, metrics=metrics))

    # --- beginning and end ------------------------------------------------------------------------------------------

    async def _opened(self, number: int) -> None:
        self.summary.round_opened(number, time.monotonic(), self._around.transferred(self.run))
        if self.summary.status != "running":
            self._arm("wait for sites", 0)
            self.summary.set_status("running")
            await self.durably(self._store.set_status, self.run, "running", None)

    async def _end(self, action: EndRun) -> None:
        self._on_step(Step.ENDED, self.run)
        status = action.outcome.value
        reason = action.detail(self.run)
        await self.durably(self._store.set_status, self.run, status, reason.SerializeToString() if reason else None)
        for number in list(self.summary.open_rounds):
            self.pipeline.drop(number)
        ended = pb.RunEnded(run=self.run, status=status, reason=reason)
        for site in {**self.state.members, **self.state.former}:
            self._around.send(site, run_ended=ended)
        self._around.withdraw_transfers(self.run, None, Stale(f"run {self.run} is over", run=self.run))
        self.summary.set_status(status, reason)
        self._around.run_ended(self.run)
        log.info("run %s: %s%s", self.run, status, f": {action.reason}" if action.reason else "")

    async def _break(self, event: Broken) -> None:
        self.state, actions = advance(self.plan, self.state, event)
        try:
            await self.durably(self._store.append, self.run, [encode_event(event)])
        finally:
            self._started.set()
            for action in actions:
                await self._act(action)

    def _quiet(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        for task in self._background:
            task.cancel()

    async def durably(self, write: Callable[..., T], *arguments: object) -> T:
        """The result of a write that may find the disk full: told to people, and tried again until there is room."""
        while True:
            try:
                result = await asyncio.to_thread(write, *arguments)
            except DiskFull as error:
                log.error("run %s waits for disk space: %s", self.run, error)
                self.summary.set_trouble(f"waits for disk space at the server: {error}")
                await asyncio.sleep(DISK_PATIENCE_S)
            else:
                self.summary.set_trouble("")
                return result

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
