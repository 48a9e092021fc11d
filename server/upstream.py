"""This server as one site of an upper federation: what the agent of a region has in place of a torch worker.

::

    Prepare  -> the run is opened here and offered to this region's sites -> Prepared(number of sites, weights)
    Train    -> base version beside this server's own, Asked -> its sites' updates -> the exact partial sum -> Trained
    Evaluate -> EvaluationAsked -> its sites' metric sums -> Evaluated
    committed, cancelled, ended by the upper server -> events of the run here

The run is an ordinary one of this server, under the id that it has above: driven by these events in place of a
schedule of its own, and committed when the upper server says so. Invariant: an event is in the journal before the agent
goes on, so a region that is killed at any moment finds run, round and updates again; what the upper server has not
committed is kept by this region's sites, and its sum by the agent's outbox.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from atoll.aggregation.metrics import combine_metrics
from atoll.aggregation.schedule import Asked, Committed, Withdrawn
from atoll.aggregation.schedules.relayed import RelayedState
from atoll.aggregation.stages import Strategies
from atoll.aggregation.strategy import require_regions_allowed
from atoll.cluster.messages import (
    Describe,
    Described,
    Evaluate,
    Evaluated,
    Mask,
    Masked,
    Prepare,
    Prepared,
    Train,
    Trained,
)
from atoll.server.coordinator import Coordinator
from atoll.server.driver import DISK_PATIENCE_S, RunDriver
from atoll.server.events import Delegated, EndedAbove, EvaluationAsked, EvaluationEnded, RunEvent
from atoll.server.models import place_file
from atoll.server.records import RoundRow, RunRow
from atoll.server.regions import require_sessions
from atoll.server.round import Round
from atoll.server.run_state import Phase
from atoll.server.secure_driver import SecureDriver
from atoll.server.settings import UpstreamSection
from atoll.server.store import Store
from atoll.wire.errors import (
    DiskFull,
    Incompatible,
    Malformed,
    NotAllowed,
    Stale,
    TooFewSites,
    TooLarge,
)
from atoll.wire.job import Job, decode_job
from atoll.wire.manifest import Manifest

log = logging.getLogger(__name__)

DEFAULT_DEADLINE_S = 600.0

T = TypeVar("T")


class Upstream:
    """What the agent towards the upper server needs of this one."""

    def __init__(self, section: UpstreamSection, coordinator: Coordinator, store: Store) -> None:
        self.section = section
        self.runs = coordinator.runs
        self.max_model_bytes = coordinator.settings.limits.max_model_bytes
        self._transferred = coordinator.transferred
        self._store = store
        self._tasks: dict[str, RunEvent] = {}  # what takes a task that is under way back, by its key

    def new_worker(self, folder: Path, log_path: Path) -> RegionWorker:
        """What does the tasks of one run."""
        return RegionWorker(self)

    # --- what the agent hears from above ----------------------------------------------------------------------------

    async def joined(self, run: str) -> None:
        """The agent has joined the run, durably: it stays open until the upper server ends it."""
        driver = self.runs.get(run)
        if driver is not None:
            driver.wait_no_more()

    async def committed(self, run: str, round_: int, version: int) -> None:
        """The top has committed: the sites of this region may drop their updates, once that is in the journal."""
        driver = self.runs.get(run)
        if driver is None:
            return

        async def record() -> None:
            if round_ in driver.summary.open_rounds:
                await self._record(driver, round_, version)

        await told(driver, Committed(round=round_, version=version), record)

    async def cancelled(self, key: str) -> None:
        """Nobody above waits for this task any more."""
        event = self._tasks.get(key)
        driver = self.runs.get(key.partition("/")[0])
        if event is not None and driver is not None:
            await told(driver, event)

    async def ended(self, run: str, status: str, reason: str) -> None:
        """The run is over above, or this region has left it."""
        driver = self.runs.get(run)
        if driver is not None:
            outcome = status if status in ("finished", "failed", "stopped") else "failed"
            await told(driver, EndedAbove(outcome=outcome, reason="" if outcome == "finished" else reason or status))

    # --- of the workers ---------------------------------------------------------------------------------------------

    def begun(self, key: str, take_back: RunEvent) -> None:
        self._tasks[key] = take_back

    def done(self, key: str) -> None:
        self._tasks.pop(key, None)

    async def _record(self, driver: RunDriver, number: int, version: int) -> None:
        """What people see of a round. The model itself is the upper server's."""
        round_ = driver.state.committed
        assert round_ is not None
        record = driver.summary.record_of(round_, version, time.monotonic(), self._transferred(driver.run))
        driver.pipeline.drop(number)
        row = RoundRow(
            round=number,
            version=version,
            record=record.SerializeToString(),
            model_crc32=0,
            num_bytes=driver.manifest.num_bytes,
        )
        await despite_full_disk(driver, lambda: self._store.commit_round(driver.run, [], row))
        driver.summary.round_committed(record)


class RegionWorker:
    """Does one run's tasks with the sites of this region. As `cluster.worker_process.WorkerProcess` to the agent."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._driver: RunDriver | None = None
        self._site = ""
        self._progress = (0, 0)  # updates, and sites that were asked, as last said

    @property
    def pid(self) -> int | None:
        """This process while the run is open here, else None."""
        open_ = self._driver is not None and self._driver.state.phase is not Phase.ENDED
        return os.getpid() if open_ else None

    async def start(self) -> None:
        """Nothing is to be started: the sites have their workers."""

    async def close(self) -> None:
        """Nothing ends with it: what becomes of the run is said by `Upstream.ended`."""

    async def prepare(self, request: Prepare, timeout_s: float | None = None) -> Prepared:
        """Offer the run to this region's sites, and declare those that take part.

        Raises:
            TooFewSites: fewer than the region's minimum, within the job's wait for sites.
            NotAllowed: the run is over here.
            ConfigError: its reducer cannot work on a region's sum.
            TooLarge: the model is over this server's limit.
        """
        self._site = request.site
        job = decode_job(request.job.encode())
        require_regions_allowed(job, [request.site])
        manifest = Manifest.decode(await asyncio.to_thread(Path(request.manifest_path).read_bytes))
        self._check_size(manifest)
        row = RunRow(
            run=request.run,
            name=job.job.name,
            job=request.job.encode(),
            app_hash=request.app_hash,
            submitted_by=request.submitted_by,
            crc32=0,  # version 0 comes with the first task
            status="queued",
            reason=None,
            submitted_at=datetime.now(UTC),
        )
        section = self._upstream.section
        require_sessions(job, manifest, fewest=section.quorum or section.min_sites)
        deadline = section.deadline_share * deadline_s(job)
        delegated = Delegated(min_sites=section.min_sites, quorum=section.quorum, deadline_s=deadline)
        driver = self._driver = await self._upstream.runs.delegate(row, manifest, delegated)
        state = await until(driver, self._declared)
        return Prepared(
            max_weight=state.max_weight,
            update_bytes=max(driver.pipeline.partial_bytes(stage.from_round) for stage in job.stages),
            device=f"region of {state.num_sites}",
            num_sites=state.num_sites,
            sum_weights=state.sum_weights,
        )

    async def train(self, request: Train, on_progress: Callable[[int, int], None] | None = None) -> Trained:
        """The sum of one round's updates of this region, written as the file that goes up.

        Raises:
            TooFewSites: the round came to nothing here, and why.
            NotAllowed: the run is over here.
            Incompatible, Malformed: the upper server's terms are missing, or have no room for this region.
        """
        driver = self._open_run()
        self._check_terms(request, driver.state.schedule)
        await asyncio.to_thread(place_file, Path(request.base_path), driver.models.path(request.base_version))
        asked = Asked(
            round=request.round,
            base_version=request.base_version,
            num_sites=request.num_sites,
            max_weight=request.max_weight,
            counted_round=request.counted_round,
        )
        withdrawn = Withdrawn(round=request.round, reason=f"round {request.round} is closed above")
        self._upstream.begun(request.key, withdrawn)
        try:
            await told(driver, asked)

            round_ = await until(driver, lambda: self._closed(request.round, on_progress))
            path = Path(request.out_path)
            num_bytes, crc32 = await despite_full_disk(driver, lambda: driver.pipeline.write_partial(round_, path))
        finally:
            self._upstream.done(request.key)
        known = {site: round_.updates[site].metrics for site in round_.closing}
        known |= {f"sum {part}": one.metrics for part, one in round_.secured.items()}
        metrics = combine_metrics(known)
        secured = round_.secured.values()
        weight = round_.sum_weights + sum(one.weight for one in secured)
        return Trained(key=request.key, weight=weight, metrics=metrics, num_bytes=num_bytes, crc32=crc32)

    async def evaluate(self, request: Evaluate) -> Evaluated:
        """Metric sums of a version over this region's sites.

        Raises:
            NotAllowed: the run is over here.
            Stale: a newer version is evaluated.
        """
        driver, version = self._open_run(), request.base_version
        await asyncio.to_thread(place_file, Path(request.base_path), driver.models.path(version))
        self._upstream.begun(request.key, EvaluationEnded(version=version))
        try:
            await told(driver, EvaluationAsked(version=version, round=request.round))
            metrics = await until(driver, lambda: self._evaluated(version))
        finally:
            self._upstream.done(request.key)
        return Evaluated(key=request.key, metrics=metrics)

    async def mask(self, request: Mask) -> Masked:
        """Raises Incompatible: the updates of a region are masked by its sites, in sessions with this server."""
        raise Incompatible("a region masks nothing; its sites run sessions of their own", site=self._site)

    async def describe(self, request: Describe) -> Described:
        """Raises Incompatible: a region has no data of its own; planning refuses such a job with regions."""
        raise Incompatible("a region makes no statistics; name sites alone in job.sites", site=self._site)

    # ---------------------------------------------------------------------------------------------------------------

    def _open_run(self) -> RunDriver:
        """The run, as long as it is open here. Raises NotAllowed."""
        driver = self._driver
        assert driver is not None  # prepared first
        if driver.state.phase is Phase.ENDED:
            why = driver.state.reason or driver.state.outcome.value
            raise NotAllowed(f"the run is over in region {self._site}: {why}", site=self._site, run=driver.run)
        return driver

    def _declared(self) -> RelayedState | None:
        driver = self._driver
        assert driver is not None
        if driver.state.phase is Phase.ENDED:
            reason = driver.state.reason or driver.state.outcome.value
            raise TooFewSites(f"region {self._site} takes no part: {reason}", site=self._site, run=driver.run)
        state: RelayedState = driver.state.schedule
        return state if state.declared else None

    def _closed(self, number: int, on_progress: Callable[[int, int], None] | None) -> Round | None:
        """The round, once its updates are in this server's sum; None as long as it goes on."""
        driver = self._open_run()
        round_ = driver.state.rounds.get(number)
        if round_ is None:
            known = driver.state.abandoned
            why = driver.state.abandoned_reason if known and known.number == number else "it is closed above"
            text = f"region {self._site} has no part in round {number}: {why}"
            raise TooFewSites(text, site=self._site, run=driver.run, round=number)
        progress = (len(round_.updates), len(round_.asked))
        if on_progress is not None and progress != self._progress:
            self._progress = progress
            on_progress(*progress)
        whole = round_.closing and _is_whole(driver, round_)
        return round_ if whole else None

    def _evaluated(self, version: int) -> dict[str, tuple[float, float]] | None:
        state = self._open_run().state
        evaluation = state.evaluations.get(version)
        if evaluation is None:
            raise Stale(f"region {self._site}: a newer version than {version} is evaluated", site=self._site)
        waiting = any(task.kind == "evaluate" and task.base_version == version for task in state.tasks.values())
        return None if waiting else combine_metrics(evaluation.by_site)

    def _check_size(self, manifest: Manifest) -> None:
        most = self._upstream.max_model_bytes
        if manifest.num_bytes > most:
            text = (
                f"the model has {manifest.num_bytes} bytes, region {self._site} takes {most} (limits.max_model_bytes)"
            )
            raise TooLarge(text, site=self._site, field="manifest", value=manifest.num_bytes, bound=most)

    def _check_terms(self, request: Train, declared: RelayedState) -> None:
        if not request.num_sites or not request.max_weight:
            raise Incompatible(
                f"region {self._site} was asked for round {request.round} without the terms of its sum; upgrade the "
                "upper server",
                site=self._site,
                round=request.round,
                field="sum",
            )
        for name, value, least in (
            ("num_sites", request.num_sites, declared.num_sites),
            ("max_weight", request.max_weight, declared.max_weight),
        ):
            if value < least:
                raise Malformed(
                    f"round {request.round}: the sum has {name} {value}, region {self._site} declared {least}",
                    site=self._site,
                    round=request.round,
                    field=f"sum.{name}",
                    value=value,
                    bound=least,
                )


def _is_whole(driver: RunDriver, round_: Round) -> bool:
    """Whether all that a closing round's sum is made of is here."""
    if isinstance(driver, SecureDriver):
        return driver.masked.is_whole(round_)
    return not set(round_.closing) & set(driver.pipeline.lacks(round_))


async def told(driver: RunDriver, event: RunEvent, then: Callable[[], Awaitable[None]] | None = None) -> None:
    """Returns when `event` is in the run's journal, or the run is over."""
    heard = False

    async def hear() -> None:
        nonlocal heard
        heard = True
        if then is not None:
            await then()
        driver.summary.wake()

    driver.tell(event, hear)
    await until(driver, lambda: True if heard or driver.state.phase is Phase.ENDED else None)


async def until(driver: RunDriver, get: Callable[[], T | None]) -> T:
    """What `get` gives, as soon as it gives something; asked again after each change of the run."""
    while True:
        seen = driver.summary.changes
        found = get()
        if found is not None:
            return found
        await driver.summary.changed(seen)


async def despite_full_disk(driver: RunDriver, write: Callable[[], T]) -> T:
    """The result of a write, tried again until there is room."""
    while True:
        try:
            return await asyncio.to_thread(write)
        except DiskFull as error:
            log.error("run %s waits for disk space: %s", driver.run, error)
            await asyncio.sleep(DISK_PATIENCE_S)


def deadline_s(job: Job) -> float:
    """The least time that the upper server gives a round, seconds."""
    options = [getattr(strategy.schedule, "options", None) for strategy in Strategies(job)]
    return min(float(getattr(one, "deadline", DEFAULT_DEADLINE_S)) for one in options)
