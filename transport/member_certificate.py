"""Whom a TLS peer's certificate names: atoll://FEDERATION/ROLE/NAME, and nothing that a message says."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import urlsplit

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from atoll.transport.identity import ROLES
from atoll.wire.errors import Stranger


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberCertificate:
    federation: str
    role: str  # one of ROLES
    name: str
    serial: str  # lower-case hex
    expires_at: datetime
    key_sha256: bytes  # of the public key (SubjectPublicKeyInfo)


def certificate_of(context: Any) -> MemberCertificate:
    """That of the caller of a gRPC method.

    Raises:
        Stranger: there is none, or it names no member.
    """
    found = list(context.auth_context().get("x509_pem_cert", ()))
    if len(found) != 1:
        raise Stranger("the caller shows no certificate: join the federation first")
    return read_certificate(found[0])


@functools.lru_cache(maxsize=4096)  # a peer shows the same certificate on each call; parsing takes 50 us
def read_certificate(pem: bytes) -> MemberCertificate:
    """What a certificate says of its holder. Raises Stranger where it names no member."""
    certificate = x509.load_pem_x509_certificate(pem)
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        names = x509.SubjectAlternativeName([])
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    parts = urlsplit(uris[0]) if len(uris) == 1 else urlsplit("")
    role, _, name = parts.path.removeprefix("/").partition("/")
    if parts.scheme != "atoll" or not parts.netloc or role not in ROLES or not name:
        raise Stranger("the caller's certificate names no member of a federation (atoll://FEDERATION/ROLE/NAME)")
    key = certificate.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return MemberCertificate(
        federation=parts.netloc,
        role=role,
        name=name,
        serial=f"{certificate.serial_number:x}",
        expires_at=certificate.not_valid_after_utc,
        key_sha256=hashlib.sha256(key).digest(),
    )
