"""THE PATH of a site: attach, join runs, do tasks, deliver results, and do all of it again after any crash.

::

    Hello  -> Welcome
    RunOffer -> policy, app hash, worker -> Accept | decline            offers.py, work.py
    Task -> task log -> base version -> worker -> outbox -> Result      work.py, base_models.py
    Grant -> upload -> Verdict -> Committed -> released                 deliveries.py

Invariants. What the site has said yes to is durable before it says so, so a restarted agent goes on where the last one
stopped, and a task that comes twice is done once. Nothing here blocks the event loop, opens data or loads torch.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine
from datetime import datetime
from pathlib import Path
from typing import Any

from atoll.client.attachment import Mailbox
from atoll.client.base_models import BaseModels
from atoll.client.board import Board
from atoll.client.capacity import measure_capacity, require_room
from atoll.client.deliveries import Deliveries
from atoll.client.granted import Granted
from atoll.client.holdings import hello_of, tidy_up
from atoll.client.home import SiteHome
from atoll.client.link import Link
from atoll.client.membership import Membership
from atoll.client.neighbours import Neighbours
from atoll.client.presence import Presence
from atoll.client.refusal import as_refusal
from atoll.client.renewal import keep_certificate
from atoll.client.sealed import Sealer
from atoll.client.secure_tasks import SecureTasks
from atoll.client.settings import SiteSettings
from atoll.client.steps import Observer, Step, unobserved
from atoll.client.work import DISK_PATIENCE_S, RunWork
from atoll.client.workers import Nobody, Witness, Worker
from atoll.client.workplace import Workplace
from atoll.cluster.nursery_process import Nursery
from atoll.cluster.worker_process import WorkerProcess
from atoll.transport.hello import abilities_of_site, require_regions_taken
from atoll.transport.identity import Identity, utc_now
from atoll.transport.outbox import Outbox
from atoll.transport.reconnect import Backoff
from atoll.transport.tasks import Key, TaskLog
from atoll.wire import control_pb2 as pb
from atoll.wire.errors import (
    AtollError,
    DiskFull,
    LocalError,
    RemoteError,
    Stale,
    Unavailable,
    Unknown,
    to_detail,
)

_log = logging.getLogger(__name__)

FAREWELL_TIMEOUT_S = 5.0  # for a server to take the last messages at the end


class Agent:
    """The agent of one site. `run` once; `stop` from anywhere on its event loop."""

    def __init__(
        self,
        *,
        settings: SiteSettings,
        home: SiteHome,
        link: Link,
        on_step: Observer = unobserved,
        new_worker: Callable[[Path, Path], Worker] | None = None,
        witness: Witness | None = None,
        now: Callable[[], datetime] = utc_now,
        rng: random.Random | None = None,
    ) -> None:
        self._settings, self._home, self._link = settings, home, link
        self._on_step = on_step
        self._nursery = Nursery(home.logs / "nursery.log")
        self._new_worker = new_worker or (
            lambda folder, log: WorkerProcess(folder, log_path=log, nursery=self._nursery)
        )
        self._is_region = witness is not None
        self._witness: Witness = witness or Nobody()
        self._now, self._rng = now, rng
        self._mailbox = Mailbox()
        self._works: dict[str, RunWork] = {}
        self._joining: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._leaves: set[asyncio.Task[None]] = set()
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """End in order: say what is still to be said, close the workers. What is open stays for the next start."""
        self._stopping.set()

    async def run(self) -> None:
        """Be the site, until `stop`.

        Raises:
            IdentityError: the certificate has expired.
            RemoteError: the server refuses this site at the first try, for a reason that a person has to lift.
            LocalError: the site's own files cannot be used.
        """
        await self._open()
        async with asyncio.TaskGroup() as group:
            self._group = group
            await self._take_up()
            self._spawn(self._board.keep_written())
            if self._link.identity is not None:
                self._spawn(keep_certificate(self._link.identity, self._renewed, now=self._now))
            staying = group.create_task(self._presence.stay(self))
            stopping = self._spawn(self._wait_for_stop())
            await asyncio.wait({staying, stopping}, return_when=asyncio.FIRST_COMPLETED)
            self._presence.leave()
            await asyncio.wait({staying}, timeout=FAREWELL_TIMEOUT_S)
            refusal = staying.result() if staying.done() else None
            staying.cancel()
            await self._close()
        if refusal is not None:
            raise refusal

    # --- beginning and end ------------------------------------------------------------------------------------------

    async def _open(self) -> None:
        """Open all that outlives a process, and take up what the last one left."""
        home = self._home
        self._task_log = await asyncio.to_thread(TaskLog, home.state / "tasks")
        self._outbox = await asyncio.to_thread(Outbox, home.outbox)
        self._capacity = await asyncio.to_thread(measure_capacity, self._settings)
        self._board = Board(
            home.status,
            site=self._link.site,
            server=self._link.address,
            count_held=lambda: len(self._outbox.results()),
        )
        identity = self._link.identity
        self._membership = Membership(home.state / "members", identity, self._board)
        self._show_certificate(identity)
        self._presence = Presence(
            self._link, mailbox=self._mailbox, board=self._board, spawn=self._spawn, backoff=Backoff(rng=self._rng)
        )
        shared: dict[str, Any] = {"mailbox": self._mailbox, "spawn": self._spawn, "carrier": self._presence.carrier}
        self._base_models = BaseModels(home.models, **shared)
        self._deliveries = Deliveries(self._outbox, **shared, on_step=self._on_step)
        self._neighbours = Neighbours(
            home, self._settings, identity, self._membership, outbox=self._outbox, task_log=self._task_log, **shared
        )
        await self._neighbours.listen()
        secret = await asyncio.to_thread(home.secret)
        self._granting = Granted(self._deliveries, self._base_models, self._neighbours)
        self._place = Workplace(
            settings=self._settings,
            home=home,
            secret=secret,
            sealer=Sealer(secret),
            mailbox=self._mailbox,
            task_log=self._task_log,
            outbox=self._outbox,
            base_models=self._base_models,
            deliveries=self._deliveries,
            neighbours=self._neighbours,
            board=self._board,
            spawn=self._spawn,
            leave_run=self._leave_run,
            on_step=self._on_step,
            new_worker=self._new_worker,
            witness=self._witness,
            is_region=self._is_region,
        )
        self._secure = SecureTasks(
            self._place, identity, self._membership.members, work_of=lambda r: self._works.get(r)
        )

    async def _take_up(self) -> None:
        """Go on with the open tasks of the joined runs; their workers start when the first task needs them."""
        joined = await asyncio.to_thread(self._task_log.joined)
        self._works = {run: RunWork(offer, self._place) for run, offer in joined.items()}
        for run in joined:
            await self._witness.joined(run)
        for task in await asyncio.to_thread(self._task_log.open_tasks):
            key = Key.of(task.key)
            if self._outbox.is_held(key):  # killed after the one became durable, before the other
                await asyncio.to_thread(self._task_log.finish, key)
            elif key.run in self._works:
                self._works[key.run].add(task)
            else:
                await asyncio.to_thread(self._task_log.cancel, key)

    async def _close(self) -> None:
        """Stop everything in order. Runs that are being left are left to the end; all else goes on at the next start."""
        self._deliveries.close()
        self._base_models.close()
        await self._neighbours.close()
        for task in self._tasks - self._leaves:
            task.cancel()
        await asyncio.gather(*(work.close() for work in self._works.values()))
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._nursery.close()
        self._board.connection("stopped")
        await asyncio.to_thread(self._board.write)
        await asyncio.to_thread(self._task_log.close)
        await self._presence.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task of this agent: one that fails in a way that nobody foresaw brings the agent down, loudly."""
        task = self._group.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _spawn_leave(self, work: RunWork) -> None:
        task = self._spawn(work.leave())
        self._leaves.add(task)
        task.add_done_callback(self._leaves.discard)

    async def _wait_for_stop(self) -> None:
        await self._stopping.wait()

    def _renewed(self, identity: Identity) -> None:
        self._presence.renewed(identity)
        self._neighbours.renewed(identity)
        self._show_certificate(identity)

    def _show_certificate(self, identity: Identity | None) -> None:
        if identity is not None:
            self._board.show(certificate_expires_unix_s=identity.expires_at.timestamp())

    # --- the conversation (presence.Conversation) -------------------------------------------------------------------

    async def hello(self) -> pb.Hello:
        """What this site has under way, from its durable state."""
        ours = abilities_of_site(is_region=self._is_region, is_signing=self._link.identity is not None)
        return await hello_of(
            self._task_log,
            self._outbox,
            capacity=self._capacity,
            neighbours=self._neighbours,
            lists=self._membership.version,
            ours=ours,
        )

    def welcomed(self, welcome: pb.Welcome) -> None:
        """Say again what the last stream may have lost. Raises Incompatible where a region is not taken."""
        if self._is_region:
            require_regions_taken(welcome)
        self._board.show(federation=welcome.federation)
        self._membership.tell()
        self._on_step(Step.ATTACHED, welcome.federation)
        self._deliveries.offer_all(welcome.max_frame_bytes)
        self._base_models.ask_again()

    def heartbeat(self) -> pb.Heartbeat:
        """What to say in between."""
        return pb.Heartbeat(member_list_version=self._membership.version)

    async def take(self, message: pb.ServerMessage) -> None:
        """Act on one message. A fault in it, or of this machine, is logged; the stream goes on."""
        try:
            match message.WhichOneof("body"):
                case "run_offer":
                    self._offered(message.run_offer)
                case "task":
                    await self._tasked(message.task)
                case "cancel_task":
                    await self._cancelled(message.cancel_task)
                case "grant":
                    self._granting.granted(message.grant)
                case "grant_withdrawn":
                    self._granting.withdrawn(message.grant_withdrawn)
                case "secure_step":
                    self._secure.take(message.secure_step)
                case "introduction":
                    await self._neighbours.introduced(message.introduction)
                case "verdict":
                    await self._deliveries.judged(message.verdict)
                case "committed":
                    await self._committed(message.committed)
                case "run_ended":
                    await self._run_ended(message.run_ended)
                case "member_list":
                    await self._membership.take(message.member_list)
                case "drain":
                    self._presence.stay_away(float(message.drain.reconnect_after_s))
                case body:
                    _log.info("passing over a message of a newer server: %s", body or "unknown")
        except AtollError as error:
            _log.error("message %s from the server: %s", message.WhichOneof("body"), error)

    def _offered(self, offer: pb.RunOffer) -> None:
        self._on_step(Step.OFFERED, offer.run)
        if offer.run in self._joining:
            return  # the answer is on its way
        work = self._works.get(offer.run)
        if work is None:
            try:
                require_room(len(self._works), self._settings, offer.run)
            except Unavailable as busy:
                self._decline(offer.run, busy)
                return
            work = self._works[offer.run] = RunWork(offer, self._place)
        self._joining.add(offer.run)
        self._spawn(self._join(work, offer))

    async def _join(self, work: RunWork, offer: pb.RunOffer) -> None:
        try:
            await work.join(offer)
        except AtollError as error:
            _log.warning("run %s of %s: declined: %s", offer.run, offer.submitted_by, error)
            self._decline(offer.run, as_refusal(error, site=self._link.site, run=offer.run))
            self._works.pop(offer.run, None)
            self._spawn_leave(work)
        finally:
            self._joining.discard(offer.run)

    def _decline(self, run: str, reason: RemoteError) -> None:
        self._mailbox.post(offer_reply=pb.OfferReply(run=run, decline=to_detail(reason)))

    async def _tasked(self, task: pb.Task) -> None:
        key = Key.of(task.key)
        work = self._works.get(key.run)
        if work is None:
            unknown = f"site {self._link.site} has not joined run {key.run}, or has left it: offer it again"
            self._refuse(task, Unknown(unknown, site=self._link.site, run=key.run, round=task.round))
            return
        try:
            is_new = await asyncio.to_thread(self._task_log.accept, task)
        except DiskFull as error:
            _log.error("task %s waits for disk space: %s", key, error)
            self._board.held_up(key.run, f"waits for disk space: {error}")
            self._spawn(self._tasked_later(task))
            return
        except LocalError as error:
            _log.error("task %s cannot be accepted: %s", key, error)
            self._refuse(task, as_refusal(error, site=self._link.site, run=key.run, round_=task.round))
            return
        if not is_new:
            self._asked_again(work, key, task)
            return
        self._on_step(Step.ACCEPTED, str(key))
        for older in work.older_attempts(key):
            await work.cancel(older)
        work.add(task)

    async def _tasked_later(self, task: pb.Task) -> None:
        """Take a task on once there may be room to write it down; the stream goes on meanwhile, for what frees some."""
        await asyncio.sleep(DISK_PATIENCE_S)
        await self.take(pb.ServerMessage(task=task))

    def _asked_again(self, work: RunWork, key: Key, task: pb.Task) -> None:
        """A task that is known: its result is held, or it is under way, or it came to nothing."""
        if work.has(key) or self._deliveries.offer_if_held(key):
            return
        over = f"attempt {key.attempt} of task {key.task} is over at site {self._link.site}: ask with a higher attempt"
        self._refuse(task, Stale(over, site=self._link.site, run=key.run, round=task.round, value=key.attempt))

    def _refuse(self, task: pb.Task, reason: RemoteError) -> None:
        self._mailbox.post(task_failed=pb.TaskFailed(key=task.key, error=to_detail(reason)))

    async def _cancelled(self, cancel: pb.CancelTask) -> None:
        key = Key.of(cancel.key)
        _log.info("task %s is not wanted any more: %s", key, cancel.reason.message)
        await asyncio.to_thread(self._task_log.cancel, key)
        await self._witness.cancelled(str(key))
        if key.run in self._works:
            await self._works[key.run].cancel(key)
        await self._deliveries.drop(key)

    async def _committed(self, committed: pb.Committed) -> None:
        await self._witness.committed(committed.run, committed.round, committed.version)
        self._spawn(
            tidy_up(committed, deliveries=self._deliveries, neighbours=self._neighbours, task_log=self._task_log)
        )

    async def _run_ended(self, ended: pb.RunEnded) -> None:
        _log.info("run %s: %s %s", ended.run, ended.status, ended.reason.message)
        await self._witness.ended(ended.run, ended.status, ended.reason.message)
        work = self._works.pop(ended.run, None)
        if work is not None:
            self._spawn_leave(work)
        else:
            await self._deliveries.drop_run(ended.run)
        await asyncio.to_thread(self._task_log.leave, ended.run)  # now: the next Hello must not name it

    def _leave_run(self, run: str, reason: RemoteError) -> None:
        """The site itself takes part no more, since its policy or its app has changed."""
        if (work := self._works.pop(run, None)) is not None:
            _log.warning("run %s: leaving it: %s", run, reason)
            self._mailbox.post(leave_run=pb.LeaveRun(run=run, reason=to_detail(reason)))
            self._spawn(self._witness.ended(run, "failed", reason.message))
            self._spawn_leave(work)
