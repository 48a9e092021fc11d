"""One session of secure aggregation that is under way: who is told what, who is waited for, and what comes of it.

Invariants. Survivors are in the journal, with all that was said, before they are told. Nothing but a sum over at least
as many sites as the job says is ever read. Sessions over other sites of the same round are none of its business.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from atoll.privacy.secagg.aggregator import Unmasking
from atoll.privacy.secagg.agreement import Counted, payload_name
from atoll.server.events import RunEvent
from atoll.server.masked_sum import MaskedSum
from atoll.server.secure_events import SurvivorsFixed
from atoll.server.secure_session import At, SecureSession
from atoll.server.surroundings import Surroundings
from atoll.server.transfers import Whole
from atoll.wire import control_pb2 as pb
from atoll.wire import secure_pb2
from atoll.wire.errors import RemoteError, TooFewSites, Unavailable, from_detail

if TYPE_CHECKING:
    from atoll.server.driver import RunDriver

log = logging.getLogger(__name__)

REASON_CHARACTERS = 2000


class Upload(Protocol):
    """Queues the upload of a payload of a site (`Transfers.ask_up`)."""

    def __call__(self, site: str, key: pb.TaskKey, payload: pb.Payload, whole: Whole) -> None: ...


class HeldSession:
    """A session from its plan to the sum of its survivors."""

    def __init__(
        self,
        driver: RunDriver,
        around: Surroundings,
        upload: Upload,
        *,
        round_: int,
        part: int,
        session: SecureSession,
        keys: Mapping[str, pb.TaskKey],
        total: MaskedSum,
    ) -> None:
        """`keys` are those of the updates of the roster, by site; `part` is the cohort of the round that this is of."""
        section = driver.job.secure_aggregation
        assert section is not None  # the run is one with secure aggregation
        self._deadline_s = section.deadline
        self._driver, self._around, self._upload = driver, around, upload
        self.round, self._part = round_, part
        self._now = session
        self._keys = keys
        self._total: MaskedSum | None = total
        self._changed = asyncio.Event()
        self._adding = asyncio.Lock()  # held while an input is added to the sum, and while its phase is closed
        self.is_done = False  # its sum is unmasked

    @property
    def number(self) -> int:
        """Attempt in its part of the round, from 1."""
        return self._now.terms.opening.session

    def takes_in(self, site: str) -> bool:
        """Whether a site is one of its roster."""
        return site in self._keys

    # --- from outside -----------------------------------------------------------------------------------------------

    def look(self) -> None:
        """The run has changed: its round may be gone."""
        self._changed.set()

    def resend(self, site: str) -> None:
        """Tells a site what is awaited of it."""
        for step in self._now.steps_for(self._now.terms.index(site)):
            self._send(site, **step)

    def drop(self, site: str, reason: str) -> None:
        """Nobody waits for a site any more."""
        index = self._now.terms.index(site)
        if self.is_done or index in self._now.out:
            return
        log.warning("run %s: %s drops out of the session: %s", self._driver.run, site, reason)
        self._now = self._now.without(index, reason[:REASON_CHARACTERS])
        self._changed.set()

    def hear(self, site: str, answer: pb.SecureAnswer) -> None:
        """A word of a site. One that does not hold costs it its part in the session, and nothing else."""
        if self.is_done or answer.session != self.number or answer.key != self._keys[site]:
            return
        try:
            match answer.WhichOneof("answer"):
                case "refused":
                    self.drop(site, f"refused: {from_detail(answer.refused).message}")
                case "input":
                    self._take_input(site, answer)
                case _:
                    self._now = self._now.take(self._now.terms.index(site), answer)
                    self._changed.set()
        except RemoteError as error:
            self.drop(site, f"sent what does not hold: {error.message}")

    def end(self, end: secure_pb2.SecureEnd) -> None:
        """Tells all of the roster that it is over; what comes still is not wanted."""
        for site in self._keys:
            self._send(site, end=end)
        self._total = None
        if not end.version:
            over = Unavailable(f"session {self.number} of round {self.round} is over", run=self._driver.run)
            for site in self._keys:
                self._around.withdraw_transfers(self._driver.run, site, over)

    # --- inputs -----------------------------------------------------------------------------------------------------

    def _take_input(self, site: str, answer: pb.SecureAnswer) -> None:
        session, index = self._now, self._now.terms.index(site)
        if session.at is not At.INPUTS or index in session.whole or index in session.out:
            return
        declared = answer.input.declared
        session.declared(index, declared)
        payload = pb.Payload(
            name=payload_name(self.number), num_bytes=session.terms.plan.num_bytes, crc32=answer.input.crc32
        )
        self._upload(site, answer.key, payload, self._taker(site, index, declared))
        self._changed.set()

    def _taker(self, site: str, index: int, declared: bytes) -> Whole:
        """Adds a masked input to the sum once all of its bytes are here."""

        async def take(masked: memoryview) -> None:
            digest = (await asyncio.to_thread(hashlib.sha256, masked)).digest()
            async with self._adding:
                total = self._total
                if total is None or index in self._now.whole:
                    return
                try:
                    self._now = self._now.take_input(index, declared, digest)
                except RemoteError as error:
                    self.drop(site, f"sent what does not hold: {error.message}")
                    return
                await asyncio.to_thread(total.add, masked)
            self._driver.summary.site_is(site, "accepted")
            self._changed.set()

        return take

    # --- phases -----------------------------------------------------------------------------------------------------

    async def hold(self) -> tuple[MaskedSum, Counted, tuple[str, ...], dict[str, str]]:
        """From the plan to the sum: it, what its exact lane says, whose it is, and who was found lying about what.

        Raises:
            RemoteError: it comes to nothing, and why.
        """
        while self._now.at is not At.UNMASKING:
            self._say_all()
            await self._wait(lambda: not self._now.awaited)
            fixed = self._now.fixed
            async with self._adding:
                self._now = self._now.close()
            if self._now.fixed and not fixed:
                said = self._now.pack()
                event = SurvivorsFixed(round=self.round, session=self.number, said=said, part=self._part)
                await journalled(self._driver, event)
            log.info("run %s: round %d waits for %s", self._driver.run, self.round, self._now.at.value)
        self._say_all()
        found = await self._unmasking()
        total, roster = self._total, self._now.terms.opening.sites
        assert total is not None  # nobody has ended it
        counted = await asyncio.to_thread(total.unmask, found.masks)
        self.is_done = True
        sites = tuple(roster[site] for site in sorted(self._now.surviving))
        return total, counted, sites, {roster[site]: what for site, what in found.liars.items()}

    async def _unmasking(self) -> Unmasking:
        while True:
            heard = len(self._now.said.unmasked)
            if self._now.may_unmask:
                try:
                    return await asyncio.to_thread(self._now.unmasking)
                except TooFewSites:
                    if not self._now.awaited:
                        raise
            elif not self._now.awaited:
                self._now = self._now.close()  # says how many are missing
            await self._wait(self._heard_more_than(heard))

    def _heard_more_than(self, num_sites: int) -> Callable[[], bool]:
        return lambda: len(self._now.said.unmasked) > num_sites or not self._now.awaited

    async def _wait(self, done: Callable[[], bool]) -> None:
        """Returns when it is done; who has not said a word, while no byte came either, for a deadline has dropped out.

        Raises:
            Unavailable: the round is gone.
        """
        received, _ = self._around.transferred(self._driver.run)
        while not done():
            if self.round not in self._driver.state.rounds:
                raise Unavailable(f"round {self.round} is not waited for any more", run=self._driver.run)
            self._changed.clear()
            try:
                async with asyncio.timeout(self._deadline_s):
                    await self._changed.wait()
            except TimeoutError:
                moved, _ = self._around.transferred(self._driver.run)
                if moved == received:
                    for site in sorted(self._now.awaited):
                        name = self._now.terms.opening.sites[site]
                        self.drop(name, f"silent for {self._deadline_s:g} s")
                received = moved

    # --- words ------------------------------------------------------------------------------------------------------

    def _say_all(self) -> None:
        for site in self._keys:
            self.resend(site)

    def _send(self, site: str, **step: object) -> None:
        message = pb.SecureStep(key=self._keys[site], session=self.number, **step)  # type: ignore[arg-type]
        self._around.send(site, secure_step=message)


async def journalled(driver: RunDriver, event: RunEvent) -> None:
    """Returns when the event is in the journal and applied; nothing of it is acted on yet."""
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def then() -> None:
        if not done.done():
            done.set_result(None)

    driver.tell(event, then)
    await done
