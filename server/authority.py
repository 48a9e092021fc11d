"""The online CA: certifies members for TLS, and the server itself.

Invariant: a member's certificate carries exactly one name, atoll://FEDERATION/ROLE/NAME, that the server chose (what a
request says about its subject is ignored), lasts at most 30 days and cannot be used as a server. The CA says nothing
about who belongs to the federation: that is the member list's, signed with the offline key which this file makes
and then leaves alone.
"""

from __future__ import annotations

import ipaddress
import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from atoll.transport.credentials import SERVER_NAME, ServerCertificate
from atoll.transport.enrolment import check_csr_size, member_uri
from atoll.transport.identity import (
    ROLES,
    Clock,
    make_private_folder,
    private_pem,
    read_private,
    utc_now,
    write_private,
)
from atoll.transport.members import FederationKey
from atoll.wire.errors import ConfigError, IdentityError, Malformed
from atoll.wire.names import check_organisation, check_site_name

MOST_VALID = timedelta(days=30)
CA_VALID = timedelta(days=3650)  # a new CA means that every member joins anew, so it outlives the others by far
BACKDATE = timedelta(minutes=5)  # a peer's clock may be this much behind

_ABOUT = "federation.json"
_CA_KEY = "ca_key.pem"
_CA = "ca.pem"
_SERVER = "server.pem"  # private key, then certificate
_ORGANISATION_CHARACTERS = 64  # X.509's upper bound; the field is for people, the whole name is in the member list


@dataclass(frozen=True, slots=True, kw_only=True)
class Issued:
    """A new certificate, with what the directory must record before it is handed out."""

    certificate_der: bytes
    serial: str  # lower-case hex
    expires_at: datetime


def init_federation(
    folder: Path, federation_key_folder: Path, name: str, addresses: Sequence[str], *, clock: Clock = utc_now
) -> FederationKey:
    """Makes a federation: its offline key in one folder, the online CA and the server's certificate in the other.

    Args:
        addresses: hosts under which the server is reached, for tools that check names; Atoll itself does not.

    Raises:
        ConfigError: a bad name, the folders are not apart, or one of them is in use.
        DiskFull, LocalError: a folder cannot be written.
    """
    check_site_name(name, "federation")
    if federation_key_folder.resolve().is_relative_to(folder.resolve()):
        raise ConfigError(
            f"the federation's key must lie apart from the server's data, and {federation_key_folder} is inside "
            f"{folder}: choose a folder that can be taken off this machine",
            key="federation-key",
            value=str(federation_key_folder),
        )
    if (folder / _ABOUT).exists():
        raise ConfigError(f"{folder} already holds a federation: choose another folder", key="home", value=str(folder))
    key = FederationKey.create(federation_key_folder, name)
    make_private_folder(folder)
    ca_key = ec.generate_private_key(ec.SECP256R1())
    write_private(folder / _CA_KEY, private_pem(ca_key))
    write_private(folder / _CA, _make_ca(name, ca_key, clock()).public_bytes(Encoding.PEM))
    about = {"federation": name, "federation_public_key": key.public_key.hex(), "addresses": list(addresses)}
    write_private(folder / _ABOUT, json.dumps(about, indent=2).encode() + b"\n")
    Authority.load(folder, clock=clock).server_certificate()
    return key


@dataclass(slots=True, kw_only=True)
class Authority:
    """The online CA in its folder. Safe to use from several threads."""

    folder: Path
    federation: str
    federation_public_key: bytes  # Ed25519, 32 bytes
    addresses: tuple[str, ...]
    ca: x509.Certificate
    _ca_key: ec.EllipticCurvePrivateKey = field(repr=False)
    _clock: Clock
    _shown: ServerCertificate | None = field(default=None, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @classmethod
    def load(cls, folder: Path, *, clock: Clock = utc_now) -> Authority:
        """The CA that `init_federation` made in `folder`.

        Raises:
            IdentityError: it is missing, damaged, expired, or readable by others.
        """
        try:
            about = json.loads(read_private(folder / _ABOUT))
            key = load_pem_private_key(read_private(folder / _CA_KEY), password=None)
            ca = x509.load_pem_x509_certificate(read_private(folder / _CA))
            public_key = bytes.fromhex(about["federation_public_key"])
            federation, addresses = str(about["federation"]), tuple(map(str, about["addresses"]))
        except (ValueError, KeyError, TypeError, UnsupportedAlgorithm):
            raise IdentityError(f"{folder} is damaged: restore it from a backup") from None
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != ca.public_key():
            raise IdentityError(f"{folder}: the CA's key and certificate do not fit: restore them from a backup")
        if ca.not_valid_after_utc <= clock():
            raise IdentityError(f"the CA in {folder} expired at {ca.not_valid_after_utc}: set the federation up anew")
        return cls(
            folder=folder,
            federation=federation,
            federation_public_key=public_key,
            addresses=addresses,
            ca=ca,
            _ca_key=key,
            _clock=clock,
        )

    @property
    def ca_der(self) -> bytes:
        return self.ca.public_bytes(Encoding.DER)

    @property
    def ca_pem(self) -> bytes:
        return self.ca.public_bytes(Encoding.PEM)

    def issue(
        self, csr_der: bytes, *, name: str, role: str, organisation: str = "", valid: timedelta = MOST_VALID
    ) -> Issued:
        """A member's certificate for the key of a request; name and role are the server's word, not the request's.

        Raises:
            Malformed: the request does not verify, or its key is not P-256; a bad name.
            TooLarge: the request.
        """
        if role not in ROLES or not timedelta(0) < valid <= MOST_VALID:
            raise ValueError(f"no certificate for role {role!r} and {valid}")  # the caller's mistake, never a peer's
        check_site_name(name, "name")
        subject = [x509.NameAttribute(NameOID.COMMON_NAME, name)]
        if organisation:
            check_organisation(organisation)
            short = organisation[:_ORGANISATION_CHARACTERS]
            subject.append(x509.NameAttribute(NameOID.ORGANIZATION_NAME, short))
        certificate = self._sign(
            _read_csr(csr_der, name),
            subject=x509.Name(subject),
            names=[x509.UniformResourceIdentifier(member_uri(self.federation, role, name))],
            usage=ExtendedKeyUsageOID.CLIENT_AUTH,
            valid=valid,
        )
        return Issued(
            certificate_der=certificate.public_bytes(Encoding.DER),
            serial=f"{certificate.serial_number:x}",
            expires_at=certificate.not_valid_after_utc,
        )

    def server_certificate(self) -> ServerCertificate:
        """What the server shows now; renewed, and stored, when half of its life is over.

        Raises:
            DiskFull, LocalError: a new one cannot be written.
        """
        with self._lock:
            shown = self._shown or self._stored()
            if shown is None or self._clock() >= _half_life(shown):
                shown = self._make_server_certificate()
                write_private(self.folder / _SERVER, shown.private_key_pem + shown.certificate_pem)
            self._shown = shown
            return shown

    def _stored(self) -> ServerCertificate | None:
        """What lies on the disk; None where it is missing or damaged, for a new one serves as well."""
        path = self.folder / _SERVER
        if not path.exists():
            return None
        pem = read_private(path)
        cut = max(pem.find(b"-----BEGIN CERTIFICATE-----"), 0)
        try:
            key = load_pem_private_key(pem[:cut], password=None)
            certificate = x509.load_pem_x509_certificate(pem[cut:])
            certificate.verify_directly_issued_by(self.ca)
        except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
            return None
        if key.public_key() != certificate.public_key():
            return None
        return ServerCertificate(certificate_pem=pem[cut:], private_key_pem=pem[:cut], ca_pem=self.ca_pem)

    def _make_server_certificate(self) -> ServerCertificate:
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._sign(
            key.public_key(),
            subject=x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, SERVER_NAME)]),
            names=[x509.DNSName(SERVER_NAME), *map(_host_name, self.addresses)],
            usage=ExtendedKeyUsageOID.SERVER_AUTH,
            valid=MOST_VALID,
        )
        pem = certificate.public_bytes(Encoding.PEM)
        return ServerCertificate(certificate_pem=pem, private_key_pem=private_pem(key), ca_pem=self.ca_pem)

    def _sign(
        self,
        key: ec.EllipticCurvePublicKey,
        *,
        subject: x509.Name,
        names: Sequence[x509.GeneralName],
        usage: x509.ObjectIdentifier,
        valid: timedelta,
    ) -> x509.Certificate:
        now = self._clock()
        builder = x509.CertificateBuilder(
            issuer_name=self.ca.subject,
            subject_name=subject,
            public_key=key,
            serial_number=x509.random_serial_number(),
            not_valid_before=now - BACKDATE,
            not_valid_after=min(now - BACKDATE + valid, self.ca.not_valid_after_utc),
        )
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(_key_usage(signs_certificates=False), critical=True)
        builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=True)
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._ca_key.public_key())
        return builder.add_extension(issuer, critical=False).sign(self._ca_key, hashes.SHA256())


def _half_life(shown: ServerCertificate) -> datetime:
    certificate = x509.load_pem_x509_certificate(shown.certificate_pem)
    starts_at, expires_at = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    return starts_at + (expires_at - starts_at) / 2


def _make_ca(name: str, key: ec.EllipticCurvePrivateKey, now: datetime) -> x509.Certificate:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"Atoll {name}"[:64])])
    builder = x509.CertificateBuilder(
        issuer_name=subject,
        subject_name=subject,
        public_key=key.public_key(),
        serial_number=x509.random_serial_number(),
        not_valid_before=now - BACKDATE,
        not_valid_after=now + CA_VALID,
    )
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_key_usage(signs_certificates=True), critical=True)
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    return builder.add_extension(identifier, critical=False).sign(key, hashes.SHA256())


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _read_csr(der: bytes, name: str) -> ec.EllipticCurvePublicKey:
    """The key of a request that proves to hold it."""
    check_csr_size(der)
    try:
        csr = x509.load_der_x509_csr(der)
        key = csr.public_key()
        valid = csr.is_signature_valid
    except (ValueError, TypeError, UnsupportedAlgorithm, InvalidSignature):
        raise Malformed(f"{name}: the certificate request cannot be read", field="csr") from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise Malformed(f"{name}: the certificate request must be for a P-256 key", field="csr", bound="P-256")
    if not valid:
        raise Malformed(f"{name}: the certificate request is not signed by its own key", field="csr")
    return key


def _host_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
