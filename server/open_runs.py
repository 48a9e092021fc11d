"""Every run that the server knows: the open ones with their drivers, and what researchers ask of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from datetime import UTC, datetime
from functools import partial

from atoll.aggregation.metrics import MetricRules
from atoll.aggregation.stages import Strategies
from atoll.aggregation.strategy import require_regions_allowed
from atoll.server.continuation import first_event, source_of, take_over
from atoll.server.driver import RunDriver
from atoll.server.events import Continued, Delegated, StopAsked, encode_event
from atoll.server.models import RunModels
from atoll.server.plan import delegated_plan, plan_of, work_of
from atoll.server.records import OPEN_STATUSES, RunRow
from atoll.server.secure_driver import SecureDriver
from atoll.server.security import Caller, as_remote
from atoll.server.settings import ServerFolder, ServerSettings
from atoll.server.steps import Observer, Step
from atoll.server.store import Store
from atoll.server.submission import Submission, read_submission
from atoll.server.summary import RunSummary
from atoll.server.surroundings import Surroundings
from atoll.server.transfers import Sink, Transfers
from atoll.transport.callbacks import Callbacks
from atoll.wire import runs_pb2
from atoll.wire.errors import (
    AtollError,
    Malformed,
    NotAllowed,
    Stale,
    TooLarge,
    Unavailable,
    Unknown,
    to_detail,
)
from atoll.wire.job import decode_job
from atoll.wire.manifest import Manifest
from atoll.wire.names import new_run_id
from atoll.wire.payload_list import is_list


class OpenRuns:
    """Drivers by run, oldest first. `on_change` is called when a run opens or ends."""

    def __init__(
        self,
        *,
        settings: ServerSettings,
        folder: ServerFolder,
        store: Store,
        transfers: Transfers,
        around: Surroundings,
        on_change: Callable[[], None],
        on_step: Observer,
    ) -> None:
        self._settings = settings
        self._folder = folder
        self._store = store
        self._transfers = transfers
        self._around = around
        self._on_change = on_change
        self._on_step = on_step
        self._drivers: dict[str, RunDriver] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._submissions: dict[str, Submission] = {}  # runs whose version 0 is not here yet
        self._taking_over = asyncio.Lock()  # of what another run left
        self._callbacks = Callbacks(settings.callbacks)
        self._closed = False

    # --- life -------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Go on with every run that was open when the server last ended."""
        for row in reversed(await asyncio.to_thread(self._store.runs)):
            if row.status in OPEN_STATUSES:
                manifest = Manifest.decode(await asyncio.to_thread(self._store.manifest, row.run))
                first = await asyncio.to_thread(first_event, self._store, row.run)
                if row.status != "uploading":
                    self._drive(row, manifest, first)
                elif isinstance(first, Continued):
                    await self._go_on_from(row, manifest, first)
                else:
                    self._expect_model(row, manifest)
        for driver in self:
            await driver.started()

    async def at_rest(self) -> None:
        """Returns when every run has done all that it was told so far: a round that has its last update is committed."""
        rests = []
        for driver in self:
            rest = asyncio.Event()
            driver.tell(None, _setting(rest))
            rests.append(rest.wait())
        await asyncio.gather(*rests)

    async def close(self) -> None:
        """Stop all drivers where they are; their journals hold the rest."""
        self._closed = True
        for driver in self:
            driver.summary.wake()  # those who watch end their streams
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for submission in self._submissions.values():
            submission.close()
        await asyncio.to_thread(self._callbacks.close)

    def ended(self, run: str) -> None:
        """Forget a run whose driver has come to its end."""
        self._drivers.pop(run, None)
        self._tasks.pop(run, None)
        self._on_change()

    def get(self, run: str) -> RunDriver | None:
        return self._drivers.get(run)

    def __iter__(self) -> Iterator[RunDriver]:
        return iter(list(self._drivers.values()))

    def __contains__(self, run: object) -> bool:
        return run in self._drivers

    # --- submitting -------------------------------------------------------------------------------------------------

    async def submit(self, caller: Caller, request: runs_pb2.SubmitRequest) -> runs_pb2.SubmitReply:
        """See `RunsService.Submit`."""
        job, manifest = read_submission(request, self._settings)
        require_regions_allowed(job, self._around.regions(job.job.sites))
        self._require_room()
        crc32, begun = request.crc32, list[bytes]()
        if job.job.continues is not None:
            source = await asyncio.to_thread(source_of, self._store, caller, job, manifest)
            crc32, begun = source.crc32, [encode_event(source.event)]
        row = RunRow(
            run=new_run_id(),
            name=job.job.name,
            job=job.canonical(),
            app_hash=request.app_hash,
            submitted_by=caller.name,
            crc32=crc32,
            status="uploading",
            reason=None,
            submitted_at=datetime.now(UTC),
        )
        create = self._store.create_run
        row = await asyncio.to_thread(create, row, manifest=request.manifest, request=request.request, events=begun)
        first = await asyncio.to_thread(first_event, self._store, row.run)
        if isinstance(first, Continued):
            self._on_step(Step.SUBMITTED, row.run)
            await self._go_on_from(row, manifest, first)
            return runs_pb2.SubmitReply(run=row.run)
        if row.status != "uploading":
            return runs_pb2.SubmitReply(run=row.run)
        if row.run not in self._submissions:
            self._expect_model(row, manifest)
        self._on_step(Step.SUBMITTED, row.run)
        grant = self._transfers.grant_upload(caller.name, row.run, manifest.num_bytes)
        grant.offset = self._submissions[row.run].slot.received_bytes
        return runs_pb2.SubmitReply(run=row.run, upload=grant)

    async def _go_on_from(self, row: RunRow, manifest: Manifest, first: Continued) -> None:
        """Take over what another run left, and queue the run, or say why that failed; nothing where it is done."""
        async with self._taking_over:
            if row.run in self._drivers or (await asyncio.to_thread(self._store.run, row.run)).status != "uploading":
                return
            models = RunModels(self._folder.models, row.run, manifest)
            try:
                await asyncio.to_thread(take_over, self._folder.models, first, models)
            except AtollError as error:
                detail = to_detail(as_remote(error)).SerializeToString()
                await asyncio.to_thread(self._store.set_status, row.run, "failed", detail)
                return
            self._on_step(Step.STORED, row.run)
            await self._queue(row, manifest, first)

    async def _queue(self, row: RunRow, manifest: Manifest, first: Continued | None = None) -> None:
        await asyncio.to_thread(self._store.set_status, row.run, "queued", None)
        self._on_step(Step.QUEUED, row.run)
        self._submissions.pop(row.run, None)
        driver = self._drive(await asyncio.to_thread(self._store.run, row.run), manifest, first)
        await driver.started()
        self._on_change()

    def _require_room(self) -> None:
        most = self._settings.limits.max_open_runs
        if len(self._drivers) + len(self._submissions) >= most:
            text = f"{most} runs are open already; wait for one to end, or stop one"
            raise TooLarge(text, field="max_open_runs", bound=most)

    def sink(self, run: str) -> Sink:
        """Where the bytes of version 0 of a run go.

        Raises:
            Stale: the run awaits no model (any more).
        """
        submission = self._submissions.get(run)
        if submission is None:
            raise Stale(f"run {run} awaits no model: it has one, or was stopped", run=run)
        return submission

    def _expect_model(self, row: RunRow, manifest: Manifest) -> None:
        async def queue() -> None:
            self._on_step(Step.STORED, row.run)
            await self._queue(row, manifest)

        self._submissions[row.run] = Submission(
            row=row,
            manifest=manifest,
            models=RunModels(self._folder.models, row.run, manifest),
            staging=self._folder.staging,
            queue=queue,
        )

    async def delegate(self, row: RunRow, manifest: Manifest, delegated: Delegated) -> RunDriver:
        """The run that an upper server has offered to this region, opened where it is not.

        Raises:
            Malformed: the upper server's run has the id of another one here.
            NotAllowed: it is over here.
            TooLarge: this server has as many open runs as it takes.
        """
        if row.run not in self._drivers:
            self._require_room()
        first = [encode_event(delegated)]
        if await asyncio.to_thread(self._is_own, row.run):
            raise Malformed(f"run {row.run} is one of this region's own: the upper server cannot take it", run=row.run)
        create = self._store.create_run
        row = await asyncio.to_thread(create, row, manifest=manifest.encode(), request=row.run, events=first)
        driver = self._drivers.get(row.run)
        if row.status not in OPEN_STATUSES:
            raise NotAllowed(f"run {row.run} is over in this region: {row.status}", run=row.run, value=row.status)
        if driver is None:
            driver = self._drive(row, manifest, delegated)
            await driver.started()
            self._on_change()
        return driver

    def _is_own(self, run: str) -> bool:
        try:
            self._store.run(run)
        except Unknown:
            return False
        return self._delegated(run) is None

    def _delegated(self, run: str) -> Delegated | None:
        """What an upper server's run began with; None of a run of this server's own."""
        first = first_event(self._store, run)
        return first if isinstance(first, Delegated) else None

    def _drive(self, row: RunRow, manifest: Manifest, first: Delegated | Continued | None = None) -> RunDriver:
        job = decode_job(row.job)
        stages = Strategies(job)
        downloads = stages.downloads(manifest, job.job.seed)
        models = RunModels(self._folder.models, row.run, manifest, downloads)
        masked = job.secure_aggregation is not None
        made: Callable[..., RunDriver] = partial(SecureDriver, upload=self._transfers.ask_up) if masked else RunDriver
        driver = made(
            row=row,
            job=job,
            plan=delegated_plan(job, first) if isinstance(first, Delegated) else plan_of(job, first),
            pipeline=work_of(row, job, stages, manifest, models),
            models=models,
            manifest=manifest,
            store=self._store,
            around=self._around,
            keep_versions=self._settings.limits.keep_versions,
            on_step=self._on_step,
        )
        rules = None if isinstance(first, Delegated) else MetricRules(job)  # a region reports plain sums
        driver.summary.show(
            continues=job.job.continues or "",
            rules=rules,
            tell=self._callbacks.tell,
            complete=driver.pipeline.complete,
        )
        self._drivers[row.run] = driver
        self._tasks[row.run] = asyncio.create_task(driver.drive(), name=f"run {row.run}")
        return driver

    # --- looking ----------------------------------------------------------------------------------------------------

    async def list(self) -> list[runs_pb2.RunSnapshot]:
        """All runs, newest first, without their rounds."""
        rows = await asyncio.to_thread(self._store.runs)
        return [(await self._summary(row)).snapshot(with_rounds=False) for row in rows]

    async def watch(self, run: str) -> AsyncGenerator[runs_pb2.RunSnapshot]:
        """See `RunsService.Watch`."""
        summary = await self._summary(await asyncio.to_thread(self._store.run, run))
        while True:
            seen = summary.changes
            snapshot = summary.snapshot()
            yield snapshot
            if snapshot.status not in OPEN_STATUSES:
                return
            driver = self._drivers.get(run)
            if driver is not None and driver.summary is summary:
                await summary.changed(seen)
            else:  # on record as open but driven by nobody: before its driver's time, or just after; nobody wakes us
                await asyncio.sleep(1.0 if snapshot.status == "uploading" else 0.1)
                summary = await self._summary(await asyncio.to_thread(self._store.run, run))
            if self._closed:
                raise Unavailable(f"the server goes down; run {run} goes on when it is back", run=run)

    async def _summary(self, row: RunRow) -> RunSummary:
        driver = self._drivers.get(row.run)
        if driver is not None:
            return driver.summary
        job = decode_job(row.job).job
        first = await asyncio.to_thread(first_event, self._store, row.run) if job.continues else None
        done_rounds, version = (first.round, first.version) if isinstance(first, Continued) else (0, 0)
        summary = RunSummary(row, job.rounds, done_rounds, version)
        summary.show(continues=job.continues or "")
        summary.restore(await asyncio.to_thread(self._store.rounds, row.run))
        return summary

    # --- changing, and fetching -------------------------------------------------------------------------------------

    async def stop(self, caller: Caller, run: str) -> None:
        """See `RunsService.Stop`."""
        row = await asyncio.to_thread(self._store.run, run)
        driver = self._drivers.get(run)
        theirs = row.submitted_by == caller.name and not (driver is not None and driver.plan.delegated)
        if caller.role == "researcher" and not theirs:
            raise NotAllowed(f"run {run} is {row.submitted_by}'s: only they or an operator can stop it", run=run)
        submission = self._submissions.pop(run, None)
        if submission is not None:
            submission.close()
            await asyncio.to_thread(self._store.set_status, run, "stopped", None)
        elif driver is not None:
            driver.tell(StopAsked(by=caller.name))
        elif row.status in OPEN_STATUSES:
            raise Unavailable(f"run {run} is just being opened, or ending: ask again", run=run)
        else:
            raise Stale(f"run {run} is over already: {row.status}", run=run)

    async def model(self, caller: Caller, run: str, version: int | None, *, best: bool = False) -> runs_pb2.ModelReply:
        """See `RunsService.Model`."""
        row = await asyncio.to_thread(self._store.run, run)
        if row.status == "uploading":
            raise Unknown(f"run {run} has no model yet: its version 0 is being uploaded", run=run)
        manifest = await asyncio.to_thread(self._store.manifest, run)
        if best:
            version = (await self._summary(row)).require_best()
        elif version is None:
            version = (await self._summary(row)).version
        models = RunModels(self._folder.models, run, Manifest.decode(manifest))
        grant = await self._transfers.grant_download(caller.name, run, models, version)
        if is_list(models.manifest):  # which has grown
            manifest = await asyncio.to_thread(models.manifest_of, version)
        return runs_pb2.ModelReply(download=grant, manifest=manifest, version=version, best=best)


def _setting(event: asyncio.Event) -> Callable[[], Awaitable[None]]:
    async def set_it() -> None:
        event.set()

    return set_it
