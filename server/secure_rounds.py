"""The sessions of a run: one for each cohort of a closing round that has a sum of its own, all of a round side by side.

Invariants. A session's number is in the journal before its plan leaves. The cohorts of a round have no site in common, so
none is in two sums over one version (docs/decisions/0013). Where no session of a cohort comes to a sum, the run ends and
says why; a region's run goes on without its part of the round.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from typing import TYPE_CHECKING

from atoll.privacy.secagg.agreement import Opening, Own, agree
from atoll.server import secured
from atoll.server.events import Broken
from atoll.server.round import Round, Secured
from atoll.server.secure_events import GivenUp, SessionFailed, SessionOpened, Unmasked
from atoll.server.secure_held import REASON_CHARACTERS, HeldSession, Upload, journalled
from atoll.server.secure_pipeline import SecurePipeline
from atoll.server.secure_session import SecureSession
from atoll.server.store import Store
from atoll.server.surroundings import Surroundings
from atoll.wire import control_pb2 as pb
from atoll.wire import secure_pb2
from atoll.wire.errors import ConfigError, RemoteError, TooFewSites
from atoll.wire.members_pb2 import ACTIVE, MemberList, SignedMemberList

if TYPE_CHECKING:
    from atoll.server.driver import RunDriver

log = logging.getLogger(__name__)


class SecureRounds:
    """Makes the sums of a run's closing rounds, one round after the other."""

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
        self._digests: dict[tuple[int, int | None], str] = {}  # of versions, and of each group's form of them
        self._closing = asyncio.Event()
        self._held: list[HeldSession] = []  # of the round that is closing; those with a sum until its commit

    # --- from outside -----------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """A round is closing."""
        self._closing.set()

    def look(self) -> None:
        """The run has changed."""
        for held in self._held:
            held.look()

    def resend(self, site: str) -> None:
        """A site is there again: what is awaited of it is told again."""
        for held in self._held_with(site):
            held.resend(site)

    def gone(self, site: str, reason: str) -> None:
        """A site is not coming back: nobody waits for it."""
        for held in self._held_with(site):
            held.drop(site, reason)

    def committed(self, version: int) -> None:
        """The sums are in a version: nothing of their sessions is needed any more."""
        for held in [held for held in self._held if held.is_done]:
            held.end(secure_pb2.SecureEnd(version=version))
            self._held.remove(held)
        self._closing.set()  # a round that has closed meanwhile is next

    def answered(self, site: str, answer: pb.SecureAnswer) -> None:
        """A word of a site."""
        for held in self._held_with(site):
            held.hear(site, answer)

    def _held_with(self, site: str) -> list[HeldSession]:
        return [held for held in self._held if held.takes_in(site)]

    # --- rounds -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """For the life of the run."""
        try:
            while True:
                await self._closing.wait()
                self._closing.clear()
                while (round_ := self._driver.state.first_closing()) is not None and not self._work.is_whole(round_):
                    parts = self._work.without_sum(round_)
                    if not parts:
                        break  # what a region has sent is lacking still, and comes without a session
                    self._forget_others(round_.number)
                    async with asyncio.TaskGroup() as group:
                        for part in parts:
                            group.create_task(self._make_sum(round_.number, part))
        except ExceptionGroup as errors:
            self._break(errors.exceptions[0])
        except Exception as error:  # noqa: BLE001  the run ends with it, and says so
            self._break(error)

    def _forget_others(self, number: int) -> None:
        """Ends sessions of rounds that came to nothing after their sums were there."""
        for held in [held for held in self._held if held.round != number]:
            held.end(secure_pb2.SecureEnd(reason=f"round {held.round} is not waited for any more"))
            self._held.remove(held)

    def _break(self, error: Exception) -> None:
        log.error("run %s: a session of secure aggregation cannot go on", self._driver.run, exc_info=error)
        self._driver.tell(Broken(reason=f"{type(error).__name__}: {error}"))

    async def _make_sum(self, number: int, part: int) -> None:
        """One session after the other, until one comes to a sum, none further can be, or the round is open again."""
        while (round_ := self._driver.state.rounds.get(number)) is not None and round_.closing:
            known = round_.secured.get(part, Secured())
            if len(known.failed) >= self._section.attempts:
                text = (
                    f"round {number}: none of {len(known.failed)} sessions of secure aggregation came to its end, so "
                )
                reason = f"{text}nothing is published; the last one: {known.failed[-1]}"
                await journalled(self._driver, GivenUp(round=number, reason=reason))
                return
            try:
                held = await self._begun(round_, part, known)
            except (ConfigError, RemoteError) as error:
                reason = f"round {number}: no session of secure aggregation can be held: {error}"
                await journalled(self._driver, GivenUp(round=number, reason=reason))
                return
            if held is None or await self._sum_of(round_, part, held):
                return

    async def _sum_of(self, round_: Round, part: int, held: HeldSession) -> bool:
        """Whether the session came to a sum, which the pipeline then has."""
        number = round_.number
        self._held.append(held)
        try:
            total, counted, sites, liars = await held.hold()
        except RemoteError as error:
            reason = error.message[:REASON_CHARACTERS]
            log.warning("run %s: %s", self._driver.run, reason)
            await journalled(self._driver, SessionFailed(round=number, session=held.number, reason=reason, part=part))
            self._held.remove(held)
            held.end(secure_pb2.SecureEnd(reason=reason))
            return False
        if number not in self._driver.state.rounds:
            return True  # the run was stopped meanwhile
        self._work.put(number, part, total)
        parts = self._work.parts(round_)
        event = Unmasked(
            round=number,
            session=held.number,
            sites=sites,
            weight=counted.weight,
            metrics=counted.metrics,
            liars=liars,
            part=part,
            num_parts=len(parts),
            dropped=tuple(sorted(set(parts[part]) & set(round_.closing) - set(sites))),
        )
        await journalled(self._driver, event)
        return True

    async def _begun(self, round_: Round, part: int, known: Secured) -> HeldSession | None:
        """The session that a journal tells of, or the next one; None where the round is open again."""
        members = await self._members()
        if known.opening and known.said:
            opening = Opening.decode(known.opening.encode())
            if opening.member_list_version == members.version:
                terms = agree(opening, self._own(round_, members))
                log.info("run %s: session %d of round %d goes on", self._driver.run, opening.session, round_.number)
                return self._hold(round_, part, SecureSession.unpack(terms, known.said))
        opening = await self._opening(round_, part, known, members)
        terms = agree(opening, self._own(round_, members))
        self._work.session_opened(round_, part, opening)
        event = SessionOpened(
            round=round_.number, session=opening.session, opening=opening.canonical().decode(), part=part
        )
        await journalled(self._driver, event)
        now = self._driver.state.rounds.get(round_.number)
        if now is None or part not in now.secured or now.secured[part].session != opening.session:
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
        return self._hold(round_, part, SecureSession(terms=terms))

    def _hold(self, round_: Round, part: int, session: SecureSession) -> HeldSession:
        run, terms = self._driver.run, session.terms
        updates = {site: round_.updates[site] for site in terms.opening.sites}
        self._work.session_opened(round_, part, terms.opening)
        return HeldSession(
            self._driver,
            self._around,
            self._upload,
            round_=round_.number,
            part=part,
            session=session,
            keys={
                site: pb.TaskKey(run=run, task=update.task, attempt=update.attempt) for site, update in updates.items()
            },
            total=self._work.new_sum(round_, terms),
        )

    async def _opening(self, round_: Round, part: int, known: Secured, members: MemberList) -> Opening:
        """What the server decides of the next session: whose updates, and what they are the difference to."""
        active = {member.site for member in members.members if member.status == ACTIVE}
        own = set(self._work.parts(round_)[part]) & set(round_.closing)
        there = {site for site in own if site in self._driver.state.members and site in active}
        sites = secured.roster(known, there)
        if not sites:
            raise TooFewSites("none of the sites whose updates are in is there any more", round=round_.number)
        used = {round_.base_version - round_.staleness(site) for site in sites}
        digests = {version: await self._digest(version, sites[0]) for version in sorted(used)}
        return secured.opening(round_, part, sites, run=self._driver.run, members=members.version, digests=digests)

    def _own(self, round_: Round, members: MemberList) -> Own:
        return Own(
            job=self._driver.job,
            app_hash=self._app_hash,
            schema_hash=self._driver.manifest.schema_hash,
            num_values=self._work.layout_of(round_.number).num_values,
            num_factors=len(self._work.factors_of(round_.number)),
            members=members,
        )

    async def _members(self) -> MemberList:
        signed = await asyncio.to_thread(self._store.member_list)
        if signed is None:
            raise TooFewSites("the federation has no signed member list", field="member_list")
        return MemberList.FromString(SignedMemberList.FromString(signed).member_list)

    async def _digest(self, version: int, site: str) -> str:
        """Of the data of a version as a site, and all of its cohort, has it."""
        key = (version, self._driver.state.branch_of(self._driver.plan, site, version))
        if key not in self._digests:
            self._digests[key] = await asyncio.to_thread(self._hashed, *key)
        return self._digests[key]

    def _hashed(self, version: int, branch: int | None) -> str:
        with self._driver.models.open(version, branch) as model:
            return hashlib.sha256(model.map).hexdigest()
