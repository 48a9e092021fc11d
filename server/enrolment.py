"""How members get certificates: the first with a one-time token, the next ones with the one before.

Invariant: what is handed out is recorded first, so a certificate that the TLS port would take is always one that the
operator can see and revoke. A token is used up in the same transaction; a crash before it leaves the token good.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from atoll.server.authority import Authority, Issued
from atoll.server.records import Certificate
from atoll.server.security import current_caller
from atoll.server.store import Store
from atoll.transport.enrolment import check_enrolment, secret_sha256
from atoll.transport.identity import Clock, utc_now
from atoll.wire import enrolment_pb2 as pb
from atoll.wire.names import check_site_name

log = logging.getLogger(__name__)


def record_of(issued: Issued) -> Certificate:
    """What the store keeps of a new certificate."""
    return Certificate(serial=issued.serial, expires=issued.expires_at)


class EnrolmentService:
    """Servicer of atoll.wire.Enrolment: the only one that strangers reach."""

    def __init__(self, *, store: Store, authority: Authority, clock: Clock = utc_now) -> None:
        self._store, self._authority, self._clock = store, authority, clock

    async def Enrol(self, request: pb.EnrolRequest, context: Any) -> pb.EnrolReply:
        """A certificate for the bearer of a token.

        Raises:
            BadToken: wrong, used, expired, or for another name.
            Malformed: the certificate request or the proof of the signing key does not hold; the token stays good.
        """
        reply = await asyncio.to_thread(self._enrol, request)
        log.info("%s of %s joined", request.name, reply.organisation or "no organisation")
        return reply

    def _enrol(self, request: pb.EnrolRequest) -> pb.EnrolReply:
        name, secret = check_site_name(request.name, "name"), secret_sha256(request.secret)
        invite = self._store.invited(name, secret, self._clock())
        check_enrolment(request, invite.role)
        issued = self._authority.issue(request.csr, name=name, role=invite.role, organisation=invite.organisation)
        self._store.redeem(
            name,
            secret,
            self._clock(),
            certificate=record_of(issued),
            signing_key=request.signing_key or None,
        )
        return pb.EnrolReply(
            certificate=issued.certificate_der,
            ca_certificate=self._authority.ca_der,
            federation_public_key=self._authority.federation_public_key,
            organisation=invite.organisation,
        )


class RenewalService:
    """Servicer of atoll.wire.Renewal: every member, for its own name."""

    def __init__(self, *, store: Store, authority: Authority, clock: Clock = utc_now) -> None:
        self._store, self._authority, self._clock = store, authority, clock

    async def Renew(self, request: pb.RenewRequest, context: Any) -> pb.RenewReply:
        """A new certificate for the caller; the present one stays good until it expires.

        Raises:
            Malformed: the certificate request cannot be used.
            NotAllowed: the caller was revoked meanwhile.
            TooLarge: it renews far too often.
        """
        caller = current_caller.get()
        reply = await asyncio.to_thread(self._renew, caller.role, caller.name, request.csr)
        log.info("%s %s renewed its certificate", caller.role, caller.name)
        return reply

    def _renew(self, role: str, name: str, csr: bytes) -> pb.RenewReply:
        organisation = self._store.member(name).organisation
        issued = self._authority.issue(csr, name=name, role=role, organisation=organisation)
        self._store.record_certificate(name, record_of(issued), self._clock())
        return pb.RenewReply(certificate=issued.certificate_der, ca_certificate=self._authority.ca_der)
