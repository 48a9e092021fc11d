"""The messages of SA-1 as bytes: fixed layouts, big endian, strict, signed where a site speaks.

    envelope   version u8, suite u16, run 16, round u32, attempt u16, phase u8, sender u16, plan hash 32: 60 bytes
    signed     envelope, body, Ed25519 signature (RFC 8032) of "fl/sa1/PHASE", a zero byte and the bytes before it

What a site said is kept and passed on as the bytes that it sent, and is never encoded again. Decoding raises
`Malformed` for anything but the one encoding of a message, and never needs memory beyond the input's.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from atoll.privacy.secagg.keys import KEY_BYTES, NONCE_BYTES, TAG_BYTES
from atoll.privacy.secagg.plan import SessionPlan
from atoll.privacy.secagg.shamir import SHARE_BYTES
from atoll.wire.errors import Malformed

VERSION: Final = 1
SUITE: Final = 1  # X25519, HKDF-SHA256, AES-256-GCM, AES-256-CTR, Ed25519, Shamir over 2^256 + 297
HASH_BYTES: Final = 32
SIGNATURE_BYTES: Final = 64
PAIR_BYTES: Final = 3 + 2 * SHARE_BYTES  # before it is sealed: number of its holder, shares of seed and of masking key

_ENVELOPE: Final = struct.Struct(">BH16sIHBH32s")
_ITEM: Final = struct.Struct(f">H{HASH_BYTES}s{NONCE_BYTES}s{PAIR_BYTES + TAG_BYTES}s{HASH_BYTES}s{HASH_BYTES}s")
_REVEALED: Final = struct.Struct(f">BH{SHARE_BYTES}s")


class Phase(IntEnum):
    """What a site says, in the order in which it does."""

    ADVERTISE_KEYS = 1
    SHARE_KEYS = 2
    MASKED_INPUT = 3
    CONSISTENCY = 4
    UNMASK = 5


class Kind(IntEnum):
    """Which secret of a site a share is of. Nobody hands out both of one site."""

    SEED = 1  # b_j of a survivor: takes off its own mask
    KEY = 2  # mask key of a site that dropped out: takes off the masks that it shares


@dataclass(frozen=True, slots=True, kw_only=True)
class Signed:
    """A message as its sender sent it. Made by `sign` and `verify`."""

    phase: Phase
    sender: int
    body: bytes
    data: bytes  # envelope, body, signature


def sign(plan: SessionPlan, phase: Phase, sender: int, body: bytes, key: Ed25519PrivateKey) -> Signed:
    """The message of a site in a session."""
    start = _envelope(plan, phase, sender) + body
    return Signed(phase=phase, sender=sender, body=body, data=start + key.sign(_context(phase) + start))


def verify(plan: SessionPlan, phase: Phase, data: bytes) -> Signed:
    """A message of this session and phase by the member of the roster that it names.

    Raises:
        Malformed: it is of another session, plan, phase or version, or its sender did not sign it; names the sender.
    """
    if len(data) < _ENVELOPE.size + SIGNATURE_BYTES:
        raise Malformed(f"{phase.name}: {len(data)} bytes are no message", field="message", value=len(data))
    sender = _ENVELOPE.unpack_from(data)[6]
    if sender >= len(plan.roster):
        raise Malformed(f"{phase.name}: site number {sender} of {len(plan.roster)}", field="sender", value=sender)
    if data[: _ENVELOPE.size] != _envelope(plan, phase, sender):
        raise Malformed(
            f"{phase.name}: of another session, plan or phase", site=plan.roster[sender].site, field="envelope"
        )
    start, signature = data[:-SIGNATURE_BYTES], data[-SIGNATURE_BYTES:]
    try:
        key = Ed25519PublicKey.from_public_bytes(plan.roster[sender].signing_key)
        key.verify(signature, _context(phase) + start)
    except (InvalidSignature, ValueError):
        name = plan.roster[sender].site
        raise Malformed(f"{phase.name}: not signed by {name}", site=name, field="signature") from None
    return Signed(phase=phase, sender=sender, body=start[_ENVELOPE.size :], data=data)


def body(data: bytes) -> bytes:
    """The body of a message that `verify` has let through before."""
    return data[_ENVELOPE.size : -SIGNATURE_BYTES]


def _envelope(plan: SessionPlan, phase: Phase, sender: int) -> bytes:
    return _ENVELOPE.pack(VERSION, SUITE, plan.run_id, plan.round, plan.attempt, phase, sender, plan.hash)


def _context(phase: Phase) -> bytes:
    return b"fl/sa1/" + phase.name.lower().encode() + b"\x00"


# --- bodies ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicKeys:
    """Body of ADVERTISE_KEYS."""

    sealing: bytes  # X25519, of the keys that seal shares
    masking: bytes  # X25519, of the masks shared with neighbours
    commitment: bytes  # SHA-256 of a nonce for the ring

    def encode(self) -> bytes:
        return self.sealing + self.masking + self.commitment

    @classmethod
    def decode(cls, body: bytes) -> PublicKeys:
        sealing, masking, commitment = _pieces(body, KEY_BYTES, KEY_BYTES, HASH_BYTES, name="ADVERTISE_KEYS")
        return cls(sealing=sealing, masking=masking, commitment=commitment)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareItem:
    """Body of SHARE_KEYS, one message for each neighbour: a pair of shares that it alone can open.

    Each is signed by itself: shorter for its receiver than a path in a tree of hashes, and 20 microseconds.
    """

    receiver: int
    seed_hash: bytes  # SHA-256 of b_i, the same in all of a site's messages
    nonce: bytes
    sealed: bytes
    seed_commitment: bytes
    key_commitment: bytes

    def encode(self) -> bytes:
        return _ITEM.pack(
            self.receiver, self.seed_hash, self.nonce, self.sealed, self.seed_commitment, self.key_commitment
        )

    @classmethod
    def decode(cls, body: bytes) -> ShareItem:
        if len(body) != _ITEM.size:
            raise Malformed(f"SHARE_KEYS: {len(body)} bytes, wanted {_ITEM.size}", field="body", value=len(body))
        receiver, seed_hash, nonce, sealed, seed_commitment, key_commitment = _ITEM.unpack(body)
        return cls(
            receiver=receiver,
            seed_hash=seed_hash,
            nonce=nonce,
            sealed=sealed,
            seed_commitment=seed_commitment,
            key_commitment=key_commitment,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Revealed:
    """One share in the body of UNMASK."""

    kind: Kind
    owner: int
    share: bytes


def encode_revealed(revealed: Sequence[Revealed]) -> bytes:
    """Body of UNMASK: shares by ascending owner."""
    return b"".join(_REVEALED.pack(one.kind, one.owner, one.share) for one in sorted(revealed, key=_owner))


def decode_revealed(body: bytes) -> tuple[Revealed, ...]:
    """The shares of an UNMASK. Raises Malformed, among others where an owner stands there twice."""
    if len(body) % _REVEALED.size:
        raise Malformed(f"UNMASK: {len(body)} bytes are no list of shares", field="shares", value=len(body))
    revealed: list[Revealed] = []
    for kind, owner, share in _REVEALED.iter_unpack(body):
        if kind not in (Kind.SEED, Kind.KEY) or (revealed and owner <= revealed[-1].owner):
            raise Malformed("UNMASK: shares of unknown kind, out of order or twice", field="shares", value=owner)
        revealed.append(Revealed(kind=Kind(kind), owner=owner, share=share))
    return tuple(revealed)


def _owner(one: Revealed) -> int:
    return one.owner


@dataclass(frozen=True, slots=True, kw_only=True)
class Survivors:
    """What a site is asked to confirm: whose shares are out, whose inputs are in, and which inputs."""

    sharing: frozenset[int]  # U1
    surviving: frozenset[int]  # U2
    roots: Mapping[int, bytes]  # of U2: SHA-256 of each masked input

    def encode(self, num_sites: int) -> bytes:
        """Two bitmaps, then the roots by ascending site: the bytes whose hash is signed."""
        roots = b"".join(self.roots[site] for site in sorted(self.surviving))
        return bitmap(self.sharing, num_sites) + bitmap(self.surviving, num_sites) + roots

    @classmethod
    def decode(cls, data: bytes, num_sites: int) -> Survivors:
        size = -(-num_sites // 8)
        if len(data) < 2 * size:
            raise Malformed(f"survivors: {len(data)} bytes", field="survivors", value=len(data))
        sharing, surviving = read_bitmap(data[:size], num_sites), read_bitmap(data[size : 2 * size], num_sites)
        roots = data[2 * size :]
        if len(roots) != HASH_BYTES * len(surviving):
            raise Malformed(
                f"survivors: {len(roots)} bytes of roots for {len(surviving)} sites", field="roots", value=len(roots)
            )
        found = [roots[start : start + HASH_BYTES] for start in range(0, len(roots), HASH_BYTES)]
        return cls(sharing=sharing, surviving=surviving, roots=dict(zip(sorted(surviving), found, strict=True)))


def bitmap(sites: frozenset[int], num_sites: int) -> bytes:
    """One bit for each site of the roster, the first in the lowest bit of the first byte."""
    return sum(1 << site for site in sites).to_bytes(-(-num_sites // 8), "little")


def read_bitmap(data: bytes, num_sites: int) -> frozenset[int]:
    """The sites of a bitmap. Raises Malformed where bits beyond the roster are set."""
    bits = int.from_bytes(data, "little")
    if len(data) != -(-num_sites // 8) or bits >> num_sites:
        raise Malformed(f"a bitmap of {len(data)} bytes for {num_sites} sites", field="bitmap", value=len(data))
    return frozenset(site for site in range(num_sites) if bits >> site & 1)


def _pieces(body: bytes, *sizes: int, name: str) -> list[bytes]:
    if len(body) != sum(sizes):
        raise Malformed(f"{name}: {len(body)} bytes, wanted {sum(sizes)}", field="body", value=len(body))
    pieces, start = [], 0
    for size in sizes:
        pieces.append(body[start : start + size])
        start += size
    return pieces
