"""One run at this site: its worker, and its tasks one after the other.

::

    admit -> start the worker -> prepare -> (task: fetch base -> train or evaluate -> outbox -> close the task)*

Invariant: a task is closed only after its result is durable in the outbox, or after the server was told why there is
none, and the last of a result's bytes leave only then. So an agent that is killed at any moment either does a task
again or has its result, never neither.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from atoll.aggregation.statistics import check_statistics
from atoll.client.answers import accept_of, config_of, statistics_to_messages, sums_of
from atoll.client.left_state import set_aside
from atoll.client.meeting import MODEL
from atoll.client.offers import Admission, admit, admit_region, preparation
from atoll.client.own_models import GIVES, metrics_of, parts_of
from atoll.client.party import Agreed
from atoll.client.policy import least_cell
from atoll.client.private_update import PRIVATE, keep_private
from atoll.client.refusal import as_refusal, require_agreed, without_values
from atoll.client.script_workers import new_worker_of
from atoll.client.steps import Step
from atoll.client.version_parts import part_of_version
from atoll.client.workers import Worker
from atoll.client.workplace import Workplace
from atoll.cluster.messages import Describe, Evaluate, Mask, Masked, Prepared, Train
from atoll.cluster.worker_process import WorkerDied
from atoll.transport.durable import disk_errors
from atoll.transport.tasks import Key
from atoll.wire import control_pb2 as pb
from atoll.wire.errors import (
    AppFailed,
    AtollError,
    DiskFull,
    Incompatible,
    NotAllowed,
    PolicyRefused,
    to_detail,
)

_log = logging.getLogger(__name__)

MAX_WORKER_DEATHS = 3  # tries of one task: a second death may be chance (memory), a third is the app
UPDATE = "update"  # the payload of a training
SUM = "sum"  # that of a region
DISK_PATIENCE_S = 5.0  # between tries while the disk is full; a person frees space within minutes

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bench:
    """A worker that has loaded app, model and data, and what it was admitted with."""

    admission: Admission
    worker: Worker
    prepared: Prepared


class RunWork:
    """A run that this site was offered or has joined."""

    def __init__(self, offer: pb.RunOffer, place: Workplace) -> None:
        self.run = offer.run
        self._offer = offer
        self._place = place
        self._admission: Admission | None = None
        self._worker: Worker | None = None
        self._bench: _Bench | None = None
        self._turn = asyncio.Lock()  # offers and tasks use the worker one at a time
        self._waiting: deque[pb.Task] = deque()
        self._doing: tuple[pb.Task, asyncio.Task[None]] | None = None
        self._loop: asyncio.Task[None] | None = None

    # --- the offer --------------------------------------------------------------------------------------------------

    async def join(self, offer: pb.RunOffer) -> None:
        """Look at the offer, get the worker ready, and take part.

        Raises:
            RemoteError: this site does not take part, and why.
        """
        async with self._turn:
            self._offer, self._admission = offer, None
            prepared = (await self._ready_in_time()).prepared
        await asyncio.to_thread(self._place.task_log.join, self.run, offer)
        self._place.on_step(Step.JOINED, self.run)
        _log.info("run %s: joined, device %s, weight up to %d", self.run, prepared.device, prepared.max_weight)
        await self._place.witness.joined(self.run)
        self._place.mailbox.post(offer_reply=pb.OfferReply(run=self.run, accept=accept_of(prepared)))

    async def _ready_in_time(self) -> _Bench:
        """As `_ready`; a worker that dies is started again, a few times, while the run still waits for this site."""
        clock = asyncio.get_running_loop().time
        began_s = clock()
        for death in range(1, MAX_WORKER_DEATHS):
            try:
                return await self._ready()
            except WorkerDied as died:
                patience_s = self._admission.job.job.wait_for_sites if self._admission is not None else 0.0
                if clock() - began_s >= patience_s:
                    raise
                _log.warning("run %s: getting ready, try %d: %s\n%s", self.run, death, died, died.log_tail)
        return await self._ready()

    async def _ready(self) -> _Bench:
        """A worker that can take tasks; admits the run, and starts and prepares one, where there is none."""
        place = self._place
        if self._admission is None:
            look = admit_region if place.is_region else admit
            self._admission = await asyncio.to_thread(look, self._offer, settings=place.settings, home=place.home)
        if self._bench is not None and self._bench.worker.pid is not None:
            return self._bench
        admission = self._admission
        place.board.preparing(self.run, admission.job)
        request = await asyncio.to_thread(
            preparation, admission, settings=place.settings, home=place.home, secret=place.secret
        )
        await self._end_worker()
        worker = new_worker_of(admission, place)
        self._worker = worker  # from here on somebody has to end it
        await worker.start()
        # Past that time the run does not wait for this site any more.
        prepared = await worker.prepare(request, timeout_s=admission.job.job.wait_for_sites)
        place.board.ready(self.run, prepared.device)
        self._bench = _Bench(admission=admission, worker=worker, prepared=prepared)
        return self._bench

    # --- tasks ------------------------------------------------------------------------------------------------------

    def add(self, task: pb.Task) -> None:
        """Do an accepted task when those before it are done."""
        self._waiting.append(task)
        if self._loop is None or self._loop.done():
            self._loop = self._place.spawn(self._work())

    def has(self, key: Key) -> bool:
        """Whether the task waits or is under way."""
        return any(Key.of(task.key) == key for task in self._tasks())

    def older_attempts(self, key: Key) -> list[Key]:
        """Attempts of the same task that wait or are under way, below that of `key`."""
        keys = [Key.of(task.key) for task in self._tasks()]
        return [other for other in keys if other.task == key.task and other.attempt < key.attempt]

    async def cancel(self, key: Key) -> None:
        """Stop or forget a task that nobody wants any more."""
        self._waiting = deque(task for task in self._waiting if Key.of(task.key) != key)
        if self._doing is not None and Key.of(self._doing[0].key) == key:
            self._doing[1].cancel()
            await asyncio.wait({self._doing[1]})

    def base_versions(self) -> frozenset[int]:
        """Versions that open tasks start from."""
        return frozenset(task.base_version for task in self._tasks())

    def _tasks(self) -> list[pb.Task]:
        return [*([self._doing[0]] if self._doing is not None else []), *self._waiting]

    async def _work(self) -> None:
        while self._waiting:
            task = self._waiting.popleft()
            key = Key.of(task.key)
            doing = self._place.spawn(self._do(key, task))
            self._doing = (task, doing)
            try:
                await asyncio.wait({doing})
            except asyncio.CancelledError:
                doing.cancel()
                await asyncio.wait({doing})
                raise
            finally:
                self._doing = None
        self._place.board.idle(self.run)

    async def _do(self, key: Key, task: pb.Task) -> None:
        """One task, from its base version to a result in the outbox or a failure that the server hears of."""
        place = self._place
        try:
            result = await self._with_room(f"task {key}", lambda: self._tries(key, task))
            await asyncio.to_thread(place.outbox.ready, result)
            place.board.sending(self.run, task.round)
            place.deliveries.offer(result)  # it may leave while it is on its way to the disk, but for its end
            await self._with_room(f"task {key}", lambda: asyncio.to_thread(self._keep, key))
        except AtollError as error:
            await self._failed(key, task, error)
            return
        place.deliveries.kept(key)

    async def _with_room(self, what: str, do: Callable[[], Awaitable[T]]) -> T:
        """What `do` gives. A full disk is waited out: the server stops waiting when its own deadline says so."""
        while True:
            try:
                return await do()
            except DiskFull as error:
                _log.error("run %s: %s waits for disk space: %s", self.run, what, error)
                self._place.board.held_up(self.run, f"waits for disk space: {error}")
                await asyncio.sleep(DISK_PATIENCE_S)

    def _keep(self, key: Key) -> None:
        self._place.outbox.commit(key)
        self._place.on_step(Step.KEPT, str(key))
        self._place.task_log.finish(key)
        self._place.on_step(Step.FINISHED, str(key))

    async def _tries(self, key: Key, task: pb.Task) -> pb.Result:
        return await self._surviving(f"task {key}", task.round, lambda: self._ask_worker(key, task))

    async def _surviving(self, what: str, round_: int, ask: Callable[[], Awaitable[T]]) -> T:
        """What the worker answers; one that dies is started again, a few times."""
        for death in range(1, MAX_WORKER_DEATHS + 1):
            try:
                async with self._turn:
                    return await ask()
            except WorkerDied as died:
                _log.warning("run %s: %s, try %d: %s\n%s", self.run, what, death, died, died.log_tail)
                await self._end_worker()
        raise AppFailed(
            f"the worker of site {self._site} died {MAX_WORKER_DEATHS} times in round {round_}; its log there says more",
            site=self._site,
            run=self.run,
            round=round_,
        )

    # --- sessions of secure aggregation (secure_tasks.SecureWork) ----------------------------------------------------

    async def agreed(self) -> Agreed:
        """What this site has agreed to; admits the run where that was not done since the agent started."""
        if (admission := self._admission) is None:
            place = self._place
            admission = await asyncio.to_thread(admit, self._offer, settings=place.settings, home=place.home)
            self._admission = admission
        return Agreed(job=admission.job, app_hash=admission.app_hash, schema_hash=admission.manifest.schema_hash)

    async def mask(self, request: Mask) -> Masked:
        """The masked input of a session, written by the worker."""

        async def ask() -> Masked:
            bench = await self._ready()
            self._place.board.working(self.run, "masking", request.round)
            masked = await bench.worker.mask(request)
            self._place.board.sending(self.run, request.round)
            return masked

        return await self._surviving(f"session {request.key}", request.round, ask)

    # --- a task by kind ---------------------------------------------------------------------------------------------

    async def _ask_worker(self, key: Key, task: pb.Task) -> pb.Result:
        place = self._place
        bench = await self._ready()
        config = config_of(task)
        require_agreed(task, bench.admission.job.job.rounds, site=self._site)
        if task.kind == pb.STATISTICS:
            return await self._describe(key, task, bench)
        prepared = bench.prepared
        base = await place.base_models.get(
            self.run,
            task.base_version,
            bench.admission.manifest,
            encoded_bytes=prepared.encoded_bytes(task.base_version),
            most_bytes=prepared.most_version_bytes,
            part=part_of_version(prepared.fragments, task.base_version),
        )
        place.on_step(Step.FETCHED, str(key))
        # Now, rather than at the commit: what the next round begins with would wait for the disk.
        place.spawn(self._drop_older(task.base_version))
        common: dict[str, Any] = {
            "key": str(key),
            "round": task.round,
            "base_version": task.base_version,
            "base_path": str(base),
            "config": config,
            "mix": parts_of(task, site=self._site, outbox=place.outbox, neighbours=place.neighbours),
        }
        if task.kind in GIVES:
            terms = {"num_sites": task.sum.num_sites, "max_weight": task.sum.max_weight, "gives": GIVES[task.kind]}
            return await self._train(key, task, bench, common | terms | {"counted_round": task.counted_round})
        if task.kind == pb.EVALUATE:
            return await self._evaluate(key, task, bench, common)
        raise Incompatible(f"site {self._site} does not know task kind {task.kind}; upgrade it", site=self._site)

    async def _drop_older(self, version: int) -> None:
        try:
            await asyncio.to_thread(self._place.base_models.drop_older, self.run, version, self.base_versions())
        except AtollError as error:
            _log.error("run %s: base versions before %d: %s", self.run, version, error)

    async def _train(self, key: Key, task: pb.Task, bench: _Bench, common: dict[str, Any]) -> pb.Result:
        place, max_weight = self._place, bench.prepared.sum_weights or bench.prepared.max_weight
        is_private = bench.admission.job.secure_aggregation is not None and not place.is_region
        if is_private and task.kind != pb.TRAIN:
            text = f"site {self._site} has agreed to secure aggregation, and this task would show its update"
            raise PolicyRefused(text, site=self._site, run=self.run, round=task.round, field="kind", value=task.kind)
        name = PRIVATE if is_private else SUM if place.is_region else MODEL if task.kind == pb.EXCHANGE else UPDATE
        out_path = await asyncio.to_thread(place.outbox.draft, key, name)
        place.board.working(self.run, "training", task.round)

        def progress(done: int, total: int) -> None:
            place.board.progress(self.run, done, total)
            place.mailbox.post(progress=pb.Progress(key=task.key, done=done, total=total))

        trained = await bench.worker.train(Train(**common, out_path=str(out_path)), progress)
        place.on_step(Step.WORKED, str(key))
        if not 1 <= trained.weight <= max_weight:
            raise AppFailed(
                f"site {self._site}, round {task.round}: the update weighs {trained.weight} examples, the site had "
                f"announced at most {max_weight}",
                site=self._site,
                run=self.run,
                round=task.round,
                field="weight",
                value=trained.weight,
                bound=max_weight,
            )
        if is_private:
            folder, base, sums_stale = place.outbox.folder(key), Path(common["base_path"]), bench.prepared.sums_stale
            return await asyncio.to_thread(
                keep_private, folder, place.sealer, task, base, trained, sums_stale=sums_stale
            )
        payload = pb.Payload(name=name, num_bytes=trained.num_bytes, crc32=trained.crc32)
        metrics = sums_of(trained.metrics) or metrics_of(task, site=self._site, outbox=place.outbox)
        return pb.Result(key=task.key, round=task.round, weight=trained.weight, metrics=metrics, payloads=[payload])

    async def _evaluate(self, key: Key, task: pb.Task, bench: _Bench, common: dict[str, Any]) -> pb.Result:
        self._place.board.working(self.run, "evaluating", task.round)
        evaluated = await bench.worker.evaluate(Evaluate(**common))
        self._place.on_step(Step.WORKED, str(key))
        return pb.Result(key=task.key, round=task.round, metrics=sums_of(evaluated.metrics))

    async def _describe(self, key: Key, task: pb.Task, bench: _Bench) -> pb.Result:
        """Statistics. The policy is read now, and what the worker made of it is looked at again before it leaves."""
        self._place.board.working(self.run, "counting", task.round)
        section = bench.admission.job.statistics
        if section is None:
            text = f"site {self._site} has agreed to a run without statistics"
            raise PolicyRefused(text, site=self._site, run=self.run, field="statistics")
        least = await asyncio.to_thread(least_cell, self._place.home.policy, site=self._site, run=self.run)
        described = await bench.worker.describe(Describe(key=str(key), round=task.round, min_cell_count=least))
        self._place.on_step(Step.WORKED, str(key))
        check_statistics(described.features, section, least)
        statistics = statistics_to_messages(described.features)
        return pb.Result(key=task.key, round=task.round, statistics=statistics)

    async def _failed(self, key: Key, task: pb.Task, error: AtollError) -> None:
        place = self._place
        refusal = as_refusal(error, site=self._site, run=self.run, round_=task.round)
        masked = self._admission is not None and self._admission.job.secure_aggregation is not None
        if masked and not place.is_region:
            refusal = without_values(refusal, self._site)
        _log.error("run %s: task %s of round %d failed: %s", self.run, key.task, task.round, error)
        place.board.failed(self.run, refusal.message)
        await place.deliveries.drop(key)  # a draft that came to nothing, or a result that cannot be kept
        # Told first: an agent that is killed in between does the task again, and fails again.
        place.mailbox.post(task_failed=pb.TaskFailed(key=task.key, error=to_detail(refusal)))
        await self._with_room(f"the end of task {key}", lambda: asyncio.to_thread(place.task_log.finish, key))
        if isinstance(refusal, NotAllowed):  # what was agreed to is not so any more: no later task will do better
            place.leave_run(self.run, refusal)

    # --- the end ----------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Stop what is under way and end the worker; accepted tasks stay open in the task log."""
        self._waiting.clear()
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.wait({self._loop})
        await self._end_worker()

    async def leave(self) -> None:
        """Close, and forget all that the run has left at this site."""
        await self.close()
        place = self._place
        await place.deliveries.drop_run(self.run)
        await place.neighbours.drop_run(self.run)
        await self._with_room("leaving", lambda: asyncio.to_thread(place.task_log.leave, self.run))
        await asyncio.to_thread(place.base_models.drop_run, self.run)
        await asyncio.to_thread(set_aside, place.home, self.run)
        place.board.gone(self.run)

    async def _end_worker(self) -> None:
        worker, self._worker, self._bench = self._worker, None, None
        if worker is not None:
            with disk_errors(self._place.home.worker_log(self.run)):
                await worker.close()

    @property
    def _site(self) -> str:
        return self._place.settings.site.name
