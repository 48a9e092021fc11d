"""Sites that meet: real certificates, a signed member list, real ports. What the server would introduce, the test does."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from samples.loopback import Clock, Federation, certified
from samples.whole_server import free_ports

from atoll.client.attachment import Mailbox
from atoll.client.board import Board
from atoll.client.home import SiteHome
from atoll.client.meeting import MODEL, task_of
from atoll.client.membership import Membership
from atoll.client.neighbours import Neighbours
from atoll.client.peer_port import MOST_TAKEN
from atoll.client.settings import SiteSettings
from atoll.transport.grpc_carrier import GrpcCarrier
from atoll.transport.identity import Identity
from atoll.transport.member_certificate import MemberCertificate, read_certificate
from atoll.transport.members import sign_members
from atoll.transport.outbox import Outbox
from atoll.transport.peers import meet, open_peer_channel, read_card, sign_card
from atoll.transport.tasks import Key, TaskLog
from atoll.transport.transfer import download, upload
from atoll.wire import control_pb2 as pb
from atoll.wire.errors import BadFrame, NotAllowed, RemoteError, Stranger, TooLarge, Unavailable, Unknown
from atoll.wire.gossip_pb2 import Introduction, MetPeer, PeerCard
from atoll.wire.job import parse_job
from atoll.wire.members_pb2 import ACTIVE, Member, MemberList, SignedMemberList
from atoll.wire.names import new_run_id

ZONE = "reef"
TOKEN = "m" * 24
NUM_BYTES = 3_000_000  # three frames


class Site:
    """A site with a model of round 1, and all that meets others for it."""

    def __init__(self, root: Path, identity: Identity, *, listens: bool, zone: str = ZONE) -> None:
        self.identity = identity
        self.home = SiteHome(root=root / f"{identity.name}-home")
        self.home.make()
        self.home.policy.write_text(f'zones = ["{ZONE}"]\n')
        gossip = {"listen": f"127.0.0.1:{free_ports(1)[0]}"} if listens else {}
        table = {"site": {"name": identity.name}, "capacity": {"labels": {"zone": zone}}, "gossip": gossip}
        board = Board(self.home.status, site=identity.name, server="", count_held=lambda: 0)
        self.membership = Membership(self.home.state / "members", identity, board)
        self.outbox, self.task_log = Outbox(self.home.outbox), TaskLog(self.home.state / "tasks")
        self.mailbox = Mailbox()
        self.mailbox.open()
        self.tasks: set[asyncio.Task[None]] = set()
        self.neighbours = Neighbours(
            self.home,
            SiteSettings.model_validate(table),
            identity,
            self.membership,
            outbox=self.outbox,
            task_log=self.task_log,
            mailbox=self.mailbox,
            spawn=self._spawn,
            carrier=lambda: pytest.fail("nothing is fetched from the server"),
        )
        self.model = (identity.name * NUM_BYTES)[:NUM_BYTES].encode()
        self._said = aiter(self.mailbox.messages())

    def join(self, offer: pb.RunOffer) -> None:
        self.task_log.join(offer.run, offer)
        key = Key(run=offer.run, task=task_of(1, self.identity.name), attempt=1)
        self.outbox.draft(key, MODEL).write_bytes(self.model)
        payload = pb.Payload(name=MODEL, num_bytes=NUM_BYTES, crc32=zlib.crc32(self.model))
        self.outbox.ready(pb.Result(key=key.to_message(), round=1, weight=1, payloads=[payload]))
        self.outbox.commit(key)

    async def said(self) -> MetPeer:
        async with asyncio.timeout(30):
            return (await anext(self._said)).met_peer

    def card(self) -> PeerCard:
        card = self.neighbours.card()
        assert card is not None
        return card

    def has(self, other: Site, run: str) -> bool:
        path = self.neighbours.path(run, 1, other.identity.name)
        return path.exists() and path.read_bytes() == other.model

    async def close(self) -> None:
        await self.neighbours.close()
        for task in self.tasks:
            task.cancel()
        self.task_log.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        return task


class Reef:
    """North and south, who are in a run together; their operator's list names both."""

    def __init__(self, federation: Federation, north: Identity, south: Identity, root: Path) -> None:
        self.federation, self.root = federation, root
        self.identities = {"north": north, "south": south}
        table = {"kind": "gossip", "zone": ZONE}
        job = parse_job({"job": {"name": "x", "app": "x", "rounds": 3}, "strategy": {"schedule": table}})
        self.offer = pb.RunOffer(run=new_run_id(), job=job.canonical())
        self.sites: list[Site] = []

    @property
    def run(self) -> str:
        return self.offer.run

    async def site(self, name: str, *, listens: bool = True, zone: str = ZONE) -> Site:
        site = Site(self.root, self.identities[name], listens=listens, zone=zone)
        self.sites.append(site)
        await site.membership.take(self.members())
        await asyncio.to_thread(site.join, self.offer)
        await site.neighbours.listen()
        return site

    def members(self, *without: str) -> SignedMemberList:
        listed = [
            Member(site=name, organisation="x", signing_key=key.public_key().public_bytes_raw(), status=ACTIVE)
            for name, identity in sorted(self.identities.items())
            if (key := identity.signing_key) is not None and name not in without
        ]
        version = 2 if without else 1
        made = MemberList(federation=self.federation.authority.federation, version=version, members=listed)
        return sign_members(self.federation.key.key, made)

    def introduction(self, of: Site, **changes: Any) -> Introduction:
        fields: dict[str, Any] = {
            "run": self.run,
            "round": 1,
            "peer": of.identity.name,
            "card": of.card(),
            "meeting": TOKEN,
            "attempt": 1,
            "peer_attempt": 1,
            "num_bytes": NUM_BYTES,
            "crc32": zlib.crc32(of.model),
        }
        return Introduction(**{**fields, **changes})


@pytest.fixture
async def reef(tmp_path: Path) -> AsyncIterator[Reef]:
    federation = Federation(tmp_path / "isles", Clock(), Clock())
    await federation.start()
    made: Reef | None = None
    try:
        made = Reef(federation, await federation.join("north"), await federation.join("south"), tmp_path)
        yield made
    finally:
        for site in made.sites if made is not None else ():
            await site.close()
        await federation.stop()


@asynccontextmanager
async def called(caller: Identity, listener: Site) -> AsyncIterator[Any]:
    """A channel to a site's port, as its card says."""
    assert listener.identity.signing_key is not None
    card = read_card(
        listener.card(),
        site=listener.identity.name,
        federation=listener.identity.federation,
        signing_key=listener.identity.signing_key.public_key().public_bytes_raw(),
    )
    async with open_peer_channel(caller, card) as channel:
        yield channel


async def test_one_call_brings_both_models(reef: Reef) -> None:
    north, south = await reef.site("north", listens=False), await reef.site("south")
    await south.neighbours.introduced(reef.introduction(north))
    await north.neighbours.introduced(reef.introduction(south, calls=True))
    for site, peer in ((north, "south"), (south, "north")):
        met = await site.said()
        assert (met.run, met.round, met.peer, met.received) == (reef.run, 1, peer, True)
    assert north.has(south, reef.run)
    assert south.has(north, reef.run)
    await south.neighbours.introduced(reef.introduction(north))
    assert (await south.said()).received, "said again, it is told again"


async def test_what_a_cut_transfer_has_brought_is_not_sent_again(reef: Reef) -> None:
    north, south = await reef.site("north", listens=False), await reef.site("south")
    for site, other in ((north, south), (south, north)):
        part = site.neighbours.path(reef.run, 1, f"{other.identity.name}.part")
        part.parent.mkdir(parents=True)
        part.write_bytes(other.model[:1_500_000])
    await south.neighbours.introduced(reef.introduction(north))
    async with called(north.identity, south) as channel:
        assert (await meet(channel, TOKEN, 5)).received_bytes == 1_500_000
    await north.neighbours.introduced(reef.introduction(south, calls=True))
    assert (await north.said()).received
    assert (await south.said()).received
    assert north.has(south, reef.run)
    assert south.has(north, reef.run)
    given = south.neighbours.find(TOKEN, certificate(north)).given_bytes
    assert given < NUM_BYTES - 1_400_000


def certificate(site: Site) -> MemberCertificate:
    return read_certificate(site.identity.certificate_pem)


async def test_a_site_that_does_not_listen_is_said_to_be_unreachable_at_once(reef: Reef) -> None:
    north, south = await reef.site("north"), await reef.site("south", listens=False)
    await north.neighbours.introduced(reef.introduction(south, calls=True))
    met = await north.said()
    assert met.WhichOneof("outcome") == "unreachable"
    assert "south does not listen" in met.unreachable.message


async def test_a_port_where_nobody_listens_is_tried_for_a_while(reef: Reef, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.client.neighbours.PATIENCE_S", 0.5)
    north, south = await reef.site("north"), await reef.site("south")
    introduction = reef.introduction(south, calls=True)
    await south.neighbours.close()
    await north.neighbours.introduced(introduction)
    assert (await north.said()).WhichOneof("outcome") == "unreachable"


async def test_a_caller_that_was_not_introduced_is_refused(reef: Reef) -> None:
    """Whoever holds the CA's key can make a certificate for north, but not one that north's card names."""
    north, south = await reef.site("north"), await reef.site("south")
    with pytest.raises(Unknown, match="no such meeting"):
        async with called(north.identity, south) as channel:
            await meet(channel, TOKEN, 5)
    await south.neighbours.introduced(reef.introduction(north))
    ghost = certified(reef.federation, north.identity, name="north")
    east = await reef.federation.join("east")
    for stranger in (ghost, east):
        async with called(stranger, south) as channel:
            with pytest.raises(NotAllowed, match="not the site that was introduced"):
                await meet(channel, TOKEN, 5)
            grant = pb.Grant(grant=TOKEN, num_bytes=NUM_BYTES, key=pb.TaskKey(run=reef.run))
            with pytest.raises(NotAllowed):
                await download(GrpcCarrier(channel), grant, reef.root / "stolen")
            with pytest.raises(NotAllowed):
                await upload(
                    GrpcCarrier(channel),
                    grant,
                    north.outbox.payload_path(Key(run=reef.run, task="g1.north", attempt=1), MODEL),
                )
    async with called(north.identity, south) as channel:
        assert (await meet(channel, TOKEN, 5)).received_bytes == 0


async def test_a_caller_whose_neighbour_is_another_than_its_card_says_gives_nothing(reef: Reef) -> None:
    """The server cannot stand between two sites: it has no key for the certificate that the card names."""
    north, south = await reef.site("north"), await reef.site("south")
    other = replace(reef.identities["north"])
    wrong = sign_card(other, zone=ZONE, address="127.0.0.1:1", certificate_der=b"DER")
    with pytest.raises(Stranger, match="not signed by its key"):
        read_card(
            wrong,
            site="north",
            federation=other.federation,
            signing_key=south.membership.signing_key("south"),
        )
    # South's card, at an address where north listens.
    assert south.identity.signing_key is not None
    keys = south.neighbours._keys
    assert keys is not None
    moved = sign_card(
        south.identity,
        zone=ZONE,
        address=str(north.neighbours._settings.listen),
        certificate_der=keys.certificate_der,
    )
    card = read_card(
        moved, site="south", federation=other.federation, signing_key=north.membership.signing_key("south")
    )
    async with open_peer_channel(north.identity, card) as channel:
        with pytest.raises(Unavailable):
            await meet(channel, TOKEN, 5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_bytes": NUM_BYTES + 1}, "this run's have 3000000"),
        ({"attempt": 2}, "holds no model of round 1"),
        ({"round": 2}, "holds no model of round 2"),
        ({"run": "01JDQ3T4V8Z6K1M2N3P4Q5R6S7"}, "does not let north meet south"),
        ({"peer": "north"}, "does not let north meet north"),
        ({"card": PeerCard()}, "not signed by its key"),
        ({"peer": "west"}, "west is no active member"),
    ],
)
async def test_an_introduction_that_does_not_hold_is_refused_and_says_why(
    reef: Reef, changes: dict[str, Any], words: str
) -> None:
    north, south = await reef.site("north"), await reef.site("south")
    await north.neighbours.introduced(reef.introduction(south, calls=True, **changes))
    assert words in (await north.said()).unreachable.message


async def test_a_policy_that_no_longer_accepts_the_zone_ends_it(reef: Reef) -> None:
    north, south = await reef.site("north"), await reef.site("south")
    north.home.policy.write_text("zones = []\n")
    await north.neighbours.introduced(reef.introduction(south, calls=True))
    refusal = (await north.said()).unreachable
    assert (refusal.kind, refusal.field) == ("PolicyRefused", "zones")


async def test_a_neighbour_of_another_zone_is_not_met(reef: Reef) -> None:
    north, south = await reef.site("north"), await reef.site("south", zone="cave")
    await north.neighbours.introduced(reef.introduction(south, calls=True))
    assert "south in 'cave'" in (await north.said()).unreachable.message


async def test_a_revoked_neighbour_is_refused_on_its_next_call(reef: Reef) -> None:
    north, south = await reef.site("north"), await reef.site("south")
    await south.neighbours.introduced(reef.introduction(north))
    await south.membership.take(reef.members("north"))
    async with called(north.identity, south) as channel:
        with pytest.raises(NotAllowed):
            await meet(channel, TOKEN, 5)


async def test_a_hostile_neighbour_takes_a_model_a_few_times_and_no_more(reef: Reef) -> None:
    north, south = await reef.site("north"), await reef.site("south")
    await south.neighbours.introduced(reef.introduction(north))
    grant = pb.Grant(grant=TOKEN, num_bytes=NUM_BYTES, crc32=zlib.crc32(south.model), key=pb.TaskKey(run=reef.run))
    async with called(north.identity, south) as channel:
        for number in range(MOST_TAKEN):
            await download(GrpcCarrier(channel), grant, reef.root / f"copy-{number}")
        with pytest.raises(TooLarge, match=f"{MOST_TAKEN} times"):
            await download(GrpcCarrier(channel), grant, reef.root / "copy-too-many")


@pytest.mark.parametrize(
    ("sent", "kind"), [(NUM_BYTES + 1_000, TooLarge), (NUM_BYTES, BadFrame)], ids=["too long", "another model"]
)
async def test_a_hostile_neighbour_brings_its_model_and_nothing_else(
    reef: Reef, sent: int, kind: type[RemoteError]
) -> None:
    north, south = await reef.site("north"), await reef.site("south")
    await south.neighbours.introduced(reef.introduction(north))
    bad = reef.root / "bad"
    bad.write_bytes(b"x" * sent)
    async with called(north.identity, south) as channel:
        with pytest.raises(kind):
            await upload(GrpcCarrier(channel), pb.Grant(grant=TOKEN, num_bytes=sent), bad)
        peers = [path for path in south.home.peers.rglob("*") if path.is_file()]
        assert sum(path.stat().st_size for path in peers) <= NUM_BYTES
        assert not south.has(north, reef.run)
        held = (await meet(channel, TOKEN, 5)).received_bytes
        assert held <= NUM_BYTES
        if held:
            return  # the frames that were right are kept, and go on
        own = north.outbox.payload_path(Key(run=reef.run, task="g1.north", attempt=1), MODEL)
        assert (await upload(GrpcCarrier(channel), pb.Grant(grant=TOKEN, num_bytes=NUM_BYTES), own)).complete
    assert south.has(north, reef.run)


async def test_what_a_run_leaves_is_dropped_with_it(reef: Reef) -> None:
    north, south = await reef.site("north", listens=False), await reef.site("south")
    await south.neighbours.introduced(reef.introduction(north))
    await north.neighbours.introduced(reef.introduction(south, calls=True))
    await north.said()
    await north.neighbours.drop_upto(reef.run, 0)
    assert north.has(south, reef.run)
    await north.neighbours.drop_upto(reef.run, 1)
    assert not north.has(south, reef.run)
    await south.neighbours.drop_run(reef.run)
    assert not (south.home.peers / reef.run).exists()
