"""What is stored of an identity, and what is said when it cannot be used."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding

from atoll.transport.identity import (
    Identity,
    format_fingerprint,
    holds_identity,
    load_identity,
    private_pem,
    save_identity,
    write_private,
)
from atoll.wire.errors import IdentityError, LocalError

NOW = datetime(2026, 3, 1, tzinfo=UTC)


def make_identity(folder: Path, *, role: str = "site") -> Identity:
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = x509.CertificateBuilder(
        issuer_name=x509.Name([]),
        subject_name=x509.Name([]),
        public_key=key.public_key(),
        serial_number=7,
        not_valid_before=NOW - timedelta(days=1),
        not_valid_after=NOW + timedelta(days=29),
    ).sign(key, hashes.SHA256())
    pem = certificate.public_bytes(Encoding.PEM)
    return Identity(
        name="alpha",
        role=role,
        federation="isles",
        organisation="St Mary's, Zürich",
        address="isles.example:7443",
        folder=folder,
        certificate_pem=pem,
        private_key_pem=private_pem(key),
        ca_pem=pem,
        federation_public_key=bytes(range(32)),
        signing_key=Ed25519PrivateKey.generate() if role == "site" else None,
        expires_at=NOW + timedelta(days=29),
    )


@pytest.fixture
def identity(tmp_path: Path) -> Identity:
    made = make_identity(tmp_path / "deep" / "identity")
    save_identity(made)
    return made


def test_what_is_saved_is_loaded(identity: Identity) -> None:
    loaded = load_identity(identity.folder, now=NOW)
    assert loaded.signing_key is not None
    assert identity.signing_key is not None
    assert loaded.signing_key.private_bytes_raw() == identity.signing_key.private_bytes_raw()
    assert replace(loaded, signing_key=None) == replace(identity, signing_key=None)


def test_a_person_has_no_signing_key(tmp_path: Path) -> None:
    save_identity(make_identity(tmp_path, role="researcher"))
    assert load_identity(tmp_path, now=NOW).signing_key is None


def test_every_file_is_the_owners_alone(identity: Identity) -> None:
    previous = os.umask(0)  # even where the account gives everything to everybody
    try:
        save_identity(identity)
    finally:
        os.umask(previous)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in identity.folder.iterdir()}
    assert len(modes) == 4
    assert set(modes.values()) == {0o600}
    assert stat.S_IMODE(identity.folder.stat().st_mode) == 0o700


def test_repr_shows_no_key(identity: Identity) -> None:
    shown = repr(identity)
    assert "alpha" in shown
    assert "PRIVATE" not in shown
    assert "private_key_pem" not in shown
    assert "signing_key" not in shown


@pytest.mark.parametrize("name", ["identity.json", "tls.pem", "ca.pem", "signing_key.pem"])
class TestFiles:
    def test_open_to_others(self, identity: Identity, name: str) -> None:
        (identity.folder / name).chmod(0o640)
        with pytest.raises(IdentityError, match=rf"{name} has mode 0640.*chmod 600"):
            load_identity(identity.folder, now=NOW)

    def test_missing(self, identity: Identity, name: str) -> None:
        (identity.folder / name).unlink()
        with pytest.raises(IdentityError, match=f"{name} is missing"):
            load_identity(identity.folder, now=NOW)


@pytest.mark.parametrize("name", ["identity.json", "tls.pem", "signing_key.pem"])
@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"{}", b"[]", b"-----BEGIN PRIVATE KEY-----\nAAAA\n"])
def test_damaged(identity: Identity, name: str, content: bytes) -> None:
    write_private(identity.folder / name, content)
    with pytest.raises(IdentityError, match=rf"{name}.*(damaged|private key).*join anew"):
        load_identity(identity.folder, now=NOW)


def test_certificate_of_another_key(identity: Identity, tmp_path: Path) -> None:
    other = make_identity(tmp_path / "other")
    save_identity(replace(identity, certificate_pem=other.certificate_pem))
    with pytest.raises(IdentityError, match="belongs to another key"):
        load_identity(identity.folder, now=NOW)


def test_expired(identity: Identity) -> None:
    late = NOW + timedelta(days=30)
    with pytest.raises(IdentityError, match=r"site alpha .* expired at 2026-03-30 .*atoll site add alpha.*join TOKEN"):
        load_identity(identity.folder, now=late)
    assert load_identity(identity.folder, now=late, allow_expired=True).name == "alpha"


def test_nothing_there(tmp_path: Path) -> None:
    assert not holds_identity(tmp_path)
    with pytest.raises(IdentityError, match="join first"):
        load_identity(tmp_path, now=NOW)


def test_a_crash_while_renewing_leaves_the_old_pair(identity: Identity) -> None:
    """What a killed process leaves is a file beside the real one; the next write replaces it."""
    (identity.folder / ".tls.pem.new").write_bytes(b"half a key")
    assert load_identity(identity.folder, now=NOW).certificate_pem == identity.certificate_pem
    fresh = make_identity(identity.folder)
    save_identity(fresh)
    assert load_identity(identity.folder, now=NOW).certificate_pem == fresh.certificate_pem
    assert not (identity.folder / ".tls.pem.new").exists()


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LocalError, match="file"):
        save_identity(make_identity(tmp_path / "file" / "identity"))


def test_fingerprint_for_people() -> None:
    # SHA-256 of 32 zero bytes, a published value.
    text = format_fingerprint(bytes(32))
    assert text == "6668 7aad f862 bd77 6c8f c18b 8e9f 8e20 0897 1485 6ee2 33b3 902a 591d 0d5f 2925"
