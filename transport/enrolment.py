"""How a site or a person joins with a one-time token, and how certificates are renewed.

Invariant: private keys are made here and never leave; the server is believed only when it holds the certificate of the
token's CA, and the federation's key only when its fingerprint is the token's. Whoever has the token before its use can
join under its name, so it travels as a password does.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Collection
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID
from google.protobuf.message import DecodeError

from atoll.transport.credentials import (
    explain_connection_error,
    explain_unavailable,
    open_blocking_channel,
    open_enrolment_channel,
)
from atoll.transport.identity import (
    ROLES,
    Identity,
    fingerprint,
    format_fingerprint,
    holds_identity,
    load_identity,
    load_signing_key,
    private_pem,
    save_identity,
    utc_now,
)
from atoll.wire import enrolment_pb2 as pb
from atoll.wire import enrolment_pb2_grpc as rpc
from atoll.wire.errors import BadToken, IdentityError, Malformed, RemoteError, Stranger, TooLarge, Unavailable, from_rpc
from atoll.wire.names import check_organisation, check_site_name

SITE_ROLES = frozenset({"site"})
USER_ROLES = frozenset({"researcher", "reader", "operator"})

SECRET_BYTES = 32
TOKEN_CHARACTERS = 8192  # a token with the CA's certificate has about 1,000
ADDRESS_CHARACTERS = 261  # a host name of 255, a colon, a port
CERTIFICATE_BYTES = 16 << 10  # one that Atoll issues has about 600
CSR_BYTES = 4096  # a P-256 request has about 250
ENROL_TIMEOUT_S = 30.0

_TOKEN_PREFIX = "atoll1-"
_PROOF_CONTEXT = b"atoll/enrol/1\0"


def encode_token(token: pb.EnrolmentToken) -> str:
    """The printable form of a token: one word of letters, digits, - and _."""
    return _TOKEN_PREFIX + base64.urlsafe_b64encode(token.SerializeToString()).decode().rstrip("=")


def decode_token(text: str) -> pb.EnrolmentToken:
    """The token behind its printable form.

    Raises:
        BadToken: it was cut, changed or is something else.
    """
    text = "".join(text.split())  # a terminal or a mail may have wrapped it
    if not text.startswith(_TOKEN_PREFIX) or len(text) > TOKEN_CHARACTERS:
        raise BadToken(f'a token starts with "{_TOKEN_PREFIX}": copy the whole line that `atoll site add` printed')
    body = text.removeprefix(_TOKEN_PREFIX)
    try:
        token = pb.EnrolmentToken.FromString(base64.b64decode(body + "=" * (-len(body) % 4), b"-_", validate=True))
        x509.load_der_x509_certificate(token.ca_certificate)
        whole = len(token.secret) == SECRET_BYTES and len(token.federation_fingerprint) == 32 and token.role in ROLES
        whole = whole and max(len(token.address), len(token.enrolment_address)) <= ADDRESS_CHARACTERS
        check_site_name(token.name, "name")
        check_site_name(token.federation, "federation")
    except (binascii.Error, DecodeError, ValueError, Malformed):
        whole, token = False, pb.EnrolmentToken()
    if not whole:
        raise BadToken("the token is damaged: copy the whole line that `atoll site add` or `atoll user add` printed")
    return token


def secret_sha256(secret: bytes) -> bytes:
    """What a server keeps of a token's secret."""
    return hashlib.sha256(secret).digest()


def enrol(token: str, folder: Path, *, roles: Collection[str]) -> Identity:
    """Joins the token's federation: makes keys, has them certified, stores the identity in `folder`. Blocks.

    Joining again under the same name keeps the signing key, so the member list stays as it is.

    Args:
        token: as printed by `atoll site add` or `atoll user add`.
        roles: those that the caller's command is for, SITE_ROLES or USER_ROLES.

    Raises:
        BadToken: damaged, wrong, used, expired, or for another command.
        Stranger: the server is not the one that the token names.
        Malformed, TooLarge: it answers with a certificate or an organisation that is none.
        Unavailable: nobody answers at the token's address.
        IdentityError: `folder` holds another identity.
        DiskFull, LocalError: the folder cannot be written.
    """
    ticket = decode_token(token)
    if ticket.role not in roles:
        command = "atoll site join" if ticket.role == "site" else "atoll user join"
        raise BadToken(f"this token is for a {ticket.role}: use `{command}`", field="role", value=ticket.role)
    signing_key = _signing_key(ticket, folder)
    tls_key = ec.generate_private_key(ec.SECP256R1())
    request = enrolment_request(ticket.name, ticket.secret, tls_key, signing_key)
    reply = _call_enrol(ticket, request)
    _check_federation(ticket, reply)
    if reply.organisation:
        check_organisation(reply.organisation)
    certificate = _check_certificate(reply.certificate, reply.ca_certificate, tls_key, expected_uri(ticket))
    identity = Identity(
        name=ticket.name,
        role=ticket.role,
        federation=ticket.federation,
        organisation=reply.organisation,
        address=ticket.address,
        folder=folder,
        certificate_pem=certificate.public_bytes(Encoding.PEM),
        private_key_pem=private_pem(tls_key),
        ca_pem=_to_pem(reply.ca_certificate),
        federation_public_key=reply.federation_public_key,
        signing_key=signing_key,
        expires_at=certificate.not_valid_after_utc,
    )
    save_identity(identity)
    return identity


def renewal_due(identity: Identity, now: datetime) -> bool:
    """Whether half of the certificate's life is over."""
    return now >= renewal_time(identity)


def renewal_time(identity: Identity) -> datetime:
    """The middle of the certificate's life: two weeks are left to find out why renewal fails."""
    starts_at = x509.load_pem_x509_certificate(identity.certificate_pem).not_valid_before_utc
    return starts_at + (identity.expires_at - starts_at) / 2


def renew(identity: Identity, *, timeout_s: float = ENROL_TIMEOUT_S) -> Identity:
    """The identity with a new TLS key and certificate, stored. The old one stays good until it expires. Blocks.

    Raises:
        IdentityError: the certificate has expired already.
        DiskFull, LocalError: the folder cannot be written; the old certificate stays.
        RemoteError: the server refuses or cannot be reached.
    """
    tls_key = ec.generate_private_key(ec.SECP256R1())
    request = pb.RenewRequest(csr=_make_csr(identity.name, tls_key))
    with open_blocking_channel(identity) as channel:
        try:
            reply: pb.RenewReply = rpc.RenewalStub(channel).Renew(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise explain_connection_error(error, identity) from error
    if _to_pem(reply.ca_certificate) != identity.ca_pem:
        raise Stranger("the server answered the renewal with another CA than the one pinned here: ask its operator")
    uri = member_uri(identity.federation, identity.role, identity.name)
    certificate = _check_certificate(reply.certificate, reply.ca_certificate, tls_key, uri)
    renewed = replace(
        identity,
        certificate_pem=certificate.public_bytes(Encoding.PEM),
        private_key_pem=private_pem(tls_key),
        expires_at=certificate.not_valid_after_utc,
    )
    save_identity(renewed)
    return renewed


def member_uri(federation: str, role: str, name: str) -> str:
    """The name in a member's certificate."""
    return f"atoll://{federation}/{role}/{name}"


def expected_uri(token: pb.EnrolmentToken) -> str:
    """The name that the certificate for a token must carry."""
    return member_uri(token.federation, token.role, token.name)


def enrolment_request(
    name: str, secret: bytes, tls_key: ec.EllipticCurvePrivateKey, signing_key: Ed25519PrivateKey | None
) -> pb.EnrolRequest:
    """What a joining site sends: its requests, and the proof that it holds the signing key."""
    request = pb.EnrolRequest(name=name, secret=secret, csr=_make_csr(name, tls_key))
    if signing_key is not None:
        request.signing_key = signing_key.public_key().public_bytes_raw()
        request.signing_key_proof = signing_key.sign(_proof_message(name, request.csr))
    return request


def check_enrolment(request: pb.EnrolRequest, role: str) -> None:
    """For the server: sizes, and the proof of the signing key. The CSR itself is checked when it is certified.

    Raises:
        Malformed: a site without a signing key or with a proof that does not hold; a person with one.
        TooLarge: the CSR.
    """
    check_csr_size(request.csr)
    if role != "site":
        if request.signing_key or request.signing_key_proof:
            raise Malformed(f"a {role} has no signing key", field="signing_key")
        return
    try:
        key = Ed25519PublicKey.from_public_bytes(request.signing_key)
        key.verify(request.signing_key_proof, _proof_message(request.name, request.csr))
    except (ValueError, InvalidSignature):
        raise Malformed(
            f"site {request.name}: the signing key has no valid proof, so it is not shown to be the caller's",
            site=request.name,
            field="signing_key_proof",
        ) from None


def check_csr_size(csr: bytes) -> None:
    """Raises TooLarge before anything is parsed."""
    if len(csr) > CSR_BYTES:
        raise TooLarge("the certificate request is too large", field="csr", value=len(csr), bound=CSR_BYTES)


def _proof_message(name: str, csr: bytes) -> bytes:
    return _PROOF_CONTEXT + name.encode() + b"\0" + hashlib.sha256(csr).digest()


def _make_csr(name: str, key: ec.EllipticCurvePrivateKey) -> bytes:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = x509.CertificateSigningRequestBuilder().subject_name(subject)
    return builder.sign(key, hashes.SHA256()).public_bytes(Encoding.DER)


def _signing_key(ticket: pb.EnrolmentToken, folder: Path) -> Ed25519PrivateKey | None:
    """The key that the folder has from an earlier joining under this name, or a new one; None for persons."""
    if holds_identity(folder):
        held = load_identity(folder, allow_expired=True)
        if (held.federation, held.role, held.name) != (ticket.federation, ticket.role, ticket.name):
            raise IdentityError(
                f"{folder} holds the identity of {held.role} {held.name} in federation {held.federation}, and the token "
                f"is for {ticket.role} {ticket.name} in {ticket.federation}: choose another --home"
            )
        if fingerprint(held.federation_public_key) != ticket.federation_fingerprint:
            raise IdentityError(
                f"{folder} pins another key of federation {held.federation}: if the federation was set up anew, "
                "choose another --home; if not, somebody forged the token"
            )
    if ticket.role != "site":
        return None
    return load_signing_key(folder) or Ed25519PrivateKey.generate()


def _call_enrol(ticket: pb.EnrolmentToken, request: pb.EnrolRequest) -> pb.EnrolReply:
    with open_enrolment_channel(ticket.enrolment_address, _to_pem(ticket.ca_certificate)) as channel:
        try:
            reply: pb.EnrolReply = rpc.EnrolmentStub(channel).Enrol(request, timeout=ENROL_TIMEOUT_S)
        except grpc.RpcError as error:
            raise _explain_enrolment(error, ticket) from error
    return reply


def _explain_enrolment(error: grpc.RpcError, ticket: pb.EnrolmentToken) -> RemoteError:
    refusal = from_rpc(error)
    if not isinstance(refusal, Unavailable):
        return refusal
    return explain_unavailable(
        refusal,
        address=ticket.enrolment_address,
        who=f"{ticket.role} {ticket.name}",
        rejoin="ask the operator for a new token",
    )


def _check_federation(ticket: pb.EnrolmentToken, reply: pb.EnrolReply) -> None:
    if reply.ca_certificate != ticket.ca_certificate:
        raise Stranger("the server answered with another CA than the token's: ask the operator for a new token")
    if fingerprint(reply.federation_public_key) != ticket.federation_fingerprint:
        raise Stranger(
            f"the server shows a federation key with the fingerprint {format_fingerprint(reply.federation_public_key)}, "
            "and the token pins another: do not join, tell the operator",
            field="federation_public_key",
            bound=ticket.federation_fingerprint.hex(),
        )


def _check_certificate(der: bytes, ca_der: bytes, key: ec.EllipticCurvePrivateKey, uri: str) -> x509.Certificate:
    """The certificate that a server made for `key`, when it says what was asked for and runs now."""
    if len(der) > CERTIFICATE_BYTES:
        raise TooLarge(
            "the server's certificate is too large", field="certificate", value=len(der), bound=CERTIFICATE_BYTES
        )
    try:
        certificate = x509.load_der_x509_certificate(der)
        certificate.verify_directly_issued_by(x509.load_der_x509_certificate(ca_der))
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        fits = certificate.public_key() == key.public_key()
        fits = fits and names.get_values_for_type(x509.UniformResourceIdentifier) == [uri]
    except (ValueError, TypeError, InvalidSignature, x509.ExtensionNotFound):
        raise Malformed("the server answered with a certificate that does not verify: tell its operator") from None
    if not fits:
        raise Malformed(f"the server answered with a certificate that is not the one asked for ({uri})", bound=uri)
    if not certificate.not_valid_before_utc - timedelta(minutes=5) <= utc_now() < certificate.not_valid_after_utc:
        raise Malformed(
            f"the new certificate runs from {certificate.not_valid_before_utc} to {certificate.not_valid_after_utc} and "
            f"the clock here says {utc_now():%Y-%m-%d %H:%M} UTC: set this machine's clock, then ask for a new token",
            field="clock",
        )
    return certificate


def _to_pem(der: bytes) -> bytes:
    return x509.load_der_x509_certificate(der).public_bytes(Encoding.PEM)
