"""Frames are checked before they are kept, and the running checksum is that of all bytes."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.transport.intake import Intake, combine_crc32
from atoll.wire.errors import BadFrame, RemoteError, TooLarge
from atoll.wire.frames import encode_frame


@given(st.lists(st.binary(max_size=300), max_size=6))
def test_checksums_combine_to_that_of_the_whole(pieces: list[bytes]) -> None:
    crc32 = 0
    for piece in pieces:
        crc32 = combine_crc32(crc32, zlib.crc32(piece), len(piece))
    assert crc32 == zlib.crc32(b"".join(pieces))


def frame(offset: int, payload: bytes) -> bytes:
    return encode_frame(offset, memoryview(payload))


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@pytest.mark.parametrize(
    ("second", "error", "field"),
    [
        (frame(3, b"def"), BadFrame, "offset"),  # a byte twice
        (frame(5, b"def"), BadFrame, "offset"),  # a gap
        (frame(4, b"defghij"), TooLarge, "num_bytes"),
        (frame(4, b"def")[:-1], BadFrame, "length"),
        (flipped(frame(4, b"def"), 140), BadFrame, "crc32"),
    ],
)
def test_a_refused_frame_changes_nothing(second: bytes, error: type[RemoteError], field: str) -> None:
    intake, kept = Intake(10, what="update of site-3, round 12"), bytearray(10)

    def keep(offset: int, payload: memoryview) -> None:
        kept[offset : offset + payload.nbytes] = payload

    intake.take(frame(0, b"abcd"), keep)
    with pytest.raises(error) as caught:
        intake.take(second, keep)
    assert caught.value.field == field
    assert (intake.received_bytes, intake.crc32, bytes(kept[4:])) == (4, zlib.crc32(b"abcd"), bytes(6))
    intake.take(frame(4, b"efghij"), keep)
    assert intake.complete
    assert kept == b"abcdefghij"


def test_bytes_that_could_not_be_stored_are_not_counted() -> None:
    def fail(offset: int, payload: memoryview) -> None:
        raise OSError("no room")

    intake = Intake(4)
    with pytest.raises(OSError, match="no room"):
        intake.take(frame(0, b"abcd"), fail)
    assert intake.received_bytes == 0


def test_whole_bytes_other_than_announced_are_refused_with_both_checksums() -> None:
    intake = Intake(4, crc32=0xDEADBEEF, what="update of site-3, round 12")
    intake.take(frame(0, b"abcd"), lambda offset, payload: None)
    with pytest.raises(BadFrame, match="update of site-3, round 12") as caught:
        intake.check_whole()
    assert (caught.value.value, caught.value.bound) == (f"{zlib.crc32(b'abcd'):08x}", "deadbeef")
