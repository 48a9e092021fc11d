"""Bytes on their way in and out: grants, staging slots, and the calls that fill and read them.

Invariants. An object is handed on only when all its bytes are in a slot under the announced checksum. What a cut
upload has brought stays in its slot, so the site goes on from there; a slot that nobody is filling may be taken for
another upload, which costs the first one its progress and nothing else. Slots close after all that fills or reads them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

from atoll.server.models import Outgoing, RunModels, Wanted
from atoll.server.security import current_caller
from atoll.server.settings import LimitsSection
from atoll.server.steps import Observer, Step
from atoll.server.under_way import UnderWay, going_down
from atoll.transport.grants import Ask, Grant, GrantTable, Subject
from atoll.transport.pieces import Checksums, Pieces
from atoll.transport.staging import StagingPool, StagingSlot
from atoll.transport.transfer import Moved
from atoll.wire import control_pb2 as pb
from atoll.wire.errors import DiskFull, LocalError, RemoteError, Stale, Unavailable, to_detail
from atoll.wire.transfer_pb2 import TransferStatus

log = logging.getLogger(__name__)

KEPT_CHECKSUMS = 64  # versions whose checksums are at hand: a few for each run that is under way
SPARE_SLOTS = 2  # beside those in use: what cut uploads brought survives while others go on

Whole = Callable[[memoryview], Awaitable[None]]  # takes the bytes of a whole object; they are valid until it returns
Send = Callable[..., None]
Receive = Callable[[StagingSlot, Moved], Awaitable[TransferStatus]]


class Sink(Protocol):
    """Where the bytes of a run's version 0 go."""

    slot: StagingSlot

    async def complete(self) -> None:
        """All bytes are in the slot."""
        ...


Sinks = Callable[[str], Sink]  # by run; raises Unknown or Stale where no model is awaited


class _Upload:
    """An object on its way in."""

    def __init__(self, ask: Ask, crc32: int, whole: Whole) -> None:
        self.ask, self.crc32, self.whole = ask, crc32, whole
        self.slot: StagingSlot | None = None
        self.settling = False  # all bytes are in and are being worked on
        self.abandoned = False  # withdrawn while a call was filling the slot
        self.filling = asyncio.Lock()  # held by the one call that fills the slot


class Transfers:
    """All transfers of one server. `send` queues a control message for a site."""

    def __init__(self, *, limits: LimitsSection, staging: Path, send: Send, on_step: Observer) -> None:
        self._send = send
        self._on_step = on_step
        self._table = GrantTable(
            limits.max_uploads, limits.max_downloads, time.monotonic, min_bytes_per_s=limits.min_bytes_per_s
        )
        # People transfer one model now and then, and wait for it at a terminal: they do not queue behind sites.
        self._people = GrantTable(1 << 16, 1 << 16, time.monotonic, min_bytes_per_s=limits.min_bytes_per_s)
        self._pool = StagingPool(staging, limits.max_uploads + SPARE_SLOTS)
        self._uploads: dict[tuple[str, Subject], _Upload] = {}  # in the order of their last use
        self._downloads: dict[Subject, Outgoing] = {}
        self._bytes: dict[str, list[int]] = defaultdict(lambda: [0, 0])  # by run: up, down
        self._crc32s: dict[Outgoing, int] = {}
        self._checksums: dict[Outgoing, Checksums] = {}  # of the pieces of a version: computed once for all sites
        self._background: set[asyncio.Task[None]] = set()
        self.under_way = UnderWay()  # once it is closed, no grant is given any more

    def close(self) -> None:
        """Stop what is left and remove the slots. Calls have been ended before: `under_way.end_calls`."""
        self.under_way.close()
        self.under_way.cancel_work()
        for task in self._background:
            task.cancel()
        self._pool.close()

    def transferred(self, run: str) -> tuple[int, int]:
        """Bytes received and sent for a run since the server started."""
        up, down = self._bytes[run]
        return up, down

    # --- wishes of sites --------------------------------------------------------------------------------------------

    def ask_up(self, site: str, key: pb.TaskKey, payload: pb.Payload, whole: Whole) -> None:
        """Queue the upload of a payload; a site that asks again goes on where its bytes ended."""
        subject = Subject(direction="up", run=key.run, task=key.task, attempt=key.attempt, payload=payload.name)
        upload = self._uploads.get((site, subject))
        if upload is not None and upload.settling:
            return  # a verdict follows
        ask = Ask(site=site, subject=subject, num_bytes=payload.num_bytes)
        if upload is None:
            upload = self._uploads[site, subject] = _Upload(ask, payload.crc32, whole)
        upload.ask, upload.whole, upload.abandoned = ask, whole, False
        self._end_running(site, subject)
        self._spawn(self._ask_when_idle(upload, payload.crc32))

    async def _ask_when_idle(self, upload: _Upload, crc32: int) -> None:
        """Queue an upload once no earlier call fills its slot any more, so that the grant's offset is the true one."""
        async with upload.filling:
            if upload.crc32 != crc32:  # the site lost what it was sending before it was durable, and made another
                upload.crc32 = crc32
                if upload.slot is not None:
                    self._pool.release(upload.slot)
                    upload.slot = None
            self._table.ask(upload.ask)
        self._pump()

    async def ask_down(
        self, site: str, run: str, models: RunModels, wanted: Wanted, offset: int, branch: int | None = None
    ) -> None:
        """Queue the download of a model version, as it goes to sites, from byte `offset` of what is wanted on.

        Args:
            branch: the group whose form of the version it is, where the run has groups.

        Raises:
            Unknown: the version is not there.
            Malformed: it has no such part.
            Unavailable: it cannot be read, or the disk has no room to encode it.
        """
        version = wanted.version
        try:
            source = wanted.of(await asyncio.to_thread(models.outgoing, version, branch))
        except LocalError as error:
            log.error("run %s: version %d cannot be sent: %s", run, version, error)
            raise Unavailable(f"version {version} cannot be sent: {error}", run=run) from None
        subject = Subject(
            direction="down",
            run=run,
            version=version,
            branch=branch,
            first_byte=wanted.first_byte,
            part_bytes=wanted.part_bytes,
        )
        await self.ask_down_of(site, subject, source, offset)

    async def ask_down_of(self, site: str, subject: Subject, source: Outgoing, offset: int) -> None:
        """Queue the download of a part of a file, from byte `offset` on. Raises LocalError where it cannot be read."""
        self._table.ask(await self._download_ask(site, subject, source, offset))
        self._pump()

    def withdraw(self, site: str | None, run: str | None, reason: RemoteError) -> None:
        """End all transfers of a site, of a run, or of a site in a run."""

        def matches(ask: Ask) -> bool:
            return (site is None or ask.site == site) and (run is None or ask.subject.run == run)

        for grant in self._table.withdraw_where(matches):
            self._tell_withdrawn(grant, reason)
        for key, upload in list(self._uploads.items()):
            if not matches(upload.ask) or upload.settling:
                continue
            if upload.filling.locked():
                upload.abandoned = True
            else:
                self._forget(key)
        self._pump()

    def tick(self) -> None:
        """Take back grants that move too slowly; their sites go to the end of the queue."""
        for table in (self._table, self._people):
            for grant in table.overdue():
                ask = grant.ask
                what = f"{ask.site} moved less than {grant.min_bytes_per_s} bytes a second: the transfer is withdrawn"
                log.warning("%s", what)
                self._tell_withdrawn(grant, Stale(what, site=ask.site, run=ask.subject.run, field="grant"))
                if table is self._table:
                    table.ask(ask)
        self._pump()

    # --- transfers of people ----------------------------------------------------------------------------------------

    def grant_upload(self, name: str, run: str, num_bytes: int) -> pb.Grant:
        """Leave for a person to upload version 0 of a run.

        Raises:
            Unavailable: the server goes down.
        """
        if self.under_way.closed:
            raise going_down(run)
        self._people.ask(Ask(site=name, subject=Subject(direction="up", run=run), num_bytes=num_bytes))
        return self._people.admit()[0].to_message()

    async def grant_download(self, name: str, run: str, models: RunModels, version: int) -> pb.Grant:
        """Leave for a person to download a version, in full.

        Raises:
            Unknown: the version is not there.
            Unavailable: the server goes down.
        """
        if self.under_way.closed:
            raise going_down(run)
        source = await asyncio.to_thread(models.stored, version)
        subject = Subject(direction="down", run=run, version=version, payload="model")
        self._people.ask(await self._download_ask(name, subject, source, 0))
        return self._people.admit()[0].to_message()

    # --- calls ------------------------------------------------------------------------------------------------------

    async def upload(self, grant_id: str, receive: Receive, sinks: Sinks) -> TransferStatus:
        """Takes in a granted upload of the present caller.

        Args:
            receive: brings the bytes into a slot, and tells how far it is.
            sinks: where version 0 of a run goes, for uploads by people.

        Raises:
            Stale, NotAllowed: the grant is over, or another's.
            Unavailable: the server goes down.
            RemoteError: what `receive` raises.
        """
        caller = current_caller.get()
        if caller.role != "site":
            return await self._upload_model(receive, caller.name, grant_id, sinks)
        grant = self._table.find(grant_id, caller.name, "up")
        upload = self._uploads[caller.name, grant.ask.subject]
        assert upload.slot is not None  # given with the grant
        try:
            async with upload.filling:
                async with self._receiving(self._table, grant, upload.slot) as moved:
                    status = await receive(upload.slot, moved)
                upload.settling = status.complete
        finally:
            if upload.abandoned:
                self._forget((caller.name, grant.ask.subject))
            self._pump()
        if status.complete:
            self.under_way.work(caller.name, self._settle(upload))
        return status

    @asynccontextmanager
    async def sending(self, grant_id: str, offset: int) -> AsyncIterator[tuple[Pieces, Moved]]:
        """A granted download of the present caller, from byte `offset` on; gives what is to be sent, and what is told
        how far that is.

        Raises:
            Stale, NotAllowed: the grant is over, or another's; or the offset is beyond the end.
            Unavailable: the server goes down.
        """
        caller = current_caller.get()
        table = self._table if caller.role == "site" else self._people
        grant = table.find(grant_id, caller.name, "down")
        source = self._downloads[grant.ask.subject]
        counted = self._bytes[grant.ask.subject.run]
        before = offset

        def moved(position: int) -> None:
            nonlocal before
            table.progress(grant.id, position)
            counted[1] += position - before
            before = position

        try:
            async with self.under_way.call(grant):
                yield self._pieces(source, grant, offset), moved
        finally:
            table.finish(grant.id)
            self._pump()

    def _pieces(self, source: Outgoing, grant: Grant, offset: int) -> Pieces:
        checksums = self._checksums.setdefault(source, {})
        while len(self._checksums) > KEPT_CHECKSUMS:
            self._checksums.pop(next(iter(self._checksums)))
        return Pieces(source.path, source.data_offset, grant.ask.num_bytes, offset, checksums=checksums)

    async def _upload_model(self, receive: Receive, name: str, grant_id: str, sinks: Sinks) -> TransferStatus:
        grant = self._people.find(grant_id, name, "up")
        sink = sinks(grant.ask.subject.run)
        async with self._receiving(self._people, grant, sink.slot) as moved:
            status = await receive(sink.slot, moved)
            self._people.finish(grant.id)  # nothing moves any more: its pace is not looked at
            if status.complete:
                await sink.complete()
        return status

    @asynccontextmanager
    async def _receiving(self, table: GrantTable, grant: Grant, slot: StagingSlot) -> AsyncIterator[Moved]:
        """A call that fills a slot; gives what is told how far it is."""
        counted, before = self._bytes[grant.ask.subject.run], slot.received_bytes

        def moved(received: int) -> None:
            nonlocal before
            counted[0], before = counted[0] + max(0, received - before), received
            table.progress(grant.id, received)
            self._on_step(Step.RECEIVING, grant.ask.subject.run)

        try:
            async with self.under_way.call(grant):
                yield moved
        finally:
            counted[0] += max(0, slot.received_bytes - before)
            table.finish(grant.id)

    async def _settle(self, upload: _Upload) -> None:
        """Hand a whole object on, then free its slot. What is wrong with it is told by whoever takes it."""
        assert upload.slot is not None
        try:
            await upload.whole(upload.slot.view)
        except RemoteError as error:
            log.warning("%s", error.message)
        finally:
            self._forget((upload.ask.site, upload.ask.subject))
            self._pump()

    # --- admission --------------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Grant what there is room for."""
        if self.under_way.closed:
            return
        for grant in self._table.admit(self._pool.num_free + len(self._idle())):
            ask = grant.ask
            message = grant.to_message()
            if ask.subject.direction == "up":
                try:
                    message.offset = self._slot_of(ask).received_bytes
                except DiskFull as error:
                    log.error("no room for an update of %s, tried again every second: %s", ask.site, error)
                    self._table.finish(grant.id)
                    asyncio.get_running_loop().call_later(1.0, self._ask_again, ask)
                    continue
            self._send(ask.site, grant=message)
            self._on_step(Step.GRANTED, ask.subject.run)

    def _ask_again(self, ask: Ask) -> None:
        if (ask.site, ask.subject) in self._uploads:
            self._table.ask(ask)
            self._pump()

    def _slot_of(self, ask: Ask) -> StagingSlot:
        """The slot of an upload that was admitted: its own, or a free one, or one that nobody is filling."""
        key = (ask.site, ask.subject)
        upload = self._uploads.pop(key)
        self._uploads[key] = upload  # now the one used last
        if upload.slot is None:
            if not self._pool.num_free:
                idle = self._idle()[0]  # `_pump` admits no more than there are
                assert idle.slot is not None
                self._pool.release(idle.slot)
                idle.slot = None
            upload.slot = self._pool.acquire()
            upload.slot.begin(ask.num_bytes, upload.crc32, f"update of {ask.site}, task {ask.subject.task}")
        return upload.slot

    def _idle(self) -> list[_Upload]:
        """Uploads whose slot nobody is filling or reading, the one not used for longest first."""
        active = {(grant.ask.site, grant.ask.subject) for grant in self._table.active()}
        return [
            upload
            for key, upload in self._uploads.items()
            if upload.slot is not None and not upload.settling and not upload.filling.locked() and key not in active
        ]

    async def _download_ask(self, name: str, subject: Subject, source: Outgoing, offset: int) -> Ask:
        if source not in self._crc32s:
            while len(self._crc32s) >= KEPT_CHECKSUMS:
                self._crc32s.pop(next(iter(self._crc32s)))
            self._crc32s[source] = await asyncio.to_thread(source.crc32)
        self._downloads[subject] = source
        crc32 = self._crc32s[source]
        return Ask(site=name, subject=subject, num_bytes=source.num_bytes, offset=offset, crc32=crc32)

    # --- endings ----------------------------------------------------------------------------------------------------

    def _forget(self, key: tuple[str, Subject]) -> None:
        upload = self._uploads.pop(key, None)
        if upload is not None and upload.slot is not None:
            self._pool.release(upload.slot)

    def _end_running(self, site: str, subject: Subject) -> None:
        for grant in self._table.active():
            if (grant.ask.site, grant.ask.subject) == (site, subject):
                reason = Stale(f"{site} asked for this transfer anew", site=site, run=subject.run, field="grant")
                self.under_way.withdraw(grant.id, reason)

    def _tell_withdrawn(self, grant: Grant, reason: RemoteError) -> None:
        self.under_way.withdraw(grant.id, reason)
        self._send(grant.ask.site, grant_withdrawn=pb.GrantWithdrawn(grant=grant.id, reason=to_detail(reason)))

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
