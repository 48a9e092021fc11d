"""Who this machine or person is: keys, certificates and the pinned federation key, in one folder.

Invariant: nothing in the folder can be read by another user, and the certificate always fits the private key beside
it. Both stand in one file that is replaced in one step, so a crash during renewal leaves the old pair or the new one.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from atoll.transport.durable import disk_errors, private_folder, sync_folder
from atoll.wire.errors import IdentityError

ROLES = ("operator", "site", "researcher", "reader")
FINGERPRINT_GROUP = 4  # hex digits between blanks, as people read card numbers to each other

_ABOUT = "identity.json"  # what is not secret
_TLS = "tls.pem"  # private key, then certificate: replaced together
_CA = "ca.pem"
_SIGNING = "signing_key.pem"  # Ed25519, sites only
_GROUP_OR_OTHERS = 0o077

Clock = Callable[[], datetime]


def utc_now() -> datetime:
    """The present, with its time zone."""
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """One name in one federation, with all that is needed to prove it."""

    name: str
    role: str  # one of ROLES
    federation: str
    organisation: str  # empty for a person
    address: str  # host:port of the server's mutual-TLS port
    folder: Path
    certificate_pem: bytes
    private_key_pem: bytes = field(repr=False)  # P-256, for TLS only
    ca_pem: bytes = field(repr=False)
    federation_public_key: bytes  # Ed25519, 32 bytes, pinned at enrolment
    signing_key: Ed25519PrivateKey | None = field(repr=False)  # sites only
    expires_at: datetime


def how_to_rejoin(role: str, name: str) -> str:
    """The sentence that tells how an identity without a valid certificate gets a new one."""
    command = "site" if role == "site" else "user"
    return f"ask the operator for a token (`atoll {command} add {name}`) and run `atoll {command} join TOKEN`"


def fingerprint(public_key: bytes) -> bytes:
    """SHA-256 of a raw public key, 32 bytes: what a token pins."""
    return hashlib.sha256(public_key).digest()


def format_fingerprint(public_key: bytes) -> str:
    """The fingerprint of a raw public key for people to compare: 16 groups of 4 hex digits."""
    text = fingerprint(public_key).hex()
    return " ".join(text[i : i + FINGERPRINT_GROUP] for i in range(0, len(text), FINGERPRINT_GROUP))


def private_pem(key: Any) -> bytes:
    """A private key of the cryptography library as unencrypted PKCS#8."""
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return bytes(pem)


def write_private(path: Path, data: bytes) -> None:
    """Durable file with mode 0600 from its first moment, replaced in one step.

    Raises:
        DiskFull: no room; the file is as it was.
        LocalError: it cannot be written; the file is as it was.
    """
    fresh = path.with_name(f".{path.name}.new")
    with disk_errors(path):
        fresh.unlink(missing_ok=True)
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
        sync_folder(path.parent)


def make_private_folder(folder: Path) -> None:
    """Makes `folder` and its parents; only its owner may enter it. Raises DiskFull or LocalError."""
    private_folder(folder)
    with disk_errors(folder):
        folder.chmod(0o700)  # it may have been there, open to others


def read_private(path: Path) -> bytes:
    """The bytes of a file that only its owner can read.

    Raises:
        IdentityError: it is missing, unreadable, or others may read it.
    """
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & _GROUP_OR_OTHERS:
                raise IdentityError(
                    f"{path} has mode {mode:04o}, so others on this machine can use it: run `chmod 600 {path}`, "
                    "and join anew if somebody else may have read it"
                )
            return file.read()
    except FileNotFoundError:
        raise IdentityError(f"{path} is missing: no identity is stored here; join first") from None
    except OSError as error:
        raise IdentityError(f"cannot read {path}: {error.strerror}") from error


def holds_identity(folder: Path) -> bool:
    """Whether an identity was stored in `folder`; it may have expired."""
    return (folder / _ABOUT).exists()


def save_identity(identity: Identity) -> None:
    """Stores an identity in its folder, each file with mode 0600. The file that names it is written last.

    Raises:
        DiskFull, LocalError: a file cannot be written.
    """
    folder = identity.folder
    make_private_folder(folder)
    about = {
        "name": identity.name,
        "role": identity.role,
        "federation": identity.federation,
        "organisation": identity.organisation,
        "address": identity.address,
        "federation_public_key": identity.federation_public_key.hex(),
    }
    if identity.signing_key is not None:
        write_private(folder / _SIGNING, private_pem(identity.signing_key))
    write_private(folder / _CA, identity.ca_pem)
    write_private(folder / _TLS, identity.private_key_pem + identity.certificate_pem)
    write_private(folder / _ABOUT, json.dumps(about, indent=2).encode() + b"\n")


def load_signing_key(folder: Path) -> Ed25519PrivateKey | None:
    """The signing key stored in `folder`; None where there is none.

    Raises:
        IdentityError: the file is there and cannot be used.
    """
    path = folder / _SIGNING
    if not path.exists():
        return None
    try:
        key = load_pem_private_key(read_private(path), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise IdentityError(f"{path} does not hold a private key: restore it from a backup or join anew") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise IdentityError(f"{path} holds another kind of key than Ed25519: restore it from a backup or join anew")
    return key


def load_identity(folder: Path, *, now: datetime | None = None, allow_expired: bool = False) -> Identity:
    """The identity stored in `folder`.

    Args:
        now: the present where None.
        allow_expired: give it even when its certificate has run out (to look at it, or to join anew).

    Raises:
        IdentityError: it is missing, damaged, expired, or readable by others; says what to do.
    """
    about = _read_about(folder)
    key_pem, certificate_pem, certificate = _read_tls(folder / _TLS)
    signing_key = load_signing_key(folder)
    if about["role"] == "site" and signing_key is None:
        raise IdentityError(f"{folder / _SIGNING} is missing: restore it from a backup or join anew")
    expires_at = certificate.not_valid_after_utc
    if not allow_expired and expires_at <= (now or utc_now()):
        raise IdentityError(
            f"the certificate of {about['role']} {about['name']} in {folder} expired at {expires_at:%Y-%m-%d %H:%M} UTC "
            f"(clock here: {now or utc_now():%Y-%m-%d %H:%M} UTC): {how_to_rejoin(about['role'], about['name'])}"
        )
    return Identity(
        name=about["name"],
        role=about["role"],
        federation=about["federation"],
        organisation=about["organisation"],
        address=about["address"],
        folder=folder,
        certificate_pem=certificate_pem,
        private_key_pem=key_pem,
        ca_pem=read_private(folder / _CA),
        federation_public_key=bytes.fromhex(about["federation_public_key"]),
        signing_key=signing_key,
        expires_at=expires_at,
    )


def _read_about(folder: Path) -> dict[str, str]:
    path = folder / _ABOUT
    try:
        about = json.loads(read_private(path))
        fields = ("name", "role", "federation", "organisation", "address", "federation_public_key")
        found = {key: str(about[key]) for key in fields}
        usable = found["role"] in ROLES and len(bytes.fromhex(found["federation_public_key"])) == 32
    except (ValueError, KeyError, TypeError):
        usable, found = False, {}
    if not usable:
        raise IdentityError(f"{path} is damaged: restore it from a backup or join anew")
    return found


def _read_tls(path: Path) -> tuple[bytes, bytes, x509.Certificate]:
    data = read_private(path)
    cut = data.find(b"-----BEGIN CERTIFICATE-----")
    try:
        key = load_pem_private_key(data[:cut], password=None)
        certificate = x509.load_pem_x509_certificate(data[cut:])
        fits = cut > 0 and key.public_key() == certificate.public_key()
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise IdentityError(f"{path} is damaged: restore it from a backup or join anew") from None
    if not fits:
        raise IdentityError(f"{path}: the certificate belongs to another key: restore it from a backup or join anew")
    return data[:cut], data[cut:], certificate
