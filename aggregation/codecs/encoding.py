"""What a codec is: a choice, for each dtype, of how the real numbers of a tensor become bytes.

An encoding gives every tensor a fixed number of bytes and finds any block of it without reading the ones before, so
an update can be checked and folded piece by piece, and each rank of a site can write its own slice.
P = values of one block, in the order of the tensor's elements (real and imaginary part in turn).
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from atoll.aggregation.rounding import Rounding


class Encoding(Protocol):
    """Numbers to bytes and back. `region` is the flat uint8 tensor of all bytes of one tensor (or of a run of them)."""

    @property
    def name(self) -> str:
        """Names the format for ever: a change of bytes is a new name."""
        ...

    @property
    def alignment(self) -> int:
        """Bytes at whose multiples a region starts."""
        ...

    @property
    def group(self) -> int:
        """Values that share bytes; a block starts at a multiple of it. 1 means that neighbours can be joined."""
        ...

    @property
    def two_limbs(self) -> bool:
        """Whether sums keep a second accumulator, since one does not hold the precision that travels."""
        ...

    @property
    def limit(self) -> float:
        """Largest magnitude that can be written."""
        ...

    def reach(self, bound: float) -> float:
        """Largest magnitude that is written for values up to `bound`: rounding may go a little beyond it.

        Never beyond the next power of two, which every encoding writes exactly.
        """
        ...

    def num_bytes(self, num_values: int) -> int:
        """Length of the region of `num_values` values."""
        ...

    def encode(self, values_P: Tensor, region: Tensor, start: int, rounding: Rounding, index: int) -> None:
        """Write values `start`, `start` + 1, ... of a region; `index` is the place of the first in the whole model."""
        ...

    def decode(self, region: Tensor, start: int, out_P: Tensor) -> None:
        """Read as many values as `out_P` (float64) holds, from `start` on."""
        ...

    def magnitude(self, region: Tensor, start: int, stop: int) -> float:
        """Largest magnitude that values `start` to `stop` decode to; NaN or infinite where one is not finite.

        Raises:
            ValueError: bytes that `encode` never writes.
        """
        ...


class Codec(Protocol):
    """How an update travels. An additive codec's decoded values may be summed; only those can be masked."""

    @property
    def name(self) -> str: ...

    @property
    def additive(self) -> bool: ...

    def encoding(self, dtype: str) -> Encoding:
        """The encoding of differences of a floating or complex tensor of `dtype` (as the manifest names it)."""
        ...
