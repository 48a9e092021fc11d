"""Agreement, derivation and sealing: vectors of the RFCs and of NIST, and one purpose for each key."""

from __future__ import annotations

import hashlib
import itertools

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from atoll.privacy.secagg import keys


def test_x25519_by_rfc_7748_section_5_2() -> None:
    private = bytes.fromhex("a546e36bf0527c9d3b16154b82465edd62144c0ac1fc5a18506a2244ba449ac4")
    public = bytes.fromhex("e6db6867583030db3594c1a424b15f7c726624ec26b3353b10a903a6d0ab1c4c")
    assert keys.agree(private, public).hex() == "c3da55379de9c6908e94ea4df28d084f32eccf03491c71f754b4075577a28552"


def test_a_public_key_of_small_order_is_refused() -> None:
    with pytest.raises(ValueError, match=r"."):
        keys.agree(bytes(range(32)), bytes(32))


def test_hkdf_by_rfc_5869_a_1() -> None:
    made = HKDF(
        algorithm=SHA256(), length=42, salt=bytes(range(13)), info=bytes.fromhex("f0f1f2f3f4f5f6f7f8f9")
    ).derive(b"\x0b" * 22)
    assert made.hex() == "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865"


def test_ed25519_by_rfc_8032_section_7_1() -> None:
    key = Ed25519PrivateKey.from_private_bytes(
        bytes.fromhex("4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb")
    )
    assert key.public_key().public_bytes_raw().hex() == (
        "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c"
    )
    assert key.sign(b"\x72").hex() == (
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
        "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00"
    )


def test_aes_256_gcm_by_nist() -> None:
    """CAVP gcmEncryptExtIV256: no plaintext, 160 bits of authenticated data."""
    key = bytes.fromhex("886cff5f3e6b8d0e1ad0a38fcdb26de97e8acbe79f6bed66959a598fa5047d65")
    nonce, context = (
        bytes.fromhex("3a8efa1cd74bbab5448f9945"),
        bytes.fromhex("519fee519d25c7a304d6c6aa1897ee1eb8c59655"),
    )
    assert keys.seal(key, nonce, b"", context).hex() == "f6d47505ec96c98a42dc3ae719877b87"


def test_what_was_sealed_opens_for_its_receiver_alone() -> None:
    key, nonce = bytes(32), bytes(12)
    sealed = keys.seal(key, nonce, b"share", b"session")
    assert keys.open_sealed(key, nonce, sealed, b"session") == b"share"
    assert AESGCM(key).decrypt(nonce, sealed, b"session") == b"share"
    assert keys.open_sealed(bytes([1]) + key[1:], nonce, sealed, b"session") is None
    assert keys.open_sealed(key, bytes([1]) + nonce[1:], sealed, b"session") is None
    assert keys.open_sealed(key, nonce, bytes([sealed[0] ^ 1]) + sealed[1:], b"session") is None
    assert keys.open_sealed(key, nonce, sealed, b"another") is None
    assert keys.open_sealed(key, nonce, b"", b"session") is None


def test_a_session_is_named_by_run_round_attempt_and_plan() -> None:
    run, plan = bytes(16), bytes(32)
    fields = run + (7).to_bytes(4, "big") + (2).to_bytes(2, "big") + plan
    assert keys.session_id(run, 7, 2, plan) == hashlib.sha256(b"fl/sa1/session" + fields).digest()
    others = [
        keys.session_id(bytes([1]) + run[1:], 7, 2, plan),
        keys.session_id(run, 8, 2, plan),
        keys.session_id(run, 7, 3, plan),
        keys.session_id(run, 7, 2, bytes([1]) + plan[1:]),
    ]
    assert len({*others, keys.session_id(run, 7, 2, plan)}) == 5
    with pytest.raises(ValueError, match="wanted 16 and 32"):
        keys.session_id(b"", 7, 2, plan)


def test_every_key_has_one_purpose_site_direction_lane_and_session() -> None:
    """From one secret, with everything that a key may depend on changed in turn: no two keys are the same."""
    secret, low, high = b"\x05" * 32, b"\x01" * 32, b"\x02" * 32
    made = []
    for session in (bytes(32), b"\x01" * 32):
        for lane in (0, 1, 256):
            made += [
                keys.pair_mask_key(session, secret, pair, (low, high), lane) for pair in ((0, 1), (1, 2), (1, 256))
            ]
            made += [keys.self_mask_key(session, secret, site, lane) for site in (0, 1, 256)]
        made.append(keys.pair_mask_key(session, secret, (0, 1), (high, low), 0))
        made += [
            keys.sealing_key(session, secret, sender, receiver, public)
            for (sender, receiver), public in itertools.product(((0, 1), (1, 0)), ((low, high), (high, low)))
        ]
    assert len(set(made)) == len(made)
    assert all(len(key) == keys.KEY_BYTES for key in made)


def test_a_pair_has_an_order() -> None:
    with pytest.raises(ValueError, match="ascending"):
        keys.pair_mask_key(bytes(32), bytes(32), (2, 1), (bytes(32), bytes(32)), 0)
