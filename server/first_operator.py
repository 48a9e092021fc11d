"""The first operator, whose identity lies in the server's own folder: it needs no token and no running server.

Whoever can read that folder holds the CA's key as well, so the identity gives away nothing that is not there already.
"""

from __future__ import annotations

import secrets
from datetime import timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from atoll.server.authority import Authority, Issued
from atoll.server.enrolment import record_of
from atoll.server.store import Store
from atoll.transport.enrolment import renewal_due
from atoll.transport.identity import Clock, Identity, holds_identity, load_identity, private_pem, save_identity, utc_now

OPERATOR = "operator"


def admit_operator(
    folder: Path, *, address: str, store: Store, authority: Authority, clock: Clock = utc_now
) -> Identity:
    """Enrols the first operator and stores its identity in `folder`."""
    secret_sha256 = secrets.token_bytes(32)  # of no secret at all: it is used up in the next line
    key, issued = _certify(authority)
    store.invite(OPERATOR, "operator", "", secret_sha256, clock() + timedelta(minutes=1))
    store.redeem(OPERATOR, secret_sha256, clock(), certificate=record_of(issued), signing_key=None)
    return _save(folder, address, authority, key, issued)


def renew_operator(folder: Path, *, address: str, store: Store, authority: Authority, clock: Clock = utc_now) -> bool:
    """Certifies the operator in `folder` anew where half of its certificate's life is over, or all of it.

    Called when the server starts, so that a server that was off for a month can still be operated. False where there
    was nothing to do: not due, moved away, or revoked.
    """
    if not holds_identity(folder):
        return False
    held = load_identity(folder, allow_expired=True)
    if not renewal_due(held, clock()):
        return False
    standing = store.lookup("operator", held.name)
    if standing is None or not standing.active or held.name != OPERATOR:
        return False
    key, issued = _certify(authority)
    store.record_certificate(OPERATOR, record_of(issued), clock())
    _save(folder, address, authority, key, issued)
    return True


def _certify(authority: Authority) -> tuple[ec.EllipticCurvePrivateKey, Issued]:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, OPERATOR)])
    csr = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, hashes.SHA256())
    return key, authority.issue(csr.public_bytes(Encoding.DER), name=OPERATOR, role="operator")


def _save(
    folder: Path, address: str, authority: Authority, key: ec.EllipticCurvePrivateKey, issued: Issued
) -> Identity:
    certificate = x509.load_der_x509_certificate(issued.certificate_der)
    identity = Identity(
        name=OPERATOR,
        role="operator",
        federation=authority.federation,
        organisation="",
        address=address,
        folder=folder,
        certificate_pem=certificate.public_bytes(Encoding.PEM),
        private_key_pem=private_pem(key),
        ca_pem=authority.ca.public_bytes(Encoding.PEM),
        federation_public_key=authority.federation_public_key,
        signing_key=None,
        expires_at=issued.expires_at,
    )
    save_identity(identity)
    return identity
