"""The neighbours of a site in runs of gossip: models that come from them, and what is given to them.

::

    Introduction -> card, policy, own model -> this site calls:   Meet, then pull the neighbour's model and push its own
                                            -> the other calls:   the same, the other way round (peer_port.py)
                                            -> neither can:       Fetch from the server, as a version is fetched
    whole and durable -> MetPeer(received)           cannot be reached -> MetPeer(unreachable)

Invariants. Nothing is given to, taken from or asked of a neighbour but what an introduction says, between two cards
that the signed member list stands by, in a zone that this site's policy accepts at that moment. A model has the length
of this site's own, so a neighbour fills no more disk than that; it is reported only when it is durable. Everything can
be done again: the server introduces anew after any restart.

::

    peers/RUN/ROUND.SITE         whole
    peers/RUN/ROUND.SITE.part    on its way
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import grpc.aio

from atoll.client.attachment import Mailbox
from atoll.client.base_models import Spawn
from atoll.client.home import SiteHome
from atoll.client.meeting import MODEL, ZONE, Meeting, task_of
from atoll.client.membership import Membership
from atoll.client.peer_port import PeerPort
from atoll.client.policy import require_zones, zones_of
from atoll.client.refusal import as_refusal
from atoll.client.settings import SiteSettings
from atoll.transport.durable import private_folder, remove_tree
from atoll.transport.grpc_carrier import GrpcCarrier
from atoll.transport.identity import Identity
from atoll.transport.member_certificate import MemberCertificate
from atoll.transport.outbox import Outbox
from atoll.transport.peers import ListenerKeys, make_listener_keys, meet, open_peer_channel, read_card, sign_card
from atoll.transport.reconnect import Backoff
from atoll.transport.tasks import Key, TaskLog
from atoll.transport.transfer import Carrier, download, partial_bytes, upload
from atoll.wire import control_pb2 as pb
from atoll.wire.errors import (
    AtollError,
    Malformed,
    NotAllowed,
    RemoteError,
    Stale,
    Unavailable,
    Unknown,
    to_detail,
)
from atoll.wire.gossip_pb2 import Introduction, MeetReply, MetPeer, PeerCard
from atoll.wire.job import decode_job
from atoll.wire.names import check_run_id, check_site_name

_log = logging.getLogger(__name__)

MEET_TIMEOUT_S = 5.0  # for the first answer of a neighbour: a connection across an ocean takes one
PATIENCE_S = 5.0  # of tries without an answer, after which a neighbour counts as unreachable


class Neighbours:
    """All meetings of one site. Used on the agent's event loop."""

    def __init__(
        self,
        home: SiteHome,
        settings: SiteSettings,
        identity: Identity | None,
        membership: Membership,
        *,
        outbox: Outbox,
        task_log: TaskLog,
        mailbox: Mailbox,
        spawn: Spawn,
        carrier: Callable[[], Carrier],
    ) -> None:
        """
        Args:
            identity: None in plain text, where sites do not meet.
            carrier: to the server.
        """
        self._folder, self._policy = home.peers, home.policy
        self._site = settings.site.name
        self._zone = settings.capacity.labels.get(ZONE, "")
        self._settings, self._membership = settings.gossip, membership
        self._identity, self._outbox, self._mailbox = identity, outbox, mailbox
        self._spawn, self._carrier, self._task_log = spawn, carrier, task_log
        self._zones: dict[str, tuple[str, ...]] = {}  # of joined runs
        self._meetings: dict[tuple[str, str], Meeting] = {}  # by run and neighbour
        self._port: PeerPort | None = None
        self._keys: ListenerKeys | None = None

    async def listen(self) -> None:
        """Take the port that the settings name, where they do. Raises PortInUse."""
        if self._identity is None or self._settings.listen is None:
            return
        self._keys = make_listener_keys(self._site)
        self._port = PeerPort(self, self._site)
        await self._port.start(self._identity, self._keys, self._settings.listen)

    def card(self) -> PeerCard | None:
        """By what neighbours know this site; None in plain text."""
        if self._identity is None:
            return None
        if self._keys is None:
            return sign_card(self._identity, zone=self._zone)
        address = self._settings.advertise or self._settings.listen or ""
        return sign_card(self._identity, zone=self._zone, address=address, certificate_der=self._keys.certificate_der)

    def renewed(self, identity: Identity) -> None:
        """Call with a new certificate from now on; the card on the next stream says so."""
        self._identity = identity

    def path(self, run: str, round_: int, site: str) -> Path:
        """Where the model of a neighbour is kept, or goes."""
        return self._folder / run / f"{round_}.{site}"

    # --- introductions ----------------------------------------------------------------------------------------------

    async def introduced(self, introduction: Introduction) -> None:
        """Meet a neighbour as the server says; said again, it does no harm."""
        try:
            meeting = await self._admitted(introduction)
        except AtollError as error:
            _log.error("run %s: %s is not met: %s", introduction.run, introduction.peer, error)
            self._unreachable(introduction, as_refusal(error, site=self._site, run=introduction.run))
            return
        key = introduction.run, introduction.peer
        known = self._meetings.get(key)
        if known is not None and known.introduction == introduction:
            meeting = known
        elif known is not None:
            self._end(known)
            if known.path == meeting.path:  # the same models: one writer at a time, and what was given counts
                meeting.filling, meeting.given_bytes = known.filling, known.given_bytes
        self._meetings[key] = meeting
        here = await asyncio.to_thread(meeting.path.exists)
        if here:
            self.received(meeting)
        if meeting.task is not None and not meeting.task.done():
            return
        if introduction.relayed and not here:
            self._fetch(meeting)
        elif introduction.calls:
            meeting.task = self._spawn(self._call(meeting))

    async def _admitted(self, said: Introduction) -> Meeting:
        """The meeting, where this site takes part in it.

        Raises:
            RemoteError: it does not, and why.
            LocalError: a file here cannot be used.
        """
        check_run_id(said.run)
        check_site_name(said.peer)
        zones = await self._zones_of(said.run)
        if self._identity is None or not zones or said.peer == self._site:
            raise NotAllowed(
                f"run {said.run} does not let {self._site} meet {said.peer}", site=self._site, run=said.run
            )
        await asyncio.to_thread(require_zones, self._policy, zones, site=self._site, run=said.run)
        card = read_card(
            said.card,
            site=said.peer,
            federation=self._identity.federation,
            signing_key=self._membership.signing_key(said.peer),
        )
        if {card.zone, self._zone} != set(zones):
            raise NotAllowed(
                f"the run is for zone {', '.join(zones)}, {self._site} is in {self._zone!r}, {said.peer} in {card.zone!r}",
                site=self._site,
                run=said.run,
                field=ZONE,
                value=card.zone,
                bound=", ".join(zones),
            )
        own = Key(run=said.run, task=task_of(said.round, self._site), attempt=said.attempt)
        result = self._outbox.result(own) if self._outbox.is_held(own) else None
        if result is None or not result.payloads:
            raise Stale(f"{self._site} holds no model of round {said.round}", site=self._site, run=said.run)
        if result.payloads[0].num_bytes != said.num_bytes:
            raise Malformed(
                f"the model of {said.peer} would have {said.num_bytes} bytes, this run's have {result.payloads[0].num_bytes}",
                site=said.peer,
                run=said.run,
                field="num_bytes",
                value=said.num_bytes,
                bound=result.payloads[0].num_bytes,
            )
        path = self.path(said.run, said.round, said.peer)
        await asyncio.to_thread(private_folder, path.parent)
        own_path = self._outbox.payload_path(own, MODEL)
        return Meeting(introduction=said, card=card, own=own, own_path=own_path, path=path)

    async def _zones_of(self, run: str) -> tuple[str, ...]:
        """Zones that a joined run names; none of a run that this site is not in."""
        if run not in self._zones:
            offer = (await asyncio.to_thread(self._task_log.joined)).get(run)
            if offer is None:
                return ()
            self._zones[run] = zones_of(decode_job(offer.job))
        return self._zones[run]

    def received(self, meeting: Meeting) -> None:
        """Say that the neighbour's model is here, durably."""
        said = meeting.introduction
        self._mailbox.post(met_peer=MetPeer(run=said.run, round=said.round, peer=said.peer, received=True))

    def _unreachable(self, said: Introduction, reason: RemoteError) -> None:
        detail = to_detail(reason)
        met = MetPeer(run=said.run, round=said.round, peer=said.peer, tried=said.tried, unreachable=detail)
        self._mailbox.post(met_peer=met)

    # --- this site calls --------------------------------------------------------------------------------------------

    async def _call(self, meeting: Meeting) -> None:
        """Exchange models over a connection of this site's own; a break is waited out, a neighbour that is not there not."""
        clock, backoff, said = asyncio.get_running_loop().time, Backoff(most_s=1.0), meeting.introduction
        heard_s = clock()
        while True:
            try:
                async with self._open(meeting) as channel:
                    reply = await meet(channel, said.meeting, MEET_TIMEOUT_S)
                    heard_s = clock()
                    ways = self._pull(channel, meeting), self._push(channel, meeting, reply)
                    outcomes = await asyncio.gather(*ways, return_exceptions=True)
                    for failed in (outcome for outcome in outcomes if isinstance(outcome, BaseException)):
                        raise failed
                    return
            except AtollError as error:
                _log.info("run %s: %s is called in vain: %s", said.run, said.peer, error)
                if clock() - heard_s >= PATIENCE_S or not meeting.card.address:
                    self._unreachable(said, as_refusal(error, site=self._site, run=said.run, round_=said.round))
                    return
            await asyncio.sleep(backoff.next_s())

    def _open(self, meeting: Meeting) -> grpc.aio.Channel:
        if not meeting.card.address:
            raise Unavailable(f"{meeting.introduction.peer} does not listen (gossip.listen in its site.toml)")
        assert self._identity is not None  # or there were no meeting
        return open_peer_channel(self._identity, meeting.card)

    async def _pull(self, channel: grpc.aio.Channel, meeting: Meeting) -> None:
        said = meeting.introduction
        grant = pb.Grant(grant=said.meeting, key=pb.TaskKey(run=said.run), num_bytes=said.num_bytes, crc32=said.crc32)
        await self._download(GrpcCarrier(channel), grant, meeting)

    async def _download(self, carrier: Carrier, grant: pb.Grant, meeting: Meeting) -> None:
        async with meeting.filling:
            if not await asyncio.to_thread(meeting.path.exists):
                await download(carrier, grant, meeting.path, durable=True)
        self.received(meeting)

    async def _push(self, channel: grpc.aio.Channel, meeting: Meeting, reply: MeetReply) -> None:
        if reply.complete:
            return
        said = meeting.introduction
        grant = pb.Grant(grant=said.meeting, num_bytes=said.num_bytes, offset=reply.received_bytes)
        status = await upload(GrpcCarrier(channel), grant, meeting.own_path)
        if not status.complete:
            raise Unavailable(f"{said.peer} has {status.received_bytes} of {said.num_bytes} bytes")

    # --- the other calls --------------------------------------------------------------------------------------------

    def find(self, token: str, caller: MemberCertificate) -> Meeting:
        """The meeting that a call names.

        Raises:
            Unknown: there is none (yet, or any more).
            NotAllowed: the caller is not the one who was introduced, or no member any more.
        """
        meeting = next((m for m in self._meetings.values() if m.introduction.meeting == token), None)
        if meeting is None or not token or meeting.introduction.relayed:
            raise Unknown(f"{self._site} knows of no such meeting: wait for the server's introduction", site=self._site)
        peer = meeting.introduction.peer
        assert self._identity is not None
        is_peer = (caller.federation, caller.role, caller.name) == (self._identity.federation, "site", peer)
        if not is_peer or caller.key_sha256 != meeting.card.client_key or self._membership.signing_key(peer) is None:
            raise NotAllowed(
                f"{caller.role} {caller.name} is not the site that was introduced to {self._site}", site=self._site
            )
        return meeting

    # --- neither can ------------------------------------------------------------------------------------------------

    def _fetch(self, meeting: Meeting) -> None:
        said = meeting.introduction
        key = pb.TaskKey(run=said.run, task=task_of(said.round, said.peer), attempt=said.peer_attempt)
        offset = min(partial_bytes(meeting.path), said.num_bytes)
        self._mailbox.post(fetch=pb.Fetch(run=said.run, key=key, offset=offset))

    def granted(self, grant: pb.Grant) -> None:
        """Begin to fetch a neighbour's model from the server; one that nobody waits for is left alone."""
        for meeting in self._meetings.values():
            said = meeting.introduction
            wanted = said.run, task_of(said.round, said.peer), said.peer_attempt
            if said.relayed and wanted == (grant.key.run, grant.key.task, grant.key.attempt):
                if (grant.num_bytes, grant.crc32) != (said.num_bytes, said.crc32):
                    self._unreachable(said, Malformed(f"the server grants another object than {meeting.what}"))
                    return
                if meeting.task is not None:
                    meeting.task.cancel()
                meeting.grant = grant.grant
                meeting.task = self._spawn(self._relayed(meeting, grant))

    def withdrawn(self, grant: str) -> bool:
        """Ask again for what a grant that was taken back was for; whether it was one of these."""
        for meeting in self._meetings.values():
            if meeting.grant == grant and meeting.task is not None:
                meeting.task.cancel()
                meeting.task = self._spawn(self._ask_later(meeting))
                return True
        return False

    async def _relayed(self, meeting: Meeting, grant: pb.Grant) -> None:
        try:
            await self._download(self._carrier(), grant, meeting)
        except AtollError as error:
            _log.warning("run %s: %s did not arrive, asking again: %s", grant.key.run, meeting.what, error)
            await self._ask_later(meeting)

    async def _ask_later(self, meeting: Meeting) -> None:
        await asyncio.sleep(Backoff(most_s=5.0).next_s())
        self._fetch(meeting)

    # --- endings ----------------------------------------------------------------------------------------------------

    async def drop_upto(self, run: str, round_: int) -> None:
        """Drop what nobody needs any more of `run`, up to and with a round."""
        for key, meeting in list(self._meetings.items()):
            if key[0] == run and meeting.introduction.round <= round_:
                self._end(self._meetings.pop(key))
        await asyncio.to_thread(_remove_upto, self._folder / run, round_)

    async def drop_run(self, run: str) -> None:
        """Drop all of a run that is over."""
        for key in [key for key in self._meetings if key[0] == run]:
            self._end(self._meetings.pop(key))
        self._zones.pop(run, None)
        await asyncio.to_thread(remove_tree, self._folder / run)

    async def close(self) -> None:
        """End all meetings, and let go of the port; what has arrived stays."""
        if self._port is not None:
            await self._port.stop()
        for meeting in self._meetings.values():
            self._end(meeting)
        self._meetings.clear()

    def _end(self, meeting: Meeting) -> None:
        if meeting.task is not None:
            meeting.task.cancel()
        if meeting.incoming is not None:
            meeting.incoming.withdraw(Stale("this meeting is over", site=self._site))


def _remove_upto(folder: Path, round_: int) -> None:
    for path in folder.glob("*.*"):
        number = path.name.partition(".")[0]
        if number.isdecimal() and int(number) <= round_:
            path.unlink(missing_ok=True)
