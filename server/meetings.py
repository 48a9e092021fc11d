"""Gossip at the server: who takes part, who is introduced to whom, and what sites report of it.

Nothing here decides anything about a run: introductions say what its state says, whenever that has changed or a site
is back, and reports become its events. What is kept here (tokens of meetings) is made anew after a restart.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable

from atoll.aggregation.schedules.gossip import ZONE, Gossip, GossipState
from atoll.aggregation.schedules.links import Link, Way
from atoll.server.driver import RunDriver
from atoll.server.events import ModelKept, PeerMet, TaskLost
from atoll.server.messages import committed_message
from atoll.server.offers import Offers
from atoll.server.open_runs import OpenRuns
from atoll.server.relays import Relays
from atoll.server.sessions import Session, Sessions
from atoll.server.transfers import Transfers
from atoll.server.validate import MAX_WEIGHT
from atoll.transport.peers import MAX_CARD_BYTES
from atoll.wire import control_pb2 as pb
from atoll.wire.errors import BadUpdate, RemoteError, from_detail, to_detail
from atoll.wire.gossip_pb2 import ExchangeRecord, Introduction, MetPeer

log = logging.getLogger(__name__)

MODEL = "model"  # the payload of a training in gossip, which stays at its site


class Meetings:
    """The meetings of all open runs."""

    def __init__(self, *, runs: OpenRuns, sessions: Sessions, transfers: Transfers, relays: Relays) -> None:
        self._runs, self._sessions, self._transfers, self._relays = runs, sessions, transfers, relays
        self._tokens: dict[tuple[str, int, str, str], str] = {}  # by run, round and pair

    # --- who takes part ---------------------------------------------------------------------------------------------

    def refuse_outsiders(self, drivers: Iterable[RunDriver], offers: Offers) -> None:
        """Sites that are not in the zone of a run, or cannot meet others, are not asked to join it."""
        for driver in drivers:
            schedule = driver.plan.schedule
            if not isinstance(schedule, Gossip):
                continue
            for session in self._sessions:
                if reason := _outside(session, schedule.options.zone):
                    offers.declined(driver.run, session.site, reason)
                    driver.summary.site_is(session.site, "declined", detail=reason)

    # --- introductions ----------------------------------------------------------------------------------------------

    def introduce(self, driver: RunDriver, only: str = "") -> None:
        """Tell both ends of each pair that is not settled of each other; of those of one site, where it is named."""
        state = driver.state.schedule
        if not isinstance(state, GossipState):
            return
        self._relays.drop(driver.run, before=state.round)
        self._tokens = {key: t for key, t in self._tokens.items() if key[0] != driver.run or key[1] >= state.round}
        for link in state.links:
            if not link.over and (not only or only in link.pair):
                first, second = link.pair
                self._introduce_one(driver, state.round, link, first, second)
                self._introduce_one(driver, state.round, link, second, first)
        driver.summary.exchange_is(_record(state))

    def _introduce_one(self, driver: RunDriver, round_: int, link: Link, site: str, peer: str) -> None:
        own, other, there = driver.state.kept.get(site), driver.state.kept.get(peer), self._sessions.get(peer)
        if own is None or other is None or there is None:
            return  # said when the peer is back
        key = (driver.run, round_, *link.pair)
        introduction = Introduction(
            run=driver.run,
            round=round_,
            peer=peer,
            card=there.hello.card,
            meeting=self._tokens.setdefault(key, secrets.token_urlsafe(18)),
            calls=link.caller == site,
            relayed=link.tried.way is Way.RELAY,
            attempt=own.attempt,
            peer_attempt=other.attempt,
            num_bytes=driver.manifest.num_bytes,
            crc32=other.crc32,
            tried=len(link.tried.reasons),
        )
        self._sessions.send(site, introduction=introduction)

    def attached(self, session: Session) -> None:
        """A site is back, perhaps at another address, perhaps without its model: go on with its meetings."""
        held = {(key.run, key.task, key.attempt) for key in session.hello.held_updates}
        for driver in self._runs:
            model = driver.state.kept.get(session.site)
            if model is not None and (driver.run, model.task, model.attempt) not in held:
                reason = "the site does not have its model any more"
                driver.tell(TaskLost(task=model.task, attempt=model.attempt, site=session.site, reason=reason))
            else:
                self.introduce(driver, session.site)

    def run_ended(self, run: str) -> None:
        self._relays.drop(run)
        self._tokens = {key: token for key, token in self._tokens.items() if key[0] != run}

    # --- reports ----------------------------------------------------------------------------------------------------

    def met(self, site: str, report: MetPeer) -> None:
        """How it went with a neighbour. That one is unreachable who is not even attached is no news: it is tried again."""
        driver = self._runs.get(report.run)
        if driver is None:
            return
        received = report.WhichOneof("outcome") == "received"
        if not received and self._sessions.get(report.peer) is None:
            return
        reason = "" if received else from_detail(report.unreachable).message
        log.log(
            logging.INFO if received else logging.WARNING,
            "run %s, round %d: %s %s %s%s",
            driver.run,
            report.round,
            site,
            "has the model of" if received else "cannot reach",
            report.peer[:63],
            f": {reason}" if reason else "",
        )
        event = PeerMet(
            site=site,
            peer=report.peer,
            round=report.round,
            received=received,
            reason=reason[:500],
            tried=report.tried,
        )

        async def show() -> None:
            if isinstance(driver.state.schedule, GossipState):
                driver.summary.exchange_is(_record(driver.state.schedule))

        driver.tell(event, show)

    def model(self, driver: RunDriver, site: str, result: pb.Result) -> None:
        """A model is kept at a site, for its neighbours; the same word again asks whether it is to be relayed."""
        key, state = result.key, driver.state
        model, task = state.kept.get(site), state.tasks.get(key.task)
        if model is not None and (model.task, model.attempt) == (key.task, key.attempt):
            if self._relays.expects(key):
                self._ask_up(site, result)
            self._sessions.send(site, verdict=pb.Verdict(key=key, accepted=True))
            return
        if task is None or task.kind != "exchange" or (task.site, task.attempt) != (site, key.attempt):
            self._sessions.send(site, verdict=pb.Verdict(key=key, released=True))
            return
        try:
            _check(driver, site, result)
        except RemoteError as error:
            log.warning("run %s: the model %s of %s is refused: %s", driver.run, key.task, site, error.message)
            driver.tell(TaskLost(task=key.task, attempt=key.attempt, site=site, reason=error.message))
            self._sessions.send(site, verdict=pb.Verdict(key=key, refused=to_detail(error)))
            return
        event = ModelKept(
            task=key.task, attempt=key.attempt, site=site, round=task.round, crc32=result.payloads[0].crc32
        )

        async def told() -> None:
            driver.summary.site_is(site, "trained")
            self._sessions.send(site, verdict=pb.Verdict(key=key, accepted=True))
            self._sessions.send(site, committed=committed_message(driver.run, driver.state, site))

        driver.tell(event, told)

    # --- what neither end can bring the other -----------------------------------------------------------------------

    async def fetch(self, site: str, driver: RunDriver, fetch: pb.Fetch) -> None:
        """Send a site the model of a neighbour whom it cannot reach, nor be reached by; where the run's state says so."""
        key, state = fetch.key, driver.state.schedule
        peer = next((name for name, model in driver.state.kept.items() if model.task == key.task), "")
        links = state.links if isinstance(state, GossipState) else ()
        link = next((link for link in links if set(link.pair) == {site, peer}), None)
        needed = link is not None and not link.over and link.tried.way is Way.RELAY
        if not needed or driver.state.kept[peer].attempt != key.attempt:
            log.warning("run %s: %s asks for %s, which is not relayed to it", driver.run, site, key.task[:96])
            return
        model, num_bytes = driver.state.kept[peer], driver.manifest.num_bytes
        lacking = await self._relays.want(
            site, key, round_=model.round, num_bytes=num_bytes, offset=min(fetch.offset, num_bytes)
        )
        if lacking:
            payload = pb.Payload(name=MODEL, num_bytes=num_bytes, crc32=model.crc32)
            self._ask_up(peer, pb.Result(key=key, payloads=[payload]))

    def _ask_up(self, site: str, result: pb.Result) -> None:
        self._transfers.ask_up(site, result.key, result.payloads[0], self._relays.taker(result.key))


def is_model(result: pb.Result) -> bool:
    """Whether a result is a model that stays at its site."""
    return any(payload.name == MODEL for payload in result.payloads)


def _outside(session: Session, zone: str) -> str:
    """Why a site takes no part in a run of `zone`; "" where it may."""
    card, own = session.hello.card, session.hello.capacity.labels.get(ZONE, "")
    if own != zone:
        return f"the run is for sites of zone {zone!r}; capacity.labels.zone of {session.site} is {own!r}"
    if not card.card or len(card.card) > MAX_CARD_BYTES:
        return f"{session.site} has no card by which others know it: it runs in plain text, or an older Atoll"
    return ""


def _check(driver: RunDriver, site: str, result: pb.Result) -> None:
    """Raises BadUpdate where a model's length, weight or number is not what the run has."""
    wanted = driver.manifest.num_bytes
    payload = result.payloads[0]
    if len(result.payloads) != 1 or payload.num_bytes != wanted or not 1 <= result.weight <= MAX_WEIGHT:
        raise BadUpdate(
            f"{site} tells of {len(result.payloads)} payloads, the first of {payload.num_bytes} bytes and weight "
            f"{result.weight}; the run's model has {wanted} bytes: install the server's version of Atoll at the site",
            site=site,
            run=driver.run,
            round=result.round,
            field="payloads",
            value=payload.num_bytes,
            bound=wanted,
        )


def _record(state: GossipState) -> ExchangeRecord:
    """How the pairs of a round stand, for people."""
    relayed = [link for link in state.links if link.tried.way is Way.RELAY]
    return ExchangeRecord(
        round=state.round,
        num_pairs=len(state.links),
        num_direct=sum(link.met for link in state.links if link not in relayed),
        relayed=[f"{', '.join(link.pair)} ({'; '.join(link.tried.reasons)})"[:2000] for link in relayed],
    )
