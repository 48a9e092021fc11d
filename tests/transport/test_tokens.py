"""Tokens and requests of enrolment, without a server."""

from __future__ import annotations

import base64

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding
from hypothesis import given
from hypothesis import strategies as st

from atoll.transport.enrolment import check_enrolment, decode_token, encode_token, enrolment_request
from atoll.transport.identity import utc_now
from atoll.wire.enrolment_pb2 import EnrolmentToken, EnrolRequest
from atoll.wire.errors import BadToken, Malformed, RemoteError, TooLarge

TLS_KEY = ec.generate_private_key(ec.SECP256R1())
SIGNING_KEY = Ed25519PrivateKey.generate()
CA = (
    x509.CertificateBuilder(x509.Name([]), x509.Name([]), TLS_KEY.public_key(), 1, utc_now(), utc_now())
    .sign(TLS_KEY, hashes.SHA256())
    .public_bytes(Encoding.DER)
)
TOKEN = EnrolmentToken(
    federation="isles",
    name="alpha",
    role="site",
    address="isles.example:7443",
    enrolment_address="isles.example:7444",
    secret=bytes(range(32)),
    federation_fingerprint=bytes(32),
    ca_certificate=CA,
    expires_at_unix_s=2_000_000_000,
)


def test_round_trip() -> None:
    text = encode_token(TOKEN)
    assert text.startswith("atoll1-")
    assert decode_token(text) == TOKEN
    assert len(text) < 1500  # fits a line of a mail


def test_wrapped_by_a_terminal() -> None:
    text = encode_token(TOKEN)
    assert decode_token(f"  {text[:70]}\r\n {text[70:]}\n") == TOKEN


@pytest.mark.parametrize("cut", [0, 5, 7, 8, 100, -1, -4])
def test_cut(cut: int) -> None:
    with pytest.raises(BadToken, match="copy the whole line"):
        decode_token(encode_token(TOKEN)[:cut])


@given(st.text(max_size=200) | st.binary(max_size=200).map(lambda b: "atoll1-" + base64.urlsafe_b64encode(b).decode()))
def test_anything_else(text: str) -> None:
    with pytest.raises(BadToken):
        decode_token(text)


@pytest.mark.parametrize(
    "change",
    [
        {"name": "../x"},
        {"role": "root"},
        {"secret": b"short"},
        {"federation_fingerprint": b""},
        {"ca_certificate": b"x"},
        {"address": "a" * 262},
        {"enrolment_address": "a" * 262},
    ],
)
def test_fields_are_checked(change: dict[str, object]) -> None:
    token = EnrolmentToken()
    token.CopyFrom(TOKEN)
    for name, value in change.items():
        setattr(token, name, value)
    with pytest.raises(BadToken, match="damaged"):
        decode_token(encode_token(token))


class TestRequest:
    def test_a_site_proves_its_signing_key(self) -> None:
        check_enrolment(enrolment_request("alpha", TOKEN.secret, TLS_KEY, SIGNING_KEY), "site")

    def test_a_person_has_none(self) -> None:
        check_enrolment(enrolment_request("ada", TOKEN.secret, TLS_KEY, None), "researcher")
        with pytest.raises(Malformed, match="a researcher has no signing key"):
            check_enrolment(enrolment_request("ada", TOKEN.secret, TLS_KEY, SIGNING_KEY), "researcher")

    @pytest.mark.parametrize(
        "change",
        [
            {"name": "beta"},
            {"csr": b"another"},
            {"signing_key": Ed25519PrivateKey.generate().public_key().public_bytes_raw()},
            {"signing_key": b""},
            {"signing_key": b"short"},
            {"signing_key_proof": bytes(64)},
            {"signing_key_proof": b""},
        ],
    )
    def test_the_proof_binds_name_request_and_key(self, change: dict[str, object]) -> None:
        request = enrolment_request("alpha", TOKEN.secret, TLS_KEY, SIGNING_KEY)
        for name, value in change.items():
            setattr(request, name, value)
        with pytest.raises(Malformed, match="no valid proof"):
            check_enrolment(request, "site")

    def test_a_large_request_is_not_parsed(self) -> None:
        with pytest.raises(TooLarge):
            check_enrolment(EnrolRequest(name="alpha", csr=b"\0" * 4097), "site")

    @given(st.binary(max_size=300), st.binary(max_size=80), st.binary(max_size=80))
    def test_hostile_bytes(self, csr: bytes, key: bytes, proof: bytes) -> None:
        with pytest.raises(RemoteError):
            check_enrolment(EnrolRequest(name="alpha", csr=csr, signing_key=key, signing_key_proof=proof), "site")
