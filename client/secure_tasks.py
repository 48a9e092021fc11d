"""Sessions of secure aggregation at this site, on their way between the server, the disk and the workers.

The steps of one task are done one after the other, those of different tasks side by side. Nothing of a session is kept
here but what lies on the disk too (`secure_session.py`), so the agent may end at any moment. An answer that a broken
stream has lost is asked for again by the server.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Protocol

from atoll.client.party import Agreed, Party
from atoll.client.policy import consent_to_session
from atoll.client.refusal import as_refusal
from atoll.client.revealed import RevealedBook
from atoll.client.secure_session import SecureSession
from atoll.client.work import DISK_PATIENCE_S
from atoll.client.workplace import Workplace
from atoll.cluster.messages import Mask, Masked
from atoll.privacy.secagg.agreement import Terms
from atoll.transport.identity import Identity
from atoll.transport.tasks import Key
from atoll.wire import control_pb2 as pb
from atoll.wire.errors import AtollError, DiskFull, Unknown, to_detail
from atoll.wire.members_pb2 import MemberList

_log = logging.getLogger(__name__)


class SecureWork(Protocol):
    """A run of this site, as far as its sessions need it (`work.RunWork`)."""

    async def agreed(self) -> Agreed:
        """What the site has agreed to. Raises RemoteError where it does so no more."""
        ...

    async def mask(self, request: Mask) -> Masked:
        """The worker's part of a session."""
        ...


class SecureTasks:
    """The sessions of all updates that this site holds."""

    def __init__(
        self,
        place: Workplace,
        identity: Identity | None,
        members: Callable[[], MemberList | None],
        *,
        work_of: Callable[[str], SecureWork | None],
    ) -> None:
        home, site = place.home, place.settings.site.name

        def consent(run: str, terms: Terms) -> bool:
            return consent_to_session(home.policy, terms.plan, site=site, run=run)

        self._party = Party(
            name=site,
            signing=identity.signing_key if identity is not None else None,
            members=members,
            sealer=place.sealer,
            book=RevealedBook(home.revealed, place.sealer),
            consent=consent,
        )
        self._outbox, self._deliveries, self._mailbox = place.outbox, place.deliveries, place.mailbox
        self._spawn, self._board = place.spawn, place.board
        self._work_of = work_of
        self._sessions: dict[Key, SecureSession] = {}
        self._waiting: dict[Key, deque[pb.SecureStep]] = {}
        place.deliveries.on_broken = self._say_input_again

    def take(self, step: pb.SecureStep) -> None:
        """Do a step when those before it, of the same task, are done. Raises Malformed where the key is none."""
        key = Key.of(step.key)
        if key in self._waiting:
            self._waiting[key].append(step)
            return
        self._waiting[key] = deque([step])
        self._spawn(self._work(key))

    async def _work(self, key: Key) -> None:
        waiting = self._waiting[key]
        try:
            while waiting:
                step = waiting[0]
                answer = await self._do(key, step)
                if answer is not None:
                    self._mailbox.post(secure_answer=answer)
                waiting.popleft()
        finally:
            del self._waiting[key]

    async def _do(self, key: Key, step: pb.SecureStep) -> pb.SecureAnswer | None:
        try:
            work, session = self._work_of(key.run), await self._session(key)
            if step.WhichOneof("step") == "end":
                if session is not None:
                    await asyncio.to_thread(session.end, step)
                return None
            if work is None or session is None:
                raise Unknown(f"this site holds no update of task {key}", run=key.run, field="key")
            found = await self._said(key, step, session, work)
            if found is not None and found.WhichOneof("answer") == "input" and session.declared is not None:
                self._outbox.attach(key, session.declared[0])
            return found
        except AtollError as error:
            _log.error("task %s, session %d: %s", key, step.session, error)
            if step.WhichOneof("step") == "end":
                return None
            refusal = as_refusal(error, site=self._party.name, run=key.run)
            return pb.SecureAnswer(key=step.key, session=step.session, refused=to_detail(refusal))

    async def _session(self, key: Key) -> SecureSession | None:
        """The session of a task whose result is durable here; None where there is no such result."""
        if self._outbox.result(key) is None:
            self._sessions.pop(key, None)
            return None
        await self._deliveries.until_kept(key)
        if key not in self._sessions:
            self._sessions = {known: one for known, one in self._sessions.items() if self._outbox.result(known)}
            folder = self._outbox.folder(key)
            self._sessions[key] = await asyncio.to_thread(SecureSession, key, folder, self._party)
        return self._sessions[key]

    async def _said(
        self, key: Key, step: pb.SecureStep, session: SecureSession, work: SecureWork
    ) -> pb.SecureAnswer | None:
        """What this site says to a step. A full disk is waited out, until the server has gone on without this site."""
        held_up = False
        while True:
            try:
                found = await asyncio.to_thread(session.take, step, await work.agreed())
                if isinstance(found, Mask):
                    found = await self._masked(session, step, found, work)
            except DiskFull as error:
                if self._is_overtaken(key, step):
                    return await asyncio.to_thread(session.leave, step, error)
                _log.error("task %s, session %d waits for disk space: %s", key, step.session, error)
                self._board.held_up(key.run, f"waits for disk space: {error}")
                held_up = True
                await asyncio.sleep(DISK_PATIENCE_S)
                continue
            if held_up:
                self._board.idle(key.run)
            return found

    @staticmethod
    async def _masked(session: SecureSession, step: pb.SecureStep, order: Mask, work: SecureWork) -> pb.SecureAnswer:
        """Raises DiskFull: the same order gives the same bytes later."""
        try:
            masked = await work.mask(order)
        except DiskFull:
            raise
        except AtollError as error:
            return await asyncio.to_thread(session.leave, step, error)
        return await asyncio.to_thread(session.masked, step, masked)

    def _is_overtaken(self, key: Key, step: pb.SecureStep) -> bool:
        """Whether the server has ended the session of a step since, or begun another one."""
        later = list(self._waiting[key])[1:]
        return any(other.session != step.session or other.WhichOneof("step") == "end" for other in later)

    def _say_input_again(self, key: Key) -> None:
        """The server grants the upload anew."""
        session = self._sessions.get(key)
        if session is not None and session.declared is not None:
            self._mailbox.post(secure_answer=session.declared[1])
