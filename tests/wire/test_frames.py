"""Frames: round trips, and the error for every kind of damage."""

from __future__ import annotations

import struct
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.wire.errors import BadFrame
from atoll.wire.frames import FRAME_HEADER, MAX_FRAME_BYTES, decode_frame, encode_frame
from atoll.wire.manifest import MODEL_BYTES

offsets = st.integers(0, MODEL_BYTES - 4096)
payloads = st.binary(min_size=1, max_size=4096)


@given(offsets, payloads)
def test_round_trip(offset: int, payload: bytes) -> None:
    frame = encode_frame(offset, memoryview(payload))
    assert len(frame) == FRAME_HEADER.size + len(payload)
    found_offset, found = decode_frame(frame)
    assert (found_offset, bytes(found)) == (offset, payload)
    assert found.obj is frame, "a view, not a copy"
    assert found.readonly


def test_the_largest_frame_is_copied_once() -> None:
    payload = memoryview(bytes(MAX_FRAME_BYTES))
    tracemalloc.start()
    try:
        frame = encode_frame(0, payload)
        decode_frame(frame)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < MAX_FRAME_BYTES + (64 << 10)


@given(offsets, payloads, st.data())
def test_truncated(offset: int, payload: bytes, data: st.DataObject) -> None:
    frame = encode_frame(offset, memoryview(payload))
    with pytest.raises(BadFrame):
        decode_frame(frame[: data.draw(st.integers(0, len(frame) - 1))])


@given(offsets, payloads, st.data())
def test_a_flipped_bit_of_length_checksum_or_payload_is_refused(
    offset: int, payload: bytes, data: st.DataObject
) -> None:
    frame = bytearray(encode_frame(offset, memoryview(payload)))
    bit = data.draw(st.integers(8 * 8, len(frame) * 8 - 1))  # an offset out of place is the receiver's to see
    frame[bit // 8] ^= 1 << bit % 8
    with pytest.raises(BadFrame):
        decode_frame(bytes(frame))


@given(st.binary(max_size=64))
def test_any_bytes_give_a_frame_or_the_error(data: bytes) -> None:
    try:
        offset, payload = decode_frame(data)
    except BadFrame:
        return
    assert encode_frame(offset, payload) == data


@pytest.mark.parametrize(
    ("header", "field"),
    [
        (struct.pack("<QII", 0, 0, 0), "length"),
        (struct.pack("<QII", 0, 2**32 - 1, 0), "length"),
        (struct.pack("<QII", 0, MAX_FRAME_BYTES + 1, 0), "length"),
        (struct.pack("<QII", 2**64 - 1, 3, 0x352441C2), "offset"),
        (struct.pack("<QII", MODEL_BYTES - 2, 3, 0x352441C2), "offset"),
        (struct.pack("<QII", 0, 3, 0x352441C3), "crc32"),
        (struct.pack("<QII", 0, 4, 0), "length"),
    ],
)
def test_hostile_headers(header: bytes, field: str) -> None:
    with pytest.raises(BadFrame) as caught:
        decode_frame(header + b"abc")
    assert caught.value.field == field


@pytest.mark.parametrize(("offset", "size"), [(0, 0), (0, MAX_FRAME_BYTES + 1), (-1, 1), (MODEL_BYTES, 1)])
def test_a_frame_that_no_peer_would_take_is_not_made(offset: int, size: int) -> None:
    with pytest.raises(ValueError, match="frame"):
        encode_frame(offset, memoryview(bytes(size)))
