"""Frames: pieces of a model or an update, addressed by offset, so that any transfer resumes where it stopped.

A frame is 16 bytes of header, little endian, and its payload::

    offset u64 | length u32 | crc32 u32 (zlib, of the payload) | payload

The checksum catches damage between the processes, not an attacker: TLS authenticates the bytes.
"""

from __future__ import annotations

import struct

from atoll.wire.checksum import crc32_of
from atoll.wire.errors import BadFrame
from atoll.wire.manifest import MODEL_BYTES

FRAME_HEADER = struct.Struct("<QII")
FRAME_BYTES = 1 << 20  # payload of a frame unless told otherwise: large enough to amortise a call, small to buffer
MAX_FRAME_BYTES = 4 << 20  # largest payload taken


def encode_frame(offset: int, payload: memoryview, crc32: int | None = None) -> bytes:
    """The frame of `payload` (contiguous bytes), which stands at byte `offset` of the whole object. Copies once.

    Args:
        crc32: of the payload (zlib) where it is known, which saves most of the work; None computes it.

    Raises:
        ValueError: the payload is empty or over MAX_FRAME_BYTES, or ends beyond the largest object.
    """
    header = encode_header(offset, payload.nbytes, crc32_of(payload) if crc32 is None else crc32)
    return b"".join((header, payload))


def encode_header(offset: int, num_bytes: int, crc32: int) -> bytes:
    """The 16 bytes that stand before a payload. Raises ValueError as `encode_frame`."""
    if not 1 <= num_bytes <= MAX_FRAME_BYTES:
        raise ValueError(f"a frame holds 1 to {MAX_FRAME_BYTES} bytes, not {num_bytes}")
    if not 0 <= offset <= MODEL_BYTES - num_bytes:
        raise ValueError(f"a frame at byte {offset} of {num_bytes} bytes ends beyond {MODEL_BYTES}")
    return FRAME_HEADER.pack(offset, num_bytes, crc32)


def ends_at(frame: bytes) -> int:
    """The byte of the whole object at which a frame of our own making ends."""
    offset, length, _ = FRAME_HEADER.unpack_from(frame)
    return int(offset + length)


def decode_frame(frame: bytes) -> tuple[int, memoryview]:
    """Offset and payload of a frame; the payload is a view into `frame`, never a copy.

    Raises:
        BadFrame: the frame is truncated, too long, empty, corrupted, or ends beyond the largest object.
    """
    if len(frame) < FRAME_HEADER.size:
        raise BadFrame(
            f"frame of {len(frame)} bytes is shorter than its header of {FRAME_HEADER.size}; send it again",
            field="length",
            value=len(frame),
            bound=FRAME_HEADER.size,
        )
    offset, length, crc32 = decode_header(frame)
    payload = memoryview(frame)[FRAME_HEADER.size :].toreadonly()
    if payload.nbytes != length:
        raise BadFrame(
            f"frame at byte {offset} claims {length} bytes and carries {payload.nbytes}; send it again",
            field="length",
            value=payload.nbytes,
            bound=length,
        )
    check_payload(offset, payload, crc32)
    return offset, payload


def decode_header(header: bytes | bytearray) -> tuple[int, int, int]:
    """Offset, length and crc32 that the first 16 bytes of a frame claim for its payload.

    Raises:
        BadFrame: the frame would be empty, too long, or end beyond the largest object.
    """
    offset, length, crc32 = FRAME_HEADER.unpack_from(header)
    if not 1 <= length <= MAX_FRAME_BYTES:
        raise BadFrame(
            f"frame at byte {offset} claims {length} bytes; 1 to {MAX_FRAME_BYTES} are taken",
            field="length",
            value=length,
            bound=f"1 to {MAX_FRAME_BYTES}",
        )
    if offset > MODEL_BYTES - length:
        raise BadFrame(
            f"frame at byte {offset} ends beyond the largest object of {MODEL_BYTES} bytes",
            field="offset",
            value=offset,
            bound=MODEL_BYTES - length,
        )
    return offset, length, crc32


def check_payload(offset: int, payload: memoryview, crc32: int) -> None:
    """Raises BadFrame where the payload's crc32 is not the one that its header claims."""
    found = crc32_of(payload)
    if found != crc32:
        raise BadFrame(
            f"frame at byte {offset}: crc32 of the payload is not that of the header; send it again",
            field="crc32",
            value=f"{found:08x}",
            bound=f"{crc32:08x}",
        )
