"""Every message as bytes: each value has one encoding, and bytes of any other kind are `Malformed`, never another error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from samples.secagg_fuzz import DECODERS, PLAN, SITES, one
from samples.secagg_session import signing_keys

from atoll.privacy.secagg.agreement import Opening
from atoll.privacy.secagg.messages import (
    Kind,
    Phase,
    PublicKeys,
    Revealed,
    ShareItem,
    Survivors,
    bitmap,
    encode_revealed,
    read_bitmap,
    sign,
    verify,
)
from atoll.wire.errors import Malformed

TRANSCRIPT = Path(__file__).parents[2] / "golden" / "secagg_transcript.json"
KEYS = signing_keys(SITES)
hashes = st.binary(min_size=32, max_size=32)
numbers = st.integers(0, SITES - 1)
rosters = st.frozensets(numbers)

keys = st.builds(PublicKeys, sealing=hashes, masking=hashes, commitment=hashes)
items = st.builds(
    ShareItem,
    receiver=st.integers(0, 2**16 - 1),
    seed_hash=hashes,
    nonce=st.binary(min_size=12, max_size=12),
    sealed=st.binary(min_size=85, max_size=85),
    seed_commitment=hashes,
    key_commitment=hashes,
)
shares = st.builds(
    Revealed, kind=st.sampled_from(Kind), owner=st.integers(0, 2**16 - 1), share=st.binary(min_size=33, max_size=33)
)
survivors = st.builds(
    lambda sharing, roots: Survivors(sharing=sharing, surviving=frozenset(roots), roots=roots),
    rosters,
    st.dictionaries(numbers, hashes),
)


def openings() -> st.SearchStrategy[Opening]:
    def made(sites: set[int], base: int, late: int, **changes: Any) -> Opening:
        names = tuple(sorted(f"site-{number}" for number in sites))
        older = {name: base - 1 for name in names[:late]} if base else {}
        used = {older.get(name, base) for name in names}
        digests = {version: f"{version:064x}" for version in used}
        return Opening(
            run="01JD0000000000000000000000", sites=names, base_version=base, bases=older, digests=digests, **changes
        )

    return st.builds(
        made,
        sites=st.sets(st.integers(0, 99), min_size=1, max_size=9),
        base=st.integers(0, 9),
        late=st.integers(0, 3),
        round=st.integers(1, 2**32 - 1),
        session=st.integers(1, 2**16 - 1),
        member_list_version=st.integers(1, 2**40),
        max_weight=st.integers(1, 2**53),
    )


@given(value=st.one_of(keys, items))
def test_a_body_comes_back_as_it_was(value: PublicKeys | ShareItem) -> None:
    assert type(value).decode(value.encode()) == value
    assert one("keys" if isinstance(value, PublicKeys) else "share", value.encode())


@given(value=survivors)
def test_survivors_come_back_as_they_were(value: Survivors) -> None:
    assert Survivors.decode(value.encode(SITES), SITES) == value
    assert one("survivors", value.encode(SITES))


@given(value=st.lists(shares, unique_by=lambda share: share.owner))
def test_revealed_shares_come_back_by_their_owners(value: list[Revealed]) -> None:
    assert one("revealed", encode_revealed(value))


@given(sites=rosters)
def test_a_bitmap_is_of_the_roster(sites: frozenset[int]) -> None:
    assert read_bitmap(bitmap(sites, SITES), SITES) == sites
    assert one("bitmap", bitmap(sites, SITES))


@given(opening=openings())
def test_an_opening_has_one_encoding(opening: Opening) -> None:
    data = opening.canonical()
    assert Opening.decode(data) == opening
    assert one("opening", data)
    for other in (json.dumps(json.loads(data)).encode(), data + b" ", data[:-1]):
        assert not one("opening", other)


@given(phase=st.sampled_from(Phase), sender=numbers, body=st.binary(max_size=300))
def test_a_message_is_of_its_sender_and_phase_alone(phase: Phase, sender: int, body: bytes) -> None:
    message = sign(PLAN, phase, sender, body, KEYS[sender])
    assert verify(PLAN, phase, message.data) == message
    for other in set(Phase) - {phase}:
        with pytest.raises(Malformed, match="of another session, plan or phase"):
            verify(PLAN, other, message.data)
    with pytest.raises(Malformed, match="not signed by"):
        verify(PLAN, phase, sign(PLAN, phase, sender, body, KEYS[sender - 1]).data)


@given(phase=st.sampled_from(Phase), body=st.binary(max_size=120), place=st.integers(0), change=st.integers(1, 255))
def test_no_byte_of_a_message_can_be_changed(phase: Phase, body: bytes, place: int, change: int) -> None:
    data = bytearray(sign(PLAN, phase, 3, body, KEYS[3]).data)
    data[place % len(data)] ^= change
    assert not one(phase.name.lower(), bytes(data))


def honest() -> list[bytes]:
    """What was said in the frozen session, whole and without envelope and signature."""
    table = json.loads(TRANSCRIPT.read_text())
    said = [bytes.fromhex(text) for kind in ("advertised", "inputs", "unmasked") for text in table[kind].values()]
    said += [bytes.fromhex(text) for items in table["shared"].values() for text in items.values()]
    return [bytes.fromhex(table["survivors"]), *said, *(data[60:-64] for data in said)]


@settings(max_examples=400, deadline=None)
@given(name=st.sampled_from(sorted(DECODERS)), data=st.data())
def test_bytes_of_any_kind_are_malformed_or_the_encoding_of_a_value(name: str, data: st.DataObject) -> None:
    """Random bytes, and honest ones that are cut, joined and changed."""
    raw = bytearray(data.draw(st.one_of(st.binary(max_size=500), st.sampled_from(honest()))))
    for _ in range(data.draw(st.integers(0, 4))):
        place = data.draw(st.integers(0, len(raw)))
        raw[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
    one(name, bytes(raw))
