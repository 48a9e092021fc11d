"""What an operator does: admit, publish member lists, revoke, look.

Invariant: the server can hold a member list back but make none: what it publishes carries the signature of the
offline federation key, whose public half it was given at `atoll server init`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from datetime import datetime, timedelta
from typing import Any, Protocol

from atoll.server.authority import Authority
from atoll.server.membership import SiteState, changes_to, states_of
from atoll.server.records import MemberRow
from atoll.server.security import current_caller
from atoll.server.sessions import Sessions
from atoll.server.settings import ServerSettings
from atoll.server.store import Store
from atoll.transport.enrolment import SECRET_BYTES, encode_token, secret_sha256
from atoll.transport.identity import ROLES, Clock, fingerprint, utc_now
from atoll.transport.members import verify_members
from atoll.wire import admin_pb2 as pb
from atoll.wire.enrolment_pb2 import EnrolmentToken
from atoll.wire.errors import Malformed
from atoll.wire.members_pb2 import MemberList, SignedMemberList
from atoll.wire.names import check_organisation, check_site_name

log = logging.getLogger(__name__)

TOKEN_LIFE_S = 86_400  # the longest, and the default: a token travels by hand within a day
SHORTEST_TOKEN_LIFE_S = 60


class Floor(Protocol):
    """Who is attached now, and who must be told. `Coordinator` is one."""

    @property
    def sessions(self) -> Sessions:
        """Those of the sites that are attached."""
        ...

    async def members_changed(self) -> None:
        """A new member list is stored: push it."""
        ...

    def revoked(self, name: str) -> None:
        """End the session of `name`, if it has one."""
        ...

    def runs_of(self, site: str) -> list[str]:
        """Open runs that a site works on."""
        ...

    def last_heard_s(self, site: str) -> float | None:
        """Seconds since a site was heard; None where it never was since the server started."""
        ...


class AdminService:
    """Servicer of atoll.wire.Admin."""

    def __init__(
        self,
        *,
        settings: ServerSettings,
        store: Store,
        authority: Authority,
        floor: Floor,
        clock: Clock = utc_now,
    ) -> None:
        self._settings, self._store, self._authority = settings, store, authority
        self._floor, self._clock = floor, clock

    async def Add(self, request: pb.AddRequest, context: Any) -> pb.AddReply:
        """A one-time token for a new name. It is nowhere but in this answer: the server keeps only its SHA-256.

        Raises:
            Malformed: name, role, organisation or life of the token are out of bounds.
            NotAllowed: the name is taken.
        """
        _check_add(request)
        secret = secrets.token_bytes(SECRET_BYTES)
        expires = self._clock() + timedelta(seconds=request.valid_s or TOKEN_LIFE_S)
        await asyncio.to_thread(
            self._store.invite, request.name, request.role, request.organisation, secret_sha256(secret), expires
        )
        log.info("%s invited %s %s", current_caller.get().name, request.role, request.name)
        return pb.AddReply(token=self._token(request, secret, expires))

    def _token(self, request: pb.AddRequest, secret: bytes, expires: datetime) -> str:
        return encode_token(
            EnrolmentToken(
                federation=self._settings.federation,
                name=request.name,
                role=request.role,
                address=self._settings.address,
                enrolment_address=self._settings.enrolment_address,
                secret=secret,
                federation_fingerprint=fingerprint(self._authority.federation_public_key),
                ca_certificate=self._authority.ca_der,
                expires_at_unix_s=int(expires.timestamp()),
            )
        )

    async def PendingMembers(self, request: pb.PendingRequest, context: Any) -> pb.PendingReply:
        """What the keeper of the federation key is asked to sign, on top of the newest list."""
        signed, sites = await asyncio.to_thread(self._known)
        changes = changes_to(_members_of(signed), sites)
        return pb.PendingReply(current=signed, pending=changes.pending, revoked=changes.revoked)

    async def PublishMembers(self, request: SignedMemberList, context: Any) -> pb.PublishReply:
        """Stores a new member list and pushes it to every attached site. The newest list again is harmless.

        Raises:
            Malformed: the federation's key did not sign exactly this, or it is of another federation.
            Stale: it is not newer than the newest list.
        """
        members = verify_members(self._authority.federation_public_key, request, newer_than=0)
        if members.federation != self._settings.federation:
            raise Malformed(
                f"member list {members.version} is of federation {members.federation}, this is "
                f"{self._settings.federation}: sign with the key of this federation",
                field="federation",
                value=members.federation,
                bound=self._settings.federation,
            )
        await asyncio.to_thread(self._store.save_member_list, members.version, request.SerializeToString())
        log.info("%s published member list %d", current_caller.get().name, members.version)
        await self._floor.members_changed()
        return pb.PublishReply(version=members.version)

    async def Revoke(self, request: pb.RevokeRequest, context: Any) -> pb.RevokeReply:
        """Takes certificates and invitation from a name and ends its session. Again is harmless.

        Raises:
            Unknown: nobody has that name.
            NotAllowed: it is the last operator.
        """
        name = check_site_name(request.name, "name")
        await asyncio.to_thread(self._store.revoke, name)
        log.warning("%s revoked %s", current_caller.get().name, name)
        self._floor.revoked(name)
        return pb.RevokeReply()

    async def Sites(self, request: pb.SitesRequest, context: Any) -> pb.SitesReply:
        """All sites by name; a site sees only itself."""
        caller = current_caller.get()
        signed, sites = await asyncio.to_thread(self._known)
        states = states_of(sites, _members_of(signed))
        now = self._clock()
        shown = [site for site in sites if caller.role != "site" or site.name == caller.name]
        return pb.SitesReply(
            sites=[self._describe(site, states[site.name], now) for site in shown], server_unix_s=now.timestamp()
        )

    def _describe(self, site: MemberRow, state: SiteState, now: datetime) -> pb.SiteState:
        ago_s = self._floor.last_heard_s(site.name)
        session = self._floor.sessions.get(site.name)
        expires = site.certificate_expires
        return pb.SiteState(
            site=site.name,
            organisation=site.organisation,
            state=state,
            connected=session is not None,
            last_heard_unix_s=0 if ago_s is None else now.timestamp() - ago_s,
            capacity=None if session is None else session.hello.capacity,
            runs=self._floor.runs_of(site.name),
            certificate_expires_unix_s=0 if expires is None else expires.timestamp(),
            software="" if session is None else session.hello.software,
        )

    def _known(self) -> tuple[SignedMemberList | None, list[MemberRow]]:
        signed = self._store.member_list()
        return None if signed is None else SignedMemberList.FromString(signed), self._store.sites()


def _members_of(signed: SignedMemberList | None) -> MemberList | None:
    """The list inside; it was verified before it was stored."""
    return None if signed is None else MemberList.FromString(signed.member_list)


def _check_add(request: pb.AddRequest) -> None:
    check_site_name(request.name, "name")
    if request.role not in ROLES:
        raise Malformed(
            f"there is no role {request.role!r}: choose one of {', '.join(ROLES)}",
            field="role",
            value=request.role,
            bound=", ".join(ROLES),
        )
    if request.organisation or request.role == "site":
        check_organisation(request.organisation)
    if request.valid_s and not SHORTEST_TOKEN_LIFE_S <= request.valid_s <= TOKEN_LIFE_S:
        raise Malformed(
            f"a token lives {SHORTEST_TOKEN_LIFE_S} to {TOKEN_LIFE_S} s, not {request.valid_s}",
            field="valid_s",
            value=request.valid_s,
            bound=f"{SHORTEST_TOKEN_LIFE_S} to {TOKEN_LIFE_S}",
        )
