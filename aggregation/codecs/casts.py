"""Differences as floating-point numbers: in each tensor's own dtype, or all in one.

Error of a value x, by rounding to the nearest: at most 2^-24 |x| in float32, 2^-8 |x| in bfloat16, and
max(2^-11 |x|, 2^-25) in float16 (whose smallest numbers are coarse). float64 is exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from atoll.aggregation.blocks import largest_magnitude
from atoll.aggregation.codecs.encoding import Encoding
from atoll.aggregation.rounding import Rounding
from atoll.wire.job import Strict


@dataclass(frozen=True, slots=True)
class Cast:
    """Each value in `dtype`, little endian, one after the other."""

    dtype: torch.dtype
    group: int = 1

    gain = 1.0

    @property
    def name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def alignment(self) -> int:
        return self.dtype.itemsize

    @property
    def two_limbs(self) -> bool:
        return self.dtype is torch.float64

    @property
    def limit(self) -> float:
        return torch.finfo(self.dtype).max

    def reach(self, bound: float) -> float:
        # As differences go: to working precision, then to the dtype; each rounding is monotone.
        working = torch.float64 if self.two_limbs else torch.float32
        return torch.tensor(min(bound, self.limit), dtype=working).to(self.dtype).item()

    def num_bytes(self, num_values: int) -> int:
        return num_values * self.dtype.itemsize

    def encode(self, values_P: Tensor, region: Tensor, start: int, rounding: Rounding, index: int) -> None:
        region.view(self.dtype)[start : start + values_P.numel()].copy_(values_P)

    def decode(self, region: Tensor, start: int, out_P: Tensor) -> None:
        out_P.copy_(region.view(self.dtype)[start : start + out_P.numel()])

    def magnitude(self, region: Tensor, start: int, stop: int) -> float:
        return largest_magnitude(region.view(self.dtype)[start:stop])


FLOAT64, FLOAT32 = Cast(torch.float64), Cast(torch.float32)
FLOAT16, BFLOAT16 = Cast(torch.float16), Cast(torch.bfloat16)

# A difference of two float8 numbers does not fit float8 (its range doubles, and steps would be lost), so it travels
# in the 16-bit type with enough range for all four.
_NATIVE: Final[Mapping[str, Encoding]] = {
    "float64": FLOAT64,
    "complex128": FLOAT64,
    "float32": FLOAT32,
    "complex64": FLOAT32,
    "float16": FLOAT16,
    "complex32": FLOAT16,
    "bfloat16": BFLOAT16,
    "float8_e4m3fn": BFLOAT16,
    "float8_e5m2": BFLOAT16,
    "float8_e4m3fnuz": BFLOAT16,
    "float8_e5m2fnuz": BFLOAT16,
}


def native_encoding(dtype: str) -> Encoding:
    """The encoding of differences in a tensor's own dtype."""
    return _NATIVE[dtype]


SUMMABLE: Final = frozenset(_NATIVE)
"""Dtypes whose differences can be summed; tensors of the others are combined by their values."""


class Native:
    """Each tensor's difference in the tensor's own dtype (float8 as bfloat16).

    Error: half a unit in the last place of the dtype. Bytes: as the model.
    """

    class Options(Strict):
        pass

    def __init__(self, options: Options) -> None:
        self.name, self.additive = "native", True

    def encoding(self, dtype: str) -> Encoding:
        return native_encoding(dtype)


class Float32:
    """Every difference in float32.

    Error: at most 2^-24 of the value. Bytes: 4 a value; halves float64 models, widens 16-bit ones without loss.
    """

    class Options(Strict):
        pass

    def __init__(self, options: Options) -> None:
        self.name, self.additive = "float32", True

    def encoding(self, dtype: str) -> Encoding:
        return FLOAT32


class BFloat16:
    """Every difference in bfloat16, rounded to the nearest.

    Error: at most 2^-8 of the value. Bytes: 2 a value.
    """

    class Options(Strict):
        pass

    def __init__(self, options: Options) -> None:
        self.name, self.additive = "bfloat16", True

    def encoding(self, dtype: str) -> Encoding:
        return BFLOAT16
