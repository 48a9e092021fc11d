"""What an operator does at the server: admit, revoke, look, publish member lists."""

from __future__ import annotations

from atoll.client.connection import CALL_TIMEOUT_S, connect
from atoll.client.people import Person
from atoll.wire import admin_pb2, admin_pb2_grpc, members_pb2


async def add_member(person: Person, *, name: str, role: str, organisation: str, valid_s: int) -> str:
    """A one-time token for `name`, good for `valid_s` seconds.

    Raises:
        RemoteError: the server refuses (a name that is taken, a role that may not) or cannot be reached.
    """
    request = admin_pb2.AddRequest(name=name, organisation=organisation, role=role, valid_s=valid_s)
    async with connect(person) as channel:
        reply: admin_pb2.AddReply = await admin_pb2_grpc.AdminStub(channel).Add(request, timeout=CALL_TIMEOUT_S)
    return reply.token


async def list_sites(person: Person) -> admin_pb2.SitesReply:
    """The federation's sites and their state. Raises RemoteError as `add_member` does."""
    async with connect(person) as channel:
        stub = admin_pb2_grpc.AdminStub(channel)
        reply: admin_pb2.SitesReply = await stub.Sites(admin_pb2.SitesRequest(), timeout=CALL_TIMEOUT_S)
    return reply


async def revoke(person: Person, *, name: str) -> None:
    """Shuts a member out at once. Raises RemoteError as `add_member` does."""
    async with connect(person) as channel:
        await admin_pb2_grpc.AdminStub(channel).Revoke(admin_pb2.RevokeRequest(name=name), timeout=CALL_TIMEOUT_S)


async def pending_members(person: Person) -> admin_pb2.PendingReply:
    """The current member list, who waits to be on it, and who is to leave it. Raises RemoteError as `add_member` does."""
    async with connect(person) as channel:
        stub = admin_pb2_grpc.AdminStub(channel)
        reply: admin_pb2.PendingReply = await stub.PendingMembers(admin_pb2.PendingRequest(), timeout=CALL_TIMEOUT_S)
    return reply


async def publish_members(person: Person, signed: members_pb2.SignedMemberList) -> int:
    """Hands a signed list to the server, which pushes it to every site, and returns its version.

    Raises:
        RemoteError: as `add_member`; also a list that is not newer, or that the federation's key did not sign.
    """
    async with connect(person) as channel:
        reply: admin_pb2.PublishReply = await admin_pb2_grpc.AdminStub(channel).PublishMembers(
            signed, timeout=CALL_TIMEOUT_S
        )
    return reply.version
