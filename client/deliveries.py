"""Results on their way out: offered, uploaded when the server grants it, dropped when it needs them no more.

Invariants. A result leaves the outbox only on the server's word (refused, released, committed) or with its run, so an
update is computed once however often connections, server and agent go down in between. The server never has all bytes
of an update that is not durable here, so what it has accepted can always be asked for again (docs/decisions/0006).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from atoll.client.attachment import Mailbox
from atoll.client.base_models import Spawn
from atoll.client.meeting import MODEL
from atoll.client.private_update import stays_here
from atoll.client.steps import Observer, Step
from atoll.transport.outbox import Outbox
from atoll.transport.reconnect import Backoff
from atoll.transport.tasks import Key
from atoll.transport.transfer import Carrier, upload
from atoll.wire import control_pb2 as pb
from atoll.wire.errors import LocalError, RemoteError, Unknown, from_detail, to_detail
from atoll.wire.frames import FRAME_BYTES

_log = logging.getLogger(__name__)


def is_model(result: pb.Result) -> bool:
    """Whether a result is the model of a site's own that its neighbours are given."""
    return any(payload.name == MODEL for payload in result.payloads)


class Deliveries:
    """The way of held results to the server."""

    def __init__(
        self,
        outbox: Outbox,
        *,
        mailbox: Mailbox,
        spawn: Spawn,
        carrier: Callable[[], Carrier],
        on_step: Observer,
    ) -> None:
        self._outbox = outbox
        self._mailbox = mailbox
        self._spawn = spawn
        self._carrier = carrier
        self._on_step = on_step
        self._said: set[Key] = set()  # results that the present stream has heard of
        self._uploads: dict[str, tuple[Key, asyncio.Task[None]]] = {}
        self._durable: dict[Key, asyncio.Event] = {}  # of results that uploads wait for
        self._backoff = Backoff()
        self._frame_bytes = FRAME_BYTES
        self.on_broken: Callable[[Key], None] = lambda key: None  # an upload of a masked input broke off

    def offer(self, result: pb.Result) -> None:
        """Say that a result is there; saying it again does no harm.

        A model for neighbours (gossip) is not uploaded, so it has to be durable before anybody counts on it.
        """
        if is_model(result) and not self._outbox.is_held(result.key):
            return
        self._said.add(Key.of(result.key))
        self._mailbox.post(result=result)

    def offer_all(self, max_frame_bytes: int) -> None:
        """Say on a new stream what is held; the grants of the old one are void.

        Args:
            max_frame_bytes: largest frame payload that the server takes.
        """
        self._frame_bytes = min(FRAME_BYTES, max_frame_bytes or FRAME_BYTES)
        self._stop_uploads()
        self._said.clear()
        for result in self._outbox.results():
            self.offer(result)

    def offer_if_held(self, key: Key) -> bool:
        """Say that the result of `key` is there, unless this stream has heard it; whether it is held."""
        result = self._outbox.result(key)
        if result is not None and key not in self._said:
            self.offer(result)
        return result is not None

    def kept(self, key: Key) -> None:
        """The result of `key` is durable: the end of its payloads may leave."""
        if (durable := self._durable.pop(key, None)) is not None:
            durable.set()
        if (result := self._outbox.result(key)) is not None and is_model(result):
            self.offer(result)

    async def until_kept(self, key: Key) -> None:
        """Returns once the result of `key` is durable."""
        if not self._outbox.is_held(key):
            await self._durable.setdefault(key, asyncio.Event()).wait()

    def granted(self, grant: pb.Grant) -> None:
        """Begin the upload that the server has room for; an earlier grant for the same result is void."""
        key = Key.of(grant.key)
        self._stop_uploads(key)
        self._uploads[grant.grant] = (key, self._spawn(self._upload(key, grant)))

    def withdrawn(self, grant: str) -> bool:
        """Stop the upload of a grant that was taken back and offer its result again; whether it was one of these."""
        found = self._uploads.pop(grant, None)
        if found is not None:
            found[1].cancel()
            self._spawn(self._offer_later(found[0]))
        return found is not None

    async def judged(self, verdict: pb.Verdict) -> None:
        """Do what a verdict asks: keep an accepted update, drop what is refused or needed no more."""
        key = Key.of(verdict.key)
        outcome = verdict.WhichOneof("outcome")
        self._on_step(Step.JUDGED, str(key))
        if outcome == "refused":
            _log.error("task %s: the server refuses the result: %s", key, from_detail(verdict.refused))
        held = self._outbox.result(key)
        if outcome == "accepted" and held is not None and (held.payloads or stays_here(self._outbox.folder(key))):
            self._backoff.reset()
            return
        self._stop_uploads(key)
        if await asyncio.to_thread(self._outbox.release, key):
            self._on_step(Step.RELEASED, str(key))

    async def committed(self, run: str, round_: int) -> None:
        """Drop the results of `run` up to and with a round that is durable at the server."""
        if await asyncio.to_thread(self._outbox.release_upto, run, round_):
            self._on_step(Step.RELEASED, run)

    async def drop(self, key: Key) -> None:
        """Drop the result of a task that nobody wants."""
        self._stop_uploads(key)
        self._durable.pop(key, None)
        await asyncio.to_thread(self._outbox.release, key)

    async def drop_run(self, run: str) -> None:
        """Drop all results of a run that has ended."""
        for key, upload_ in self._uploads.values():
            if key.run == run:
                upload_.cancel()
        self._durable = {key: durable for key, durable in self._durable.items() if key.run != run}
        await asyncio.to_thread(self._outbox.release_run, run)

    def close(self) -> None:
        """Stop all uploads; the results stay."""
        self._stop_uploads()

    def _stop_uploads(self, key: Key | None = None) -> None:
        for grant, (other, running) in list(self._uploads.items()):
            if key is None or other == key:
                running.cancel()
                del self._uploads[grant]

    async def _upload(self, key: Key, grant: pb.Grant) -> None:
        self._on_step(Step.GRANTED, str(key))
        try:
            path = self._outbox.payload_path(key, grant.payload)
        except LocalError as error:
            lost = Unknown(f"this site does not hold payload {grant.payload!r} of {key}: {error}", run=key.run)
            self._mailbox.post(task_failed=pb.TaskFailed(key=grant.key, error=to_detail(lost)))
            return
        try:
            status = await upload(
                self._carrier(),
                grant,
                path,
                frame_bytes=self._frame_bytes,
                before_last=lambda: self.until_kept(key),
            )
            complete, reason = status.complete, f"{status.received_bytes} of {grant.num_bytes} bytes arrived"
        except (RemoteError, LocalError) as error:
            complete, reason = False, str(error)
        self._uploads.pop(grant.grant, None)
        if complete:
            self._on_step(Step.UPLOADED, str(key))
            return
        _log.warning("task %s: upload of %r broke off, offering it again: %s", key, grant.payload, reason)
        await self._offer_later(key)

    async def _offer_later(self, key: Key) -> None:
        await asyncio.sleep(self._backoff.next_s())
        result = self._outbox.result(key)
        if result is not None and stays_here(self._outbox.folder(key)):
            self.on_broken(key)
            return
        # A server that has granted it anew meanwhile would take the offer for a wish to begin again.
        if result is not None and not any(other == key for other, _ in self._uploads.values()):
            self.offer(result)
