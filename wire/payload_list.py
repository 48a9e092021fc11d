"""A model version that is a list of opaque payloads, oldest first: what a run of an `OpaqueApp` makes. Loads no torch.

::

    ATOLLPL1                                   8 bytes
    (length u64, little endian; the payload)*

In a model file it is the one tensor `payloads`, of bytes. Nothing in a payload is ever looked into here.
"""

from __future__ import annotations

from collections.abc import Iterator

from atoll.wire.errors import BadManifest
from atoll.wire.manifest import Manifest

MAGIC = b"ATOLLPL1"
LENGTH_BYTES = 8
TENSOR = "payloads"


def manifest_of(num_bytes: int) -> Manifest:
    """The manifest of a list of so many bytes, magic included."""
    return Manifest.build([(TENSOR, "uint8", (num_bytes,), "buffer")])


def is_list(manifest: Manifest) -> bool:
    """Whether a model of this manifest is a list of payloads, not tensors that are trained."""
    return [spec.name for spec in manifest] == [TENSOR] and manifest == manifest_of(manifest.num_bytes)


def prefix_of(num_bytes: int) -> bytes:
    """What stands before a payload of so many bytes."""
    return num_bytes.to_bytes(LENGTH_BYTES, "little")


def payloads_in(data: memoryview | bytes) -> list[bytes]:
    """The payloads of a version, copied out.

    Raises:
        BadManifest: it is no such list, or a length leads beyond its end.
    """
    return [bytes(part) for part in _parts(memoryview(data))]


def _parts(data: memoryview) -> Iterator[memoryview]:
    if data[: len(MAGIC)] != MAGIC:
        text = f"model version is no list of payloads: it begins with {bytes(data[:8])!r}, wanted {MAGIC!r}; fetch it again"
        raise BadManifest(text, field=TENSOR, value=bytes(data[:8]), bound=MAGIC)
    position = len(MAGIC)
    while position < len(data):
        start = position + LENGTH_BYTES
        num_bytes = int.from_bytes(data[position:start], "little")
        if num_bytes > len(data) - start:
            text = f"model version names a payload of {num_bytes} bytes, {max(0, len(data) - start)} are left; fetch it again"
            raise BadManifest(text, field=TENSOR, value=num_bytes, bound=max(0, len(data) - start))
        yield data[start : start + num_bytes]
        position = start + num_bytes
