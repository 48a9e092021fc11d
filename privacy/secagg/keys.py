"""Keys of a session: what two sites agree on, and what is derived from it.

X25519 (RFC 7748) gives a pair of sites their secret, HKDF-SHA256 (RFC 5869) with the session's name as salt makes keys
of one purpose each from it. All names are distinct byte strings of fixed width, so no key serves two purposes, and none
serves two sessions: sites with different plans derive masks that do not cancel.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

KEY_BYTES: Final = 32
NONCE_BYTES: Final = 12
TAG_BYTES: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Mask:
    """One key stream, and whether it is added or taken away."""

    key: bytes = field(repr=False)
    negative: bool = False

    @property
    def opposite(self) -> Mask:
        return Mask(key=self.key, negative=not self.negative)


def session_id(run_id: bytes, round: int, attempt: int, plan_hash: bytes) -> bytes:
    """The 32 bytes that bind everything in a session to run, round, attempt and plan."""
    if len(run_id) != 16 or len(plan_hash) != 32:
        raise ValueError(f"a run id of {len(run_id)} and a plan hash of {len(plan_hash)} bytes, wanted 16 and 32")
    fields = run_id + round.to_bytes(4, "big") + attempt.to_bytes(2, "big") + plan_hash
    return hashlib.sha256(b"fl/sa1/session" + fields).digest()


def agree(private: bytes, public: bytes) -> bytes:
    """The shared secret of two X25519 keys.

    Raises:
        ValueError: the public key is no use (of small order): its owner does not keep to the protocol.
    """
    return X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))


def public_key(private: bytes) -> bytes:
    """The X25519 public key, 32 bytes."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def sealing_key(session: bytes, secret: bytes, sender: int, receiver: int, public: tuple[bytes, bytes]) -> bytes:
    """AES-256-GCM key of the shares that `sender` sends to `receiver`; `public` are their keys in that order."""
    return _derive(session, secret, b"fl/sa1/share-enc" + _index(sender) + _index(receiver) + public[0] + public[1])


def pair_mask_key(
    session: bytes, secret: bytes, pair: tuple[int, int], public: tuple[bytes, bytes], lane: int
) -> bytes:
    """AES-256-CTR key of the mask that two sites share; `pair` is ascending, `public` are their keys in that order."""
    low, high = pair
    if low >= high:
        raise ValueError(f"sites {low} and {high}: a pair is ascending")
    return _derive(
        session, secret, b"fl/sa1/pair-mask" + _index(low) + _index(high) + public[0] + public[1] + _index(lane)
    )


def self_mask_key(session: bytes, seed: bytes, site: int, lane: int) -> bytes:
    """AES-256-CTR key of a site's own mask, whose `seed` (b_i, 32 bytes) is shared among its neighbours."""
    return _derive(session, seed, b"fl/sa1/self-mask" + _index(site) + _index(lane))


def seal(key: bytes, nonce: bytes, plaintext: bytes, context: bytes) -> bytes:
    """Ciphertext and tag of AES-256-GCM (NIST SP 800-38D); `context` is authenticated with it."""
    return AESGCM(key).encrypt(nonce, plaintext, context)


def open_sealed(key: bytes, nonce: bytes, sealed: bytes, context: bytes) -> bytes | None:
    """The plaintext; None where key, nonce, bytes or context are not those of `seal`."""
    try:
        return AESGCM(key).decrypt(nonce, sealed, context)
    except (InvalidTag, ValueError):
        return None


def _derive(session: bytes, secret: bytes, info: bytes) -> bytes:
    return HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=session, info=info).derive(secret)


def _index(number: int) -> bytes:
    return number.to_bytes(2, "big")
