"""What the online CA certifies, and what it will not."""

from __future__ import annotations

import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from atoll.server.authority import MOST_VALID, Authority, init_federation
from atoll.transport.members import FederationKey
from atoll.wire.errors import ConfigError, IdentityError, Malformed, TooLarge

NOW = datetime(2026, 3, 1, tzinfo=UTC)
Key = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | ed25519.Ed25519PrivateKey


class Clock:
    now = NOW

    def __call__(self) -> datetime:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def authority(tmp_path: Path, clock: Clock) -> Authority:
    init_federation(tmp_path / "ca", tmp_path / "offline", "isles", ["10.0.0.7", "isles.example"], clock=clock)
    return Authority.load(tmp_path / "ca", clock=clock)


def request(key: Key, *, common_name: str = "alpha") -> bytes:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
    names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier("atoll://isles/operator/root")])
    builder = x509.CertificateSigningRequestBuilder().subject_name(subject).add_extension(names, critical=False)
    algorithm = None if isinstance(key, ed25519.Ed25519PrivateKey) else hashes.SHA256()
    return builder.sign(key, algorithm).public_bytes(Encoding.DER)


@pytest.fixture
def csr() -> bytes:
    return request(ec.generate_private_key(ec.SECP256R1()))


def test_a_members_certificate_says_what_the_server_chose(authority: Authority, csr: bytes) -> None:
    """The request asks for another name and role in vain."""
    issued = authority.issue(csr, name="beta", role="site", organisation="St Mary")
    certificate = x509.load_der_x509_certificate(issued.certificate_der)
    extensions = certificate.extensions
    names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert list(names) == [x509.UniformResourceIdentifier("atoll://isles/site/beta")]
    assert certificate.subject.rfc4514_string() == "O=St Mary,CN=beta"
    usage = extensions.get_extension_for_class(x509.ExtendedKeyUsage)
    assert (list(usage.value), usage.critical) == ([ExtendedKeyUsageOID.CLIENT_AUTH], True)
    assert not extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert certificate.not_valid_before_utc == NOW - timedelta(minutes=5)  # for a peer whose clock is behind
    assert certificate.not_valid_after_utc - certificate.not_valid_before_utc == MOST_VALID == timedelta(days=30)
    assert issued.expires_at == certificate.not_valid_after_utc
    assert int(issued.serial, 16) == certificate.serial_number
    certificate.verify_directly_issued_by(authority.ca)


def test_a_long_organisation_is_cut_only_in_the_certificate(authority: Authority, csr: bytes) -> None:
    issued = authority.issue(csr, name="beta", role="site", organisation="x" * 128)
    certificate = x509.load_der_x509_certificate(issued.certificate_der)
    assert certificate.subject.get_attributes_for_oid(NameOID.ORGANIZATION_NAME)[0].value == "x" * 64


def test_the_ca_makes_no_other_ca(authority: Authority) -> None:
    basic = authority.ca.extensions.get_extension_for_class(x509.BasicConstraints).value
    assert (basic.ca, basic.path_length) == (True, 0)
    assert authority.ca.not_valid_after_utc > NOW + timedelta(days=3000)


@pytest.mark.parametrize(
    "key",
    [
        ec.generate_private_key(ec.SECP384R1()),
        rsa.generate_private_key(65537, 2048),
        ed25519.Ed25519PrivateKey.generate(),
    ],
    ids=["P-384", "RSA", "Ed25519"],
)
def test_other_kinds_of_key(authority: Authority, key: Key) -> None:
    with pytest.raises(Malformed, match="P-256"):
        authority.issue(request(key), name="alpha", role="site")


def test_a_request_must_be_signed_by_its_own_key(authority: Authority, csr: bytes) -> None:
    forged = bytearray(csr)
    forged[-1] ^= 1
    with pytest.raises(Malformed, match="certificate request"):
        authority.issue(bytes(forged), name="alpha", role="site")


@pytest.mark.parametrize("cut", [0, 1, 50, -1])
def test_a_cut_request(authority: Authority, csr: bytes, cut: int) -> None:
    with pytest.raises(Malformed):
        authority.issue(csr[:cut], name="alpha", role="site")


def test_a_large_request(authority: Authority, csr: bytes) -> None:
    with pytest.raises(TooLarge):
        authority.issue(csr + bytes(4096), name="alpha", role="site")


def test_names_that_do_not_fit_a_uri(authority: Authority, csr: bytes) -> None:
    with pytest.raises(Malformed):
        authority.issue(csr, name="alpha/../../operator/root", role="site")


def test_no_certificate_for_longer_or_for_an_unknown_role(authority: Authority, csr: bytes) -> None:
    with pytest.raises(ValueError, match="no certificate"):
        authority.issue(csr, name="alpha", role="site", valid=timedelta(days=31))
    with pytest.raises(ValueError, match="no certificate"):
        authority.issue(csr, name="alpha", role="root")


class TestServerCertificate:
    def test_what_it_says(self, authority: Authority) -> None:
        shown = x509.load_pem_x509_certificate(authority.server_certificate().certificate_pem)
        names = shown.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert names.get_values_for_type(x509.DNSName) == ["server.atoll", "isles.example"]
        assert [str(ip) for ip in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.7"]
        usage = shown.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        assert list(usage) == [ExtendedKeyUsageOID.SERVER_AUTH]
        assert shown.not_valid_after_utc - shown.not_valid_before_utc <= MOST_VALID

    def test_it_outlives_restarts_and_is_renewed_at_half_life(
        self, authority: Authority, clock: Clock, tmp_path: Path
    ) -> None:
        first = authority.server_certificate()
        clock.now += timedelta(days=14)
        assert Authority.load(tmp_path / "ca", clock=clock).server_certificate() == first
        clock.now += timedelta(days=2)
        second = authority.server_certificate()
        assert second != first
        assert Authority.load(tmp_path / "ca", clock=clock).server_certificate() == second

    @pytest.mark.parametrize(
        "content", [b"", b"\xff", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"]
    )
    def test_a_damaged_one_is_made_anew(
        self, authority: Authority, clock: Clock, tmp_path: Path, content: bytes
    ) -> None:
        (tmp_path / "ca" / "server.pem").write_bytes(content)
        assert Authority.load(tmp_path / "ca", clock=clock).server_certificate().certificate_pem

    def test_its_key_is_not_shown(self, authority: Authority) -> None:
        assert "PRIVATE" not in repr(authority.server_certificate()) + repr(authority)


class TestFolders:
    def test_every_file_is_the_owners_alone(self, authority: Authority, tmp_path: Path) -> None:
        files = [path for folder in ("ca", "offline") for path in (tmp_path / folder).iterdir()]
        assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
        assert {stat.S_IMODE((tmp_path / folder).stat().st_mode) for folder in ("ca", "offline")} == {0o700}

    def test_the_offline_key_is_nowhere_in_the_servers_folder(self, authority: Authority, tmp_path: Path) -> None:
        key = FederationKey.load(tmp_path / "offline").key.private_bytes_raw()
        pem = (tmp_path / "offline" / "federation_key.pem").read_bytes()
        for path in (tmp_path / "ca").iterdir():
            content = path.read_bytes()
            assert key not in content
            assert key.hex().encode() not in content
            assert pem.splitlines()[1] not in content

    def test_a_second_federation_in_the_folder(self, authority: Authority, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="already holds a federation"):
            init_federation(tmp_path / "ca", tmp_path / "offline2", "isles", [])
        assert not (tmp_path / "offline2").exists()

    @pytest.mark.parametrize("inside", ["ca", "ca/key", "ca/../ca/key"])
    def test_the_key_must_lie_apart(self, tmp_path: Path, inside: str) -> None:
        with pytest.raises(ConfigError, match="apart from the server's data"):
            init_federation(tmp_path / "ca", tmp_path / inside, "isles", [])
        assert list(tmp_path.iterdir()) == []

    def test_a_bad_name(self, tmp_path: Path) -> None:
        with pytest.raises(Malformed):
            init_federation(tmp_path / "ca", tmp_path / "offline", "The Isles", [])

    @pytest.mark.parametrize("name", ["federation.json", "ca_key.pem", "ca.pem"])
    def test_damaged_missing_open(self, authority: Authority, tmp_path: Path, clock: Clock, name: str) -> None:
        path = tmp_path / "ca" / name
        path.chmod(0o604)
        with pytest.raises(IdentityError, match="chmod 600"):
            Authority.load(tmp_path / "ca", clock=clock)
        path.chmod(0o600)
        path.write_bytes(b"\xff")
        with pytest.raises(IdentityError, match="damaged"):
            Authority.load(tmp_path / "ca", clock=clock)
        path.unlink()
        with pytest.raises(IdentityError, match="missing"):
            Authority.load(tmp_path / "ca", clock=clock)

    def test_an_expired_ca(self, authority: Authority, tmp_path: Path, clock: Clock) -> None:
        clock.now += timedelta(days=3651)
        with pytest.raises(IdentityError, match="expired"):
            Authority.load(tmp_path / "ca", clock=clock)
