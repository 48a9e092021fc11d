"""The server's middle: brings together the attached sites, the open runs and the transfers. One event loop, no locks.

Nothing here decides anything about a run: sites' words become events for its driver, and the driver's wishes become
messages. What must survive a crash is in the journal; all that is kept here is made anew when sites attach.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection
from contextlib import suppress
from typing import Any

from atoll.server.driver import RunDriver
from atoll.server.evaluator import Evaluator
from atoll.server.events import TaskLost
from atoll.server.meetings import Meetings
from atoll.server.membership import Leases
from atoll.server.offers import Offers, Wanted
from atoll.server.open_runs import OpenRuns
from atoll.server.regions import is_region, joined_event
from atoll.server.relays import Relays
from atoll.server.results import Results
from atoll.server.round import Metrics
from atoll.server.security import as_remote
from atoll.server.sessions import Session, Sessions
from atoll.server.settings import ServerFolder, ServerSettings
from atoll.server.steps import Observer, Step, unobserved
from atoll.server.store import Store
from atoll.server.transfers import Transfers
from atoll.server.unfit import refuse_unfit
from atoll.wire import control_pb2 as pb
from atoll.wire import errors_pb2
from atoll.wire.errors import (
    AtollError,
    Malformed,
    RemoteError,
    Stale,
    Stranger,
    Unavailable,
    Unknown,
    from_detail,
    to_detail,
)
from atoll.wire.members_pb2 import ACTIVE, MemberList, SignedMemberList

log = logging.getLogger(__name__)

TICK_S = 1.0  # leases and grants are looked at this often; both are tens of seconds long
TRANSFERS_SHARE = 0.9  # of limits.drain_s; the rest is for the answers to those that have not ended


class Coordinator:
    """All that the services share."""

    def __init__(
        self,
        *,
        settings: ServerSettings,
        folder: ServerFolder,
        store: Store,
        evaluator: Evaluator | None = None,
        on_step: Observer = unobserved,
    ) -> None:
        self.settings = settings
        self.sessions = Sessions()
        self.transfers = Transfers(
            limits=settings.limits, staging=folder.staging, send=self.sessions.send, on_step=on_step
        )
        self.runs = OpenRuns(
            settings=settings,
            folder=folder,
            store=store,
            transfers=self.transfers,
            around=self,
            on_change=self._make_offers,
            on_step=on_step,
        )
        self._store = store
        self._evaluator = evaluator
        shared: dict[str, Any] = {"runs": self.runs, "sessions": self.sessions, "transfers": self.transfers}
        self._meetings = Meetings(**shared, relays=Relays(folder.relays, self.transfers))
        self._results = Results(**shared, meetings=self._meetings, on_step=on_step)
        self._on_step = on_step
        self._leases = Leases(settings.limits.lease_s)
        self._offers = Offers()
        self._active_sites: frozenset[str] = frozenset()  # those on the member list
        self._member_list: SignedMemberList | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._draining = False
        self._releases: set[asyncio.Future[None]] = set()  # evaluation workers on their way out

    # --- beginning and end ------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Go on with every run that was open when the server last ended."""
        await self._read_member_list()
        await self.runs.start()
        for driver in self.runs:
            for site in driver.state.members:  # each has a whole lease to come back in
                self._leases.heard(site, time.monotonic())
        self._ticker = asyncio.create_task(self._tick(), name="leases and grants")

    async def drain(self) -> None:
        """Let what is under way come to its end, end every stream in order, and stop; sites come back soon.

        Nothing is lost: all is journalled, and what `limits.drain_s` is too short for is sent again.
        """
        self._draining = True
        if self._ticker is not None:
            self._ticker.cancel()
        under_way, drain_s = self.transfers.under_way, self.settings.limits.drain_s
        under_way.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(TRANSFERS_SHARE * drain_s):
                await asyncio.gather(under_way.until_idle(), *(self._see_off(session) for session in self.sessions))
                await self.runs.at_rest()
        with suppress(TimeoutError):
            async with asyncio.timeout((1 - TRANSFERS_SHARE) * drain_s):
                await under_way.end_calls()
        for session in self.sessions:
            _end_in_order(session)
        await self.runs.close()
        self.transfers.close()
        if self._evaluator is not None:
            await self._evaluator.close()

    async def _see_off(self, session: Session) -> None:
        """A site that attaches anew would cut its transfer: its stream ends after that, and brings the verdict."""
        await self.transfers.under_way.until_idle(session.site)
        _end_in_order(session)

    async def _tick(self) -> None:
        last_s = time.monotonic()
        while True:
            await asyncio.sleep(TICK_S)
            # A server that was stopped or starved has heard nobody; without this its first look would drop every site.
            now_s = time.monotonic()
            self._leases.pass_over(max(0.0, now_s - last_s - TICK_S), now_s)
            last_s = now_s
            for site in self._leases.expired(now_s):
                silence = f"not heard for {self.settings.limits.lease_s:g} s"
                log.warning("%s is taken for gone: %s", site, silence)
                session = self.sessions.get(site)
                if session is not None:
                    session.end(Stale(f"{site} was {silence}: attach again", site=site))
                self._site_gone(site, silence)
            self.transfers.tick()

    # --- membership -------------------------------------------------------------------------------------------------

    async def members_changed(self) -> None:
        """A new member list is published: push it, and ask the new members to join what is open."""
        await self._read_member_list()
        for session in self.sessions:
            self._push_member_list(session, 0)
        self._make_offers()

    def revoked(self, name: str) -> None:
        """End the session of a revoked site at once; it is no member of any run any more."""
        self._active_sites -= {name}
        session = self.sessions.get(name)
        if session is not None:
            session.end(Stranger(f"{name} is revoked; ask the federation's operator", site=name))
        self._site_gone(name, "revoked")

    async def _read_member_list(self) -> None:
        signed = await asyncio.to_thread(self._store.member_list)
        if signed is None:
            return
        self._member_list = SignedMemberList.FromString(signed)
        members = MemberList.FromString(self._member_list.member_list).members
        self._active_sites = frozenset(member.site for member in members if member.status == ACTIVE)

    def _push_member_list(self, session: Session, known_version: int) -> None:
        if self._member_list is None:
            return
        if MemberList.FromString(self._member_list.member_list).version > known_version:
            session.send(member_list=self._member_list)

    def runs_of(self, site: str) -> list[str]:
        """Open runs that a site works on."""
        return [driver.run for driver in self.runs if site in driver.state.members]

    def last_heard_s(self, site: str) -> float | None:
        """Seconds since a site was last heard; None where it was not since the server started, or its lease ran out."""
        heard = self._leases.last_heard(site)
        return None if heard is None else time.monotonic() - heard

    # --- sites: attach, hear, detach --------------------------------------------------------------------------------

    async def attach(self, session: Session) -> None:
        """A site is there, perhaps again: tell it what it missed."""
        if self._draining:  # its Hello and the end of the server crossed each other
            _end_in_order(session)
            return
        site, hello = session.site, session.hello
        log.info("%s attached (%s)", site, hello.software[:40])
        self.sessions.attach(session)
        self._leases.heard(site, time.monotonic())
        self._offers.forget_site(site)
        self._push_member_list(session, hello.member_list_version)
        for run in hello.joined_runs:
            if run not in self.runs:
                await self._tell_ended(session, run)
        for driver in self.runs:
            await driver.started()
            self._catch_up(driver, site, hello)
        self._meetings.attached(session)
        self._make_offers()

    def _catch_up(self, driver: RunDriver, site: str, hello: pb.Hello) -> None:
        """Bring a site and a run that it was in back to one mind."""
        remembers = driver.run in hello.joined_runs
        if site in driver.state.members and not remembers:
            driver.site_gone(site, "it came back without the state that it had")
        elif site in driver.state.members:
            held = {(key.task, key.attempt) for key in hello.held_updates if key.run == driver.run}
            self._lose_what_is_gone(driver, site, held)
            driver.resend_tasks(site)
        elif site in driver.state.former and remembers:

            async def resend() -> None:
                driver.resend_tasks(site)

            driver.tell(driver.state.former[site], resend)

    def _lose_what_is_gone(self, driver: RunDriver, site: str, held: set[tuple[str, int]]) -> None:
        """Accepted updates that neither the server, since it restarted, nor the site has any more."""
        for round_ in driver.state.rounds.values():
            update = round_.updates.get(site)
            if update is None or site not in driver.pipeline.lacks(round_) or (update.task, update.attempt) in held:
                continue
            reason = "the site does not have its update any more"
            driver.tell(TaskLost(task=update.task, attempt=update.attempt, site=site, reason=reason))

    def detach(self, session: Session) -> None:
        """A stream ended. The site keeps its lease: it may be back in a moment."""
        if self.sessions.detach(session):
            log.info("%s detached", session.site)
            self._offers.forget_site(session.site)
            self._make_offers()

    async def hear(self, session: Session, message: pb.SiteMessage) -> None:
        """Take one message of a site.

        Raises:
            Malformed: it makes no sense here; the stream ends with it.
        """
        site = session.site
        self._leases.heard(site, time.monotonic())
        match message.WhichOneof("body"):
            case "heartbeat":
                pass
            case "offer_reply":
                self._offer_answered(session, message.offer_reply)
            case "progress":
                self._results.progress(site, message.progress)
            case "result":
                self._results.result(site, message.result)
            case "task_failed":
                self._results.failed(site, message.task_failed)
            case "fetch":
                await self._results.fetch(session, message.fetch)
            case "met_peer":
                self._meetings.met(site, message.met_peer)
            case "secure_answer":
                self._results.secure(site, message.secure_answer)
            case "leave_run":
                if (driver := self.runs.get(message.leave_run.run)) is not None:
                    driver.site_gone(site, from_detail(message.leave_run.reason).message or "it left the run")
            case body:
                raise Malformed(f"{site} sent {body or 'an unknown message'} out of place", site=site)

    def _site_gone(self, site: str, reason: str) -> None:
        self._leases.forget(site)
        self._offers.forget_site(site)
        for driver in self.runs:
            if site in driver.state.members:
                driver.summary.site_is(site, "gone", detail=reason)
                driver.site_gone(site, reason)
        self.transfers.withdraw(site, None, Unavailable(f"{site} is gone: {reason}", site=site))

    async def _tell_ended(self, session: Session, run: str) -> None:
        try:
            row = await asyncio.to_thread(self._store.run, run)
        except Unknown as error:
            session.send(run_ended=pb.RunEnded(run=run, status="failed", reason=to_detail(error)))
            return
        reason = errors_pb2.ErrorDetail.FromString(row.reason) if row.reason else None
        session.send(run_ended=pb.RunEnded(run=run, status=row.status, reason=reason))

    # --- offers -----------------------------------------------------------------------------------------------------

    def _make_offers(self) -> None:
        """Fill the free places of connected sites, oldest run first, and wake runs that have all answers."""
        if self._draining:  # sites that are being seen off have not given an answer
            return
        places = {
            session.site: session.hello.capacity.runs_at_once
            for session in self.sessions
            if session.site in self._active_sites and not session.ended
        }
        open_drivers = [driver for driver in self.runs if driver.takes_sites]
        refuse_unfit(open_drivers, self.sessions, self._offers)
        self._meetings.refuse_outsiders(open_drivers, self._offers)
        for run, site in self._offers.next(places, [_wanted(driver) for driver in open_drivers]):
            driver = self.runs.get(run)
            if driver is not None:
                driver.summary.site_is(site, "offered")
                self.sessions.send(site, run_offer=driver.offer())
                self._on_step(Step.OFFERED, run)
        for driver in open_drivers:
            if not self._offers.is_pending(driver.run):
                driver.nobody_left_to_ask()

    def _offer_answered(self, session: Session, reply: pb.OfferReply) -> None:
        site, driver = session.site, self.runs.get(reply.run)
        if driver is None or not self._offers.is_asked(reply.run, site):
            return
        if reply.WhichOneof("answer") == "accept":
            try:
                event = joined_event(session, reply.accept)
            except RemoteError as error:
                self._decline(driver, site, error.message)
                session.send(run_ended=pb.RunEnded(run=reply.run, status="failed", reason=to_detail(error)))
                return

            async def joined() -> None:
                driver.summary.site_is(site, "ready")
                self._offers.settled(reply.run, site)
                self._make_offers()
                driver.resend_tasks(site)  # that it had before it lost all that it knew

            driver.tell(event, joined)
            return
        self._decline(driver, site, from_detail(reply.decline).message or "it gave no reason")

    def _decline(self, driver: RunDriver, site: str, reason: str) -> None:
        log.warning("run %s: %s declined: %s", driver.run, site, reason)
        self._offers.declined(driver.run, site, reason)
        driver.summary.site_is(site, "declined", detail=reason)
        self._make_offers()

    # --- what drivers need (`surroundings.Surroundings`) ------------------------------------------------------------------

    def send(self, site: str, **body: object) -> None:
        self.sessions.send(site, **body)

    def withdraw_transfers(self, run: str, site: str | None, reason: RemoteError) -> None:
        self.transfers.withdraw(site, run, reason)

    def regions(self, sites: Collection[str]) -> tuple[str, ...]:
        attached = (session for session in self.sessions if is_region(session) and not session.ended)
        return tuple(sorted(session.site for session in attached if not sites or session.site in sites))

    def shortfall(self, run: str) -> str:
        driver = self.runs.get(run)
        if driver is None:
            return ""
        least = driver.plan.schedule.min_sites
        connected = self.sessions.by_site
        return self._offers.shortfall(_wanted(driver), least=least, connected=connected, known=self._active_sites)

    async def evaluate(self, run: str, version: int) -> Metrics:
        driver = self.runs.get(run)
        if self._evaluator is None or driver is None:
            raise Unknown("this server has no [apps] and [data] of its own to evaluate with", run=run)
        try:
            path = driver.models.path(version)
            return await self._evaluator.evaluate(run, driver.job, driver.manifest, version, path)
        except AtollError as error:
            raise as_remote(error) from None

    def transferred(self, run: str) -> tuple[int, int]:
        return self.transfers.transferred(run)

    def introduce(self, run: str) -> None:
        if (driver := self.runs.get(run)) is not None:
            self._meetings.introduce(driver)

    def run_ended(self, run: str) -> None:
        if self._evaluator is not None:
            release = asyncio.ensure_future(self._evaluator.release(run))
            self._releases.add(release)
            release.add_done_callback(self._releases.discard)
        self._offers.forget_run(run)
        self._meetings.run_ended(run)
        self.runs.ended(run)


def _wanted(driver: RunDriver) -> Wanted:
    return Wanted(run=driver.run, only=driver.only, members=frozenset(driver.state.members))


def _end_in_order(session: Session) -> None:
    session.send(drain=pb.Drain(reconnect_after_s=1))
    session.end()
