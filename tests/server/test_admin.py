"""Admission from token to member list, over real gRPC on loopback with mutual TLS and the real gate."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from atoll.server.admin import AdminService
from atoll.server.authority import Authority
from atoll.server.enrolment import EnrolmentService, RenewalService
from atoll.server.security import Gate, as_stranger, by_certificate
from atoll.server.sessions import Session, Sessions
from atoll.server.settings import ServerFolder, load_settings
from atoll.server.setup import init_server
from atoll.server.store import Store
from atoll.transport.credentials import open_channel, server_credentials, server_options
from atoll.transport.enrolment import decode_token, encode_token, enrol, enrolment_request, renew, secret_sha256
from atoll.transport.identity import Identity, load_identity, utc_now
from atoll.transport.members import FederationKey, sign_members, sign_pending
from atoll.wire import admin_pb2 as pb
from atoll.wire import admin_pb2_grpc, enrolment_pb2_grpc
from atoll.wire.control_pb2 import Capacity, Hello
from atoll.wire.errors import (
    BadToken,
    Malformed,
    NotAllowed,
    RemoteError,
    Stale,
    Stranger,
    Unknown,
    from_rpc,
)
from atoll.wire.members_pb2 import ACTIVE, REVOKED, Member, MemberList, SignedMemberList

ROLES = frozenset({"site", "researcher", "reader", "operator"})


class QuietFloor:
    """Nobody works on anything here; remembers who was to be told."""

    def __init__(self) -> None:
        self.sessions = Sessions()
        self.told: list[str] = []

    async def members_changed(self) -> None:
        self.told.append("members changed")

    def revoked(self, name: str) -> None:
        self.told.append(f"revoked {name}")

    def runs_of(self, site: str) -> list[str]:
        return ["01RUN"] if self.sessions.get(site) else []

    def last_heard_s(self, site: str) -> float | None:
        return 10.0 if self.sessions.get(site) else None


@dataclass(slots=True)
class Office:
    """A running admission office, and what callers need to reach it."""

    folder: Path
    store: Store
    floor: QuietFloor
    address: str
    enrolment_address: str
    shift: timedelta = timedelta(0)

    def clock(self) -> datetime:
        return utc_now() + self.shift

    @property
    def operator(self) -> Identity:
        return replace(load_identity(self.folder / "server" / "operator"), address=self.address)

    @property
    def key(self) -> FederationKey:
        return FederationKey.load(self.folder / "offline")

    async def call(self, identity: Identity, method: str, request: Any) -> Any:
        """One admin call. Raises the error that the server sent."""
        async with open_channel(identity) as channel:
            try:
                return await getattr(admin_pb2_grpc.AdminStub(channel), method)(request, timeout=10)
            except grpc.aio.AioRpcError as error:
                raise from_rpc(error) from None

    async def token(self, name: str, role: str = "site", organisation: str = "Clinic", valid_s: int = 0) -> str:
        request = pb.AddRequest(name=name, role=role, organisation=organisation, valid_s=valid_s)
        reply = await self.call(self.operator, "Add", request)
        ticket = decode_token(reply.token)  # printed by settings that know nothing of the ports of this test
        ticket.address, ticket.enrolment_address = self.address, self.enrolment_address
        return encode_token(ticket)

    async def join(self, name: str, role: str = "site") -> Identity:
        token = await self.token(name, role)
        return await asyncio.to_thread(enrol, token, self.folder / name, roles=ROLES)

    async def publish(self) -> MemberList:
        """What `atoll federation sign` does."""
        waiting = await self.call(self.operator, "PendingMembers", pb.PendingRequest())
        signed = sign_pending(waiting.current, waiting.pending, waiting.revoked, self.key)
        await self.call(self.operator, "PublishMembers", signed)
        return MemberList.FromString(signed.member_list)

    async def states(self, caller: Identity | None = None) -> dict[str, str]:
        reply = await self.call(caller or self.operator, "Sites", pb.SitesRequest())
        return {site.site: site.state for site in reply.sites}


@pytest.fixture
async def office(tmp_path: Path) -> AsyncIterator[Office]:
    init_server(tmp_path / "server", federation="demo", key_folder=tmp_path / "offline", address="127.0.0.1:1")
    place = ServerFolder(root=tmp_path / "server")
    authority, settings = Authority.load(place.authority), load_settings(place.root, {})
    store, floor = Store.open(place.database_url(settings)), QuietFloor()
    office = Office(folder=tmp_path, store=store, floor=floor, address="", enrolment_address="")
    admin = AdminService(settings=settings, store=store, authority=authority, floor=floor, clock=office.clock)
    newcomers = EnrolmentService(store=store, authority=authority, clock=office.clock)
    renewal = RenewalService(store=store, authority=authority, clock=office.clock)
    async with (
        listening(Gate(by_certificate(store, "demo")), authority, True) as (members_port, members_start),
        listening(Gate(as_stranger), authority, False) as (newcomers_port, newcomers_start),
    ):
        office.address, office.enrolment_address = members_port, newcomers_port
        await members_start(
            lambda server: (
                admin_pb2_grpc.add_AdminServicer_to_server(admin, server),
                enrolment_pb2_grpc.add_RenewalServicer_to_server(renewal, server),
            )
        )
        await newcomers_start(lambda server: enrolment_pb2_grpc.add_EnrolmentServicer_to_server(newcomers, server))
        yield office
    store.close()


@asynccontextmanager
async def listening(gate: Gate, authority: Authority, client_certificate: bool) -> AsyncIterator[tuple[str, Any]]:
    server = grpc.aio.server(interceptors=[gate], options=server_options())
    credentials = server_credentials(authority.server_certificate, require_client_certificate=client_certificate)
    port = server.add_secure_port("127.0.0.1:0", credentials)

    async def start(add: Callable[[grpc.aio.Server], Any]) -> None:
        add(server)
        await server.start()

    try:
        yield f"127.0.0.1:{port}", start
    finally:
        await server.stop(None)


class TestJoining:
    async def test_from_invited_to_active(self, office: Office) -> None:
        token = await office.token("site-1")
        assert await office.states() == {"site-1": "invited"}
        await asyncio.to_thread(enrol, token, office.folder / "site-1", roles=ROLES)
        assert await office.states() == {"site-1": "pending"}
        members = await office.publish()
        assert [(member.site, member.organisation, member.status) for member in members.members] == [
            ("site-1", "Clinic", ACTIVE)
        ]
        assert office.floor.told == ["members changed"]
        assert await office.states() == {"site-1": "active"}

    async def test_the_token_is_nowhere_on_the_server(self, office: Office) -> None:
        secret = decode_token(await office.token("site-1")).secret
        office.store.close()
        files = [path.read_bytes() for path in (office.folder / "server").rglob("*") if path.is_file()]
        assert not any(secret in data for data in files)
        assert any(secret_sha256(secret) in data for data in files)

    async def test_a_used_token(self, office: Office) -> None:
        token = await office.token("site-1")
        await asyncio.to_thread(enrol, token, office.folder / "site-1", roles=ROLES)
        with pytest.raises(BadToken, match="the token of site-1 was used already; ask the operator for a new one"):
            await asyncio.to_thread(enrol, token, office.folder / "thief", roles=ROLES)
        assert not (office.folder / "thief").exists()

    async def test_an_expired_token(self, office: Office) -> None:
        token = await office.token("site-1", valid_s=60)
        office.shift = timedelta(seconds=61)
        with pytest.raises(BadToken, match="the token of site-1 expired at"):
            await asyncio.to_thread(enrol, token, office.folder / "site-1", roles=ROLES)

    async def test_a_wrong_token(self, office: Office) -> None:
        ticket = decode_token(await office.token("site-1"))
        ticket.secret = bytes(32)
        with pytest.raises(BadToken, match="the token is wrong, or a newer one replaced it"):
            await asyncio.to_thread(enrol, encode_token(ticket), office.folder / "site-1", roles=ROLES)

    async def test_a_token_for_another_name(self, office: Office) -> None:
        ticket = decode_token(await office.token("site-1"))
        ticket.name = "site-2"
        with pytest.raises(BadToken, match="not for site-2; join under the name that it was made for"):
            await asyncio.to_thread(enrol, encode_token(ticket), office.folder / "site-2", roles=ROLES)

    async def test_a_site_cannot_become_an_operator(self, office: Office) -> None:
        ticket = decode_token(await office.token("site-1"))
        ticket.role = "operator"
        with pytest.raises(RemoteError):  # the server says site, whatever the token's text says
            await asyncio.to_thread(enrol, encode_token(ticket), office.folder / "site-1", roles=ROLES)
        assert office.store.lookup("operator", "site-1") is None

    async def test_a_refused_request_leaves_the_token_good(self, office: Office) -> None:
        token = await office.token("site-1")
        identity = office.operator
        from cryptography.hazmat.primitives.asymmetric import ec

        request = enrolment_request(
            "site-1", decode_token(token).secret, ec.generate_private_key(ec.SECP256R1()), signing_key=None
        )
        credentials = grpc.ssl_channel_credentials(root_certificates=identity.ca_pem)
        options = (("grpc.ssl_target_name_override", "server.atoll"),)
        async with grpc.aio.secure_channel(office.enrolment_address, credentials, options=options) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await enrolment_pb2_grpc.EnrolmentStub(channel).Enrol(request, timeout=10)
        assert isinstance(from_rpc(caught.value), Malformed)
        await asyncio.to_thread(enrol, token, office.folder / "site-1", roles=ROLES)


class TestAdding:
    @pytest.mark.parametrize(
        ("request_", "message"),
        [
            (pb.AddRequest(name="Site 1", role="site", organisation="Clinic"), "name 'Site 1' is not a valid name"),
            (pb.AddRequest(name="site-1", role="site"), "organisation ''"),
            (
                pb.AddRequest(name="site-1", role="king", organisation="Clinic"),
                "there is no role 'king': choose one of",
            ),
            (pb.AddRequest(name="ada", role="reader", valid_s=59), "a token lives 60 to 86400 s, not 59"),
            (pb.AddRequest(name="ada", role="reader", valid_s=86401), "a token lives 60 to 86400 s"),
        ],
    )
    async def test_bad_requests(self, office: Office, request_: pb.AddRequest, message: str) -> None:
        with pytest.raises(Malformed, match=message):
            await office.call(office.operator, "Add", request_)

    async def test_a_taken_name(self, office: Office) -> None:
        await office.join("site-1")
        with pytest.raises(NotAllowed, match="already a site; revoke it before"):
            await office.token("site-1")

    async def test_only_operators_admit(self, office: Office) -> None:
        for role in ("researcher", "reader", "site"):
            identity = await office.join(f"a-{role}", role)
            with pytest.raises(NotAllowed, match=f"Admin/Add is not for {role} a-{role}"):
                await office.call(identity, "Add", pb.AddRequest(name="friend", role="reader"))


class TestPublishing:
    async def test_a_list_by_another_key(self, office: Office) -> None:
        await office.join("site-1")
        other = FederationKey.create(office.folder / "forged", "demo")
        with pytest.raises(Malformed, match="not signed by the federation's key"):
            await office.call(office.operator, "PublishMembers", sign_members(other.key, MemberList(version=1)))
        assert office.store.member_list() is None
        assert office.floor.told == []

    async def test_a_changed_byte(self, office: Office) -> None:
        await office.join("site-1")
        waiting = await office.call(office.operator, "PendingMembers", pb.PendingRequest())
        signed = sign_pending(None, waiting.pending, (), office.key)
        changed = SignedMemberList(
            member_list=signed.member_list.replace(b"Clinic", b"Cliniq"), signature=signed.signature
        )
        with pytest.raises(Malformed, match="not signed by the federation's key"):
            await office.call(office.operator, "PublishMembers", changed)

    async def test_a_list_of_another_federation(self, office: Office) -> None:
        signed = sign_members(office.key.key, MemberList(federation="other", version=1))
        with pytest.raises(Malformed, match="is of federation other, this is demo"):
            await office.call(office.operator, "PublishMembers", signed)

    async def test_versions_rise(self, office: Office) -> None:
        def listed(version: int, *members: Member) -> SignedMemberList:
            return sign_members(office.key.key, MemberList(federation="demo", version=version, members=members))

        await office.call(office.operator, "PublishMembers", listed(2))
        await office.call(office.operator, "PublishMembers", listed(2))
        member = Member(site="ghost", organisation="x", signing_key=b"k" * 32, status=ACTIVE)
        for stale in (listed(1), listed(2, member)):
            with pytest.raises(Stale, match=r"is not newer than 2, which is published; sign again"):
                await office.call(office.operator, "PublishMembers", stale)


class TestRevoking:
    async def test_it_counts_from_the_next_call_on(self, office: Office) -> None:
        site = await office.join("site-1")
        await office.publish()
        assert await office.states(site) == {"site-1": "active"}
        await office.call(office.operator, "Revoke", pb.RevokeRequest(name="site-1"))
        assert office.floor.told == ["members changed", "revoked site-1"]
        with pytest.raises(Stranger, match="site site-1 was revoked by the operator"):
            await office.states(site)
        assert await office.states() == {"site-1": "revoked"}
        assert [member.status for member in (await office.publish()).members] == [REVOKED]

    async def test_a_revoked_site_comes_back_by_a_new_token(self, office: Office) -> None:
        await office.join("site-1")
        await office.publish()
        await office.call(office.operator, "Revoke", pb.RevokeRequest(name="site-1"))
        await office.publish()
        site = await office.join("site-1")
        assert await office.states(site) == {"site-1": "pending"}
        await office.publish()
        assert await office.states(site) == {"site-1": "active"}

    async def test_nobody(self, office: Office) -> None:
        with pytest.raises(Unknown, match="no member is named ghost"):
            await office.call(office.operator, "Revoke", pb.RevokeRequest(name="ghost"))

    async def test_the_last_operator(self, office: Office) -> None:
        with pytest.raises(NotAllowed, match="operator is the last operator"):
            await office.call(office.operator, "Revoke", pb.RevokeRequest(name="operator"))


class TestLooking:
    async def test_a_site_sees_only_itself(self, office: Office) -> None:
        site = await office.join("site-1")
        await office.join("site-2")
        reader = await office.join("ann", "reader")
        assert await office.states(site) == {"site-1": "pending"}
        assert await office.states(reader) == {"site-1": "pending", "site-2": "pending"}

    async def test_what_an_attached_site_shows(self, office: Office) -> None:
        site = await office.join("site-1")
        hello = Hello(software="atoll 0.1.0", capacity=Capacity(runs_at_once=2, labels={"zone": "eu"}))
        office.floor.sessions.attach(Session("site-1", hello))
        reply = await office.call(office.operator, "Sites", pb.SitesRequest())
        [state] = reply.sites
        assert (state.connected, list(state.runs), state.software) == (True, ["01RUN"], "atoll 0.1.0")
        assert state.capacity == hello.capacity
        assert state.last_heard_unix_s == pytest.approx(reply.server_unix_s - 10)
        assert state.certificate_expires_unix_s == site.expires_at.timestamp()
        assert reply.server_unix_s == pytest.approx(utc_now().timestamp(), abs=60)

    async def test_what_an_absent_site_shows(self, office: Office) -> None:
        await office.token("site-1")
        [state] = (await office.call(office.operator, "Sites", pb.SitesRequest())).sites
        assert (state.connected, state.last_heard_unix_s, state.certificate_expires_unix_s) == (False, 0, 0)
        assert not state.HasField("capacity")


class TestRenewing:
    async def test_old_and_new_are_both_good(self, office: Office) -> None:
        old = await office.join("site-1")
        new = await asyncio.to_thread(renew, old)
        assert new.certificate_pem != old.certificate_pem
        for identity in (old, new):
            assert await office.states(identity) == {"site-1": "pending"}

    async def test_people_renew_too(self, office: Office) -> None:
        ada = await office.join("ada", "researcher")
        assert (await asyncio.to_thread(renew, ada)).role == "researcher"

    async def test_the_revoked_do_not(self, office: Office) -> None:
        site = await office.join("site-1")
        office.store.revoke("site-1")
        with pytest.raises(Stranger, match="was revoked"):
            await asyncio.to_thread(renew, site)
