"""The sessions of a run: opens one when a round closes, passes on what its sites say, and takes the masks off the sum.

Invariants. A session's number is in the journal before its plan leaves, and its survivors, with all that was said, before
they are told. Nothing but a sum over at least as many sites as the job says is ever read; where no session of a round
comes to one, the run ends and says why.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from atoll.privacy.secagg.agreement import Opening, Own, Terms, agree, payload_name
from atoll.server.events import Broken, RunEvent
from atoll.server.masked_sum import MaskedSum
from atoll.server.round import Round, Secured
from atoll.server.secure_events import GivenUp, SessionFailed, SessionOpened, SurvivorsFixed, Unmasked
from atoll.server.secure_pipeline import SecurePipeline
from atoll.server.secure_session import At, SecureSession
from atoll.server.store import Store
from atoll.server.surroundings import Surroundings
from atoll.server.transfers import Whole
from atoll.wire import control_pb2 as pb
from atoll.wire import secure_pb2
from atoll.wire.errors import ConfigError, RemoteError, TooFewSites, Unavailable, from_detail
from atoll.wire.members_pb2 import ACTIVE, MemberList, SignedMemberList

if TYPE_CHECKING:
    from atoll.server.driver import RunDriver

log = logging.getLogger(__name__)

REASON_CHARACTERS = 2000


class Upload(Protocol):
    """Queues the upload of a payload of a site (`Transfers.ask_up`)."""

    def __call__(self, site: str, key: pb.TaskKey, payload: pb.Payload, whole: Whole) -> None: ...


class SecureRounds:
    """Makes the sums of a run's closing rounds, one after the other."""

    def __init__(
        self,
        driver: RunDriver,
        work: SecurePipeline,
        upload: Upload,
        store: Store,
        around: Surroundings,
        *,
        app_hash: str,
    ) -> None:
        section = driver.job.secure_aggregation
        assert section is not None  # the run is one with secure aggregation
        self._section = section
        self._driver = driver
        self._work = work
        self._upload = upload
        self._store = store
        self._around = around
        self._app_hash = app_hash
        self._digests: dict[int, str] = {}  # of versions
        self._closing = asyncio.Event()
        self._changed = asyncio.Event()
        self._adding = asyncio.Lock()  # held while an input is added to the sum, and while its phase is closed
        self._session: SecureSession | None = None
        self._keys: dict[str, pb.TaskKey] = {}
        self._sum: MaskedSum | None = None

    # --- from outside -----------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """A round is closing."""
        self._closing.set()

    def resend(self, site: str) -> None:
        """A site is there again: what is awaited of it is told again."""
        if (index := self._index(site)) is not None:
            self._say(site, index)

    def gone(self, site: str, reason: str) -> None:
        """A site is not coming back: nobody waits for it."""
        self._drop(site, reason)

    def committed(self, version: int) -> None:
        """The sum is in a version: nothing of the session is needed any more."""
        if self._session is not None and self._sum is not None:
            self._end(secure_pb2.SecureEnd(version=version))

    def answered(self, site: str, answer: pb.SecureAnswer) -> None:
        """A word of a site. One that does not hold costs it its part in the session, and nothing else."""
        session, index = self._session, self._index(site)
        if session is None or index is None or answer.session != session.terms.opening.session:
            return
        if answer.key != self._keys[site]:
            return
        try:
            match answer.WhichOneof("answer"):
                case "refused":
                    self._drop(site, f"refused: {from_detail(answer.refused).message}")
                case "input":
                    self._take_input(session, site, index, answer)
                case _:
                    self._session = session.take(index, answer)
                    self._changed.set()
        except RemoteError as error:
            self._drop(site, f"sent what does not hold: {error.message}")

    def _take_input(self, session: SecureSession, site: str, index: int, answer: pb.SecureAnswer) -> None:
        if session.at is not At.INPUTS or index in session.whole or index in session.out:
            return
        declared = answer.input.declared
        session.declared(index, declared)
        payload = pb.Payload(
            name=payload_name(session.terms.opening.session),
            num_bytes=session.terms.plan.num_bytes,
            crc32=answer.input.crc32,
        )
        self._upload(site, answer.key, payload, self._taker(site, index, declared))
        self._changed.set()

    def _taker(self, site: str, index: int, declared: bytes) -> Whole:
        """Adds a masked input to the sum once all of its bytes are here."""
        total = self._sum

        async def take(masked: memoryview) -> None:
            digest = (await asyncio.to_thread(hashlib.sha256, masked)).digest()
            async with self._adding:
                session = self._session
                if session is None or total is None or self._sum is not total or index in session.whole:
                    return
                try:
                    self._session = session.take_input(index, declared, digest)
                except RemoteError as error:
                    self._drop(site, f"sent what does not hold: {error.message}")
                    return
                await asyncio.to_thread(total.add, masked)
            self._driver.summary.site_is(site, "accepted")
            self._changed.set()

        return take

    # --- rounds -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """For the life of the run."""
        try:
            while True:
                await self._closing.wait()
                self._closing.clear()
                while (round_ := self._driver.state.first_closing()) is not None and not self._work.is_whole(round_):
                    await self._make_sum(round_)
        except Exception as error:
            log.exception("run %s: a session of secure aggregation cannot go on", self._driver.run)
            self._driver.tell(Broken(reason=f"{type(error).__name__}: {error}"))

    async def _make_sum(self, round_: Round) -> None:
        """One session; or the end of the run, where no further one can be."""
        known = round_.secured or Secured()
        number = round_.number
        if len(known.failed) >= self._section.attempts:
            text = f"round {number}: none of {len(known.failed)} sessions of secure aggregation came to its end, so "
            await self._told(
                GivenUp(round=number, reason=f"{text}nothing is published; the last one: {known.failed[-1]}")
            )
            return
        try:
            self._session = await self._begun(round_, known)
        except (ConfigError, RemoteError) as error:
            reason = f"round {number}: no session of secure aggregation can be held: {error}"
            await self._told(GivenUp(round=number, reason=reason))
            return
        if self._session is None:
            return
        session = self._session.terms.opening.session
        try:
            await self._hold(number)
        except RemoteError as error:
            reason = error.message[:REASON_CHARACTERS]
            log.warning("run %s: %s", self._driver.run, reason)
            await self._told(SessionFailed(round=number, session=session, reason=reason))
            over = Unavailable(f"session {session} of round {number} is over", run=self._driver.run, round=number)
            for site in self._keys:  # what they were still sending is not wanted
                self._around.withdraw_transfers(self._driver.run, site, over)
            self._end(secure_pb2.SecureEnd(reason=reason))

    async def _begun(self, round_: Round, known: Secured) -> SecureSession | None:
        """The session that a journal tells of, or the next one; None where the round is open again."""
        members = await self._members()
        if known.opening and known.said:
            opening = Opening.decode(known.opening.encode())
            if opening.member_list_version == members.version:
                self._prepare(round_, terms := agree(opening, self._own(members)))
                log.info("run %s: session %d of round %d goes on", self._driver.run, opening.session, round_.number)
                return SecureSession.unpack(terms, known.said)
        opening = await self._opening(round_, known, members)
        terms = agree(opening, self._own(members))
        self._prepare(round_, terms)
        await self._told(
            SessionOpened(round=round_.number, session=opening.session, opening=opening.canonical().decode())
        )
        now = self._driver.state.rounds.get(round_.number)
        if now is None or now.secured is None or now.secured.session != opening.session:
            self._work.drop(round_.number)  # an update was lost meanwhile, and the round is open again
            return None
        log.info(
            "run %s: session %d of round %d opens over %d sites; %d shares rebuild a secret",
            self._driver.run,
            opening.session,
            round_.number,
            terms.num_sites,
            terms.plan.parameters.threshold,
        )
        return SecureSession(terms=terms)

    def _prepare(self, round_: Round, terms: Terms) -> None:
        run = self._driver.run
        updates = {site: round_.updates[site] for site in terms.opening.sites if site in round_.updates}
        self._keys = {
            site: pb.TaskKey(run=run, task=update.task, attempt=update.attempt) for site, update in updates.items()
        }
        self._sum = MaskedSum(self._work.layout, terms)
        self._work.session_opened(round_, terms.opening)

    async def _opening(self, round_: Round, known: Secured, members: MemberList) -> Opening:
        """What the server decides of the next session: whose updates, and what they are the difference to."""
        active = {member.site for member in members.members if member.status == ACTIVE}
        there = {site for site in round_.closing if site in self._driver.state.members and site in active}
        if known.revealed and set(known.revealed) <= there:  # their sum may be known: no other one may be told apart
            there = set(known.revealed)
        bases = {site: base for site, base in round_.bases.items() if site in there and base < round_.base_version}
        used = {bases.get(site, round_.base_version) for site in there}
        if not there:
            raise TooFewSites("none of the sites whose updates are in is there any more", round=round_.number)
        return Opening(
            run=self._driver.run,
            round=round_.number,
            session=known.session + 1,
            sites=tuple(sorted(there)),
            member_list_version=members.version,
            max_weight=round_.max_weight,
            base_version=round_.base_version,
            bases=bases,
            digests={version: await self._digest(version) for version in sorted(used)},
        )

    def _own(self, members: MemberList) -> Own:
        return Own(
            job=self._driver.job,
            app_hash=self._app_hash,
            schema_hash=self._driver.manifest.schema_hash,
            num_values=self._work.layout.num_values,
            members=members,
        )

    async def _members(self) -> MemberList:
        signed = await asyncio.to_thread(self._store.member_list)
        if signed is None:
            raise TooFewSites("the federation has no signed member list", field="member_list")
        return MemberList.FromString(SignedMemberList.FromString(signed).member_list)

    async def _digest(self, version: int) -> str:
        if version not in self._digests:
            self._digests[version] = await asyncio.to_thread(self._hashed, version)
        return self._digests[version]

    def _hashed(self, version: int) -> str:
        with self._driver.models.open(version) as model:
            return hashlib.sha256(model.map).hexdigest()

    # --- one session ------------------------------------------------------------------------------------------------

    async def _hold(self, number: int) -> None:
        """From the plan to the sum. Raises RemoteError where it comes to nothing."""
        while self._now.at is not At.UNMASKING:
            self._say_all()
            await self._wait(lambda: not self._now.awaited)
            fixed = self._now.fixed
            async with self._adding:
                self._session = self._now.close()
            if self._now.fixed and not fixed:
                opening = self._now.terms.opening
                await self._told(SurvivorsFixed(round=number, session=opening.session, said=self._now.pack()))
            log.info("run %s: round %d waits for %s", self._driver.run, number, self._now.at.value)
        self._say_all()
        await self._unmask(number)

    async def _unmask(self, number: int) -> None:
        while True:
            heard = len(self._now.said.unmasked)
            if self._now.may_unmask:
                try:
                    found = await asyncio.to_thread(self._now.unmasking)
                    break
                except TooFewSites:
                    if not self._now.awaited:
                        raise
            elif not self._now.awaited:
                self._session = self._now.close()  # says how many are missing
            await self._wait(self._heard_more_than(heard))
        session, total = self._now, self._sum
        assert total is not None  # prepared with the session
        counted = await asyncio.to_thread(total.unmask, found.masks)
        roster = session.terms.opening.sites
        sites = tuple(roster[site] for site in sorted(session.surviving))
        if (round_ := self._driver.state.rounds.get(number)) is None:
            return  # the run was stopped meanwhile
        self._work.put(round_, total, sites)
        await self._told(
            Unmasked(
                round=number,
                session=session.terms.opening.session,
                sites=sites,
                weight=counted.weight,
                metrics=counted.metrics,
                liars={roster[site]: what for site, what in found.liars.items()},
            )
        )

    def _heard_more_than(self, num_sites: int) -> Callable[[], bool]:
        return lambda: len(self._now.said.unmasked) > num_sites or not self._now.awaited

    async def _wait(self, done: Callable[[], bool]) -> None:
        """Returns when it is done; who has not said a word, while no byte came either, for a deadline has dropped out."""
        received, _ = self._around.transferred(self._driver.run)
        while not done():
            self._changed.clear()
            try:
                async with asyncio.timeout(self._section.deadline):
                    await self._changed.wait()
            except TimeoutError:
                moved, _ = self._around.transferred(self._driver.run)
                if moved == received:
                    for site in sorted(self._now.awaited):
                        name = self._now.terms.opening.sites[site]
                        self._drop(name, f"silent for {self._section.deadline:g} s")
                received = moved

    # --- words ------------------------------------------------------------------------------------------------------

    @property
    def _now(self) -> SecureSession:
        assert self._session is not None  # one is held
        return self._session

    def _index(self, site: str) -> int | None:
        """A site's place in the roster of the session under way."""
        if self._session is None or site not in self._keys:
            return None
        return self._session.terms.index(site)

    def _drop(self, site: str, reason: str) -> None:
        index = self._index(site)
        if index is None or self._session is None or index in self._session.out:
            return
        log.warning("run %s: %s drops out of the session: %s", self._driver.run, site, reason)
        self._session = self._session.without(index, reason[:REASON_CHARACTERS])
        self._changed.set()

    def _say_all(self) -> None:
        for site in self._now.terms.opening.sites:
            self.resend(site)

    def _say(self, site: str, index: int) -> None:
        for step in self._now.steps_for(index):
            self._send(site, **step)

    def _send(self, site: str, **step: object) -> None:
        session = self._now.terms.opening.session
        message = pb.SecureStep(key=self._keys[site], session=session, **step)  # type: ignore[arg-type]
        self._around.send(site, secure_step=message)

    def _end(self, end: secure_pb2.SecureEnd) -> None:
        for site in self._keys:
            self._send(site, end=end)
        self._session, self._sum, self._keys = None, None, {}

    async def _told(self, event: RunEvent) -> None:
        """Returns when the event is in the journal and applied; nothing of it is acted on yet."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def then() -> None:
            if not done.done():
                done.set_result(None)

        self._driver.tell(event, then)
        await done
