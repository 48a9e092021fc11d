"""What sites report of their tasks, and what is answered: progress, failures, results and their verdicts."""

from __future__ import annotations

import asyncio
import logging

from atoll.server.driver import RunDriver
from atoll.server.events import SiteEvaluated, TaskLost, UpdateAccepted
from atoll.server.meetings import Meetings, is_model
from atoll.server.models import Wanted
from atoll.server.open_runs import OpenRuns
from atoll.server.round import Metrics
from atoll.server.run_state import Task
from atoll.server.secure_driver import SecureDriver
from atoll.server.sessions import Session, Sessions
from atoll.server.steps import Observer, Step
from atoll.server.surveys import answer_of
from atoll.server.transfers import Transfers, Whole
from atoll.server.validate import Standing, standing_of
from atoll.wire import control_pb2 as pb
from atoll.wire.errors import Malformed, NotAllowed, RemoteError, Stale, TooLarge, Unknown, from_detail, to_detail
from atoll.wire.job import Asks

log = logging.getLogger(__name__)

_DOING: dict[Asks, str] = {"train": "training", "evaluate": "evaluating", "statistics": "counting"}


class Results:
    """Turns what sites say of their tasks into events of the runs."""

    def __init__(
        self, *, runs: OpenRuns, sessions: Sessions, transfers: Transfers, meetings: Meetings, on_step: Observer
    ) -> None:
        self._runs = runs
        self._meetings = meetings
        self._sessions = sessions
        self._transfers = transfers
        self._on_step = on_step

    def progress(self, site: str, progress: pb.Progress) -> None:
        """For people only."""
        found = self._find(site, progress.key)
        if found is not None:
            driver, task = found
            doing = "evaluating" if task.kind == "evaluate" else _DOING[driver.plan.asks]
            driver.summary.site_is(site, doing, done=progress.done, total=progress.total)

    def failed(self, site: str, failed: pb.TaskFailed) -> None:
        """A task came to nothing at the site; whoever waits for it learns why."""
        found = self._find(site, failed.key)
        if found is not None:
            driver, task = found
            error = from_detail(failed.error)
            log.warning("run %s: task %s failed at %s: %s", driver.run, task.task, site, error.message)
            self._lose(driver, site, failed.key, error)
        self._release(site, failed.key)

    def secure(self, site: str, answer: pb.SecureAnswer) -> None:
        """A word of a site in a session of secure aggregation."""
        driver = self._runs.get(answer.key.run)
        if isinstance(driver, SecureDriver):
            driver.secure.answered(site, answer)

    async def fetch(self, session: Session, fetch: pb.Fetch) -> None:
        """Queue a download, or say why there is none."""
        site = session.site
        driver = self._runs.get(fetch.run)
        try:
            if driver is None:
                raise Unknown(f"run {fetch.run[:26]} is not open here", site=site, run=fetch.run[:26])
            if site not in driver.state.members and site not in driver.state.former:
                raise NotAllowed(f"{site} has not joined run {fetch.run}", site=site, run=fetch.run)
            if fetch.key.task:
                return await self._meetings.fetch(site, driver, fetch)
            wanted = Wanted(version=fetch.version, first_byte=fetch.first_byte, part_bytes=fetch.part_bytes)
            branch = driver.state.branch_of(driver.plan, site, fetch.version)
            await self._transfers.ask_down(site, driver.run, driver.models, wanted, fetch.offset, branch)
        except RemoteError as error:
            error.run, error.field, error.value = fetch.run[:26], "version", str(fetch.version)
            session.send(grant_withdrawn=pb.GrantWithdrawn(reason=to_detail(error)))

    def result(self, site: str, result: pb.Result) -> None:
        """A result: its upload is queued, or it has its verdict at once. The same result again is harmless."""
        driver = self._runs.get(result.key.run)
        if driver is None:
            self._release(site, result.key)
            return
        if is_model(result):
            self._meetings.model(driver, site, result)
            return
        pipeline = driver.pipeline
        round_ = driver.state.round_of(result.key.task, result.key.attempt)
        number = round_.number if round_ is not None else result.round
        lengths = {"update_bytes": pipeline.update_bytes(number), "partial_bytes": pipeline.partial_bytes(number)}
        sums = driver.plan.masked and round_ is not None and site in round_.regions  # of sessions held in the region
        brings = driver.plan.brings_payloads or sums
        try:
            standing = standing_of(
                driver.state, site, result, run=driver.run, **lengths, grows=pipeline.grows, has_payload=brings
            )
            statistics = answer_of(result, driver.job, site=site, run=driver.run)
        except RemoteError as error:
            self._refuse(driver, site, result.key, error)
            return
        lacking = round_ is not None and site in driver.pipeline.lacks(round_)
        if standing is Standing.RELEASED:
            self._release(site, result.key)
        elif not result.payloads:
            self._answered(driver, site, result, statistics)
        elif standing is Standing.NEW or lacking:
            driver.summary.site_is(site, "sending")
            self._transfers.ask_up(site, result.key, result.payloads[0], self._taker(driver, site, result))
        else:
            self._confirm(site, result.key)

    # --- answers without a payload ----------------------------------------------------------------------------------

    def _answered(self, driver: RunDriver, site: str, result: pb.Result, statistics: str) -> None:
        """Metrics of a version beside the training; or what a round asks that brings no payload: it stays until its commit."""
        key = result.key
        if driver.plan.asks != "train" or driver.state.round_of(key.task, key.attempt) is not None:

            async def confirm() -> None:
                driver.summary.site_is(site, "accepted")
                self._confirm(site, key)

            if driver.plan.masked:  # its numbers come in the session, masked
                result.ClearField("metrics")
            driver.tell(_accepted(result, site, statistics), confirm)
            return

        async def release() -> None:
            driver.summary.site_is(site, "ready")
            self._release(site, key)

        event = SiteEvaluated(task=key.task, attempt=key.attempt, site=site, metrics=_metrics(result))
        driver.tell(event, release)

    # --- updates ----------------------------------------------------------------------------------------------------

    def _taker(self, driver: RunDriver, site: str, result: pb.Result) -> Whole:
        """Takes the whole bytes of an update: check, journal, fold, verdict. Returns when the bytes are done with."""

        async def take(update: memoryview) -> None:
            try:
                await self._check(driver, site, result, update)
                await self._accept(driver, site, result, update)
            except RemoteError as error:
                self._refuse(driver, site, result.key, error)

        return take

    async def _check(self, driver: RunDriver, site: str, result: pb.Result, update: memoryview) -> None:
        round_ = driver.state.round_of(result.key.task, result.key.attempt)
        if round_ is None:
            raise _closed(driver, site, result)
        self._on_step(Step.RECEIVED, driver.run)
        await asyncio.to_thread(driver.pipeline.check, round_, site, result.weight, update, _metrics(result))
        self._on_step(Step.CHECKED, driver.run)

    async def _accept(self, driver: RunDriver, site: str, result: pb.Result, update: memoryview) -> None:
        """Tell the run; once that is in the journal, fold the update before anything else happens in the run."""
        key = result.key
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def fold() -> None:
            try:
                round_ = driver.state.round_of(key.task, key.attempt)
                known = round_.updates.get(site) if round_ is not None else None
                if round_ is None or known is None or known.attempt != key.attempt:
                    raise _closed(driver, site, result)
                await driver.durably(driver.pipeline.fold, round_, site, known.weight, update)
                self._on_step(Step.FOLDED, driver.run)
            except asyncio.CancelledError:
                done.cancel()  # the server goes down: no verdict, so the site keeps its update
                raise
            except BaseException as error:
                done.set_exception(error if isinstance(error, RemoteError) else RuntimeError("not folded"))
                if not isinstance(error, RemoteError):
                    raise
            else:
                driver.summary.site_is(site, "accepted")
                self._confirm(site, key)
                done.set_result(None)

        driver.tell(_accepted(result, site), fold)
        await done

    # --- refusals ---------------------------------------------------------------------------------------------------

    def _refuse(self, driver: RunDriver, site: str, key: pb.TaskKey, error: RemoteError) -> None:
        log.warning("run %s: result %s of %s refused: %s", driver.run, key.task, site, error.message)
        if isinstance(error, Malformed | TooLarge):
            self._lose(driver, site, key, error)
        self._sessions.send(site, verdict=pb.Verdict(key=key, refused=to_detail(error)))

    def _lose(self, driver: RunDriver, site: str, key: pb.TaskKey, error: RemoteError) -> None:
        """The task will not have a result: nobody waits for it any more."""
        if self._find(site, key) is not None:
            driver.summary.site_is(site, "failed", detail=error.message)
            driver.tell(TaskLost(task=key.task, attempt=key.attempt, site=site, reason=error.message))

    def _confirm(self, site: str, key: pb.TaskKey) -> None:
        self._sessions.send(site, verdict=pb.Verdict(key=key, accepted=True))

    def _release(self, site: str, key: pb.TaskKey) -> None:
        self._sessions.send(site, verdict=pb.Verdict(key=key, released=True))

    def _find(self, site: str, key: pb.TaskKey) -> tuple[RunDriver, Task] | None:
        """The open task that `key` names, where it is this site's newest attempt."""
        driver = self._runs.get(key.run)
        task = driver.state.tasks.get(key.task) if driver is not None else None
        if driver is None or task is None or task.site != site or task.attempt != key.attempt:
            return None
        return driver, task


def _closed(driver: RunDriver, site: str, result: pb.Result) -> Stale:
    text = f"update from {site}, round {result.round}: the round is closed"
    return Stale(text, site=site, run=driver.run, round=result.round, field="round", value=result.round)


def _accepted(result: pb.Result, site: str, statistics: str = "") -> UpdateAccepted:
    return UpdateAccepted(
        task=result.key.task,
        attempt=result.key.attempt,
        site=site,
        round=result.round,
        weight=result.weight,
        metrics=_metrics(result),
        statistics=statistics,
    )


def _metrics(result: pb.Result) -> Metrics:
    return {name: (metric.sum, metric.count) for name, metric in result.metrics.items()}
