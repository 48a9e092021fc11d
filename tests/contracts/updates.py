"""Models and updates for tests of codecs, sums and reducers."""

from __future__ import annotations

from atoll.aggregation.codecs.encoding import Codec
from atoll.aggregation.parts import build
from atoll.aggregation.testing.updates import (
    BOUND,
    SMALL,
    decoded,
    encoded,
    layout_of,
    random_state,
    rounding,
    whole_mean,
)
from atoll.wire.manifest import DTYPE_BYTES, Entry

__all__ = [
    "BOUND",
    "CODECS",
    "EVERY_DTYPE",
    "FLOATS",
    "SMALL",
    "codec",
    "decoded",
    "encoded",
    "layout_of",
    "random_state",
    "rounding",
    "whole_mean",
]

CODECS = ("native", "float32", "bfloat16", "int8", "int4", "top_k", "random_k")
EVERY_DTYPE: tuple[Entry, ...] = tuple(
    (f"{dtype}.{role}", dtype, (3, 5), role) for dtype in DTYPE_BYTES for role in ("parameter", "buffer")
)
FLOATS: tuple[Entry, ...] = (("w", "float32", (300,), "parameter"), ("b", "float32", (20,), "parameter"))


def codec(name: str) -> Codec:
    made: Codec = build("codec", name, {})
    return made
