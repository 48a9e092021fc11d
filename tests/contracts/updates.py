"""Models and updates for tests of codecs, sums and reducers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from atoll.aggregation.codecs.encoding import Codec
from atoll.aggregation.encode import encode_update
from atoll.aggregation.layout import Buffers, UpdateLayout, update_layout
from atoll.aggregation.parts import build
from atoll.aggregation.reducers.reduction import Reduction
from atoll.aggregation.rounding import Rounding, rounding_key
from atoll.wire.manifest import DTYPE_BYTES, Entry, Manifest
from atoll.wire.tensors import DTYPES

BOUND = 1024.0
CODECS = ("native", "float32", "bfloat16", "int8", "int4", "top_k", "random_k")

# Tensors of odd sizes, of one that spans blocks, of two item sizes, buffers of both kinds, a scalar, an empty one.
SMALL: tuple[Entry, ...] = (
    ("conv.weight", "float32", (7, 5, 3), "parameter"),
    ("conv.bias", "float32", (7,), "parameter"),
    ("norm.running_mean", "float32", (7,), "buffer"),
    ("norm.num_batches_tracked", "int64", (), "buffer"),
    ("head.weight", "float32", (251, 263), "parameter"),
    ("half", "float16", (33,), "parameter"),
    ("gate", "bfloat16", (33,), "parameter"),
    ("nothing", "float32", (0, 4), "parameter"),
    ("mask", "bool", (9,), "buffer"),
)
EVERY_DTYPE: tuple[Entry, ...] = tuple(
    (f"{dtype}.{role}", dtype, (3, 5), role) for dtype in DTYPE_BYTES for role in ("parameter", "buffer")
)
FLOATS: tuple[Entry, ...] = (("w", "float32", (300,), "parameter"), ("b", "float32", (20,), "parameter"))


def codec(name: str) -> Codec:
    made: Codec = build("codec", name, {})
    return made


def layout_of(entries: Sequence[Entry], codec_name: str = "native", buffers: Buffers = "mean") -> UpdateLayout:
    return update_layout(Manifest.build(entries), codec(codec_name), buffers)


def random_state(manifest: Manifest, seed: int, *, scale: float = 1.0) -> dict[str, Tensor]:
    """One tensor for each entry, of values about `scale` (integers: up to 100)."""
    generator = torch.Generator().manual_seed(seed)
    return {spec.name: _random(spec.dtype, spec.shape, generator, scale) for spec in manifest}


def _random(dtype: str, shape: tuple[int, ...], generator: torch.Generator, scale: float) -> Tensor:
    wanted = DTYPES[dtype]
    if wanted.is_complex:
        parts = torch.randn((*shape, 2), generator=generator, dtype=torch.float64) * scale
        return torch.view_as_complex(parts.to(torch.float16 if dtype == "complex32" else torch.float64)).to(wanted)
    if dtype in ("float4_e2m1fn_x2", "float8_e8m0fnu"):  # torch makes neither from numbers
        return torch.randint(0, 100, shape, generator=generator, dtype=torch.uint8).view(wanted)
    if wanted.is_floating_point:
        return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(wanted)
    return torch.randint(0, 2 if dtype == "bool" else 100, shape, generator=generator).to(wanted)


def rounding(site: str = "site", round: int = 1) -> Rounding:
    return Rounding(rounding_key(site.encode().ljust(32, b"."), round))


def encoded(
    layout: UpdateLayout,
    base: Mapping[str, Tensor],
    trained: Mapping[str, Tensor],
    *,
    site: str = "site",
    bound: float = BOUND,
) -> bytes:
    """The bytes of an update."""
    out = bytearray(layout.num_bytes)
    encode_update(layout, base, trained, out, rounding=rounding(site), bound=bound)
    return bytes(out)


def whole_mean(reduction: Reduction) -> Tensor:
    """The combined difference of all values, float64."""
    mean_V = torch.empty(reduction.layout.num_values, dtype=torch.float64)
    reduction.difference(0, mean_V)
    return mean_V


def decoded(layout: UpdateLayout, payload: bytes) -> Tensor:
    """The values of an update as its codec gives them, float64."""
    data = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    values_V = torch.empty(layout.num_values, dtype=torch.float64)
    for entry in layout.means:
        region = data[entry.offset : entry.offset + entry.num_bytes]
        entry.encoding.decode(region, 0, values_V[entry.index : entry.index + entry.num_values])
    return values_V
