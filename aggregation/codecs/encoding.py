"""What a codec is: a choice, for each dtype, of how the real numbers of a tensor become bytes.

An encoding gives every tensor a fixed number of bytes and finds any block of it without reading the ones before, so
an update can be checked and folded piece by piece, and each rank of a site can write its own slice.
P = values of one block, in the order of the tensor's elements (real and imaginary part in turn).
"""

from __future__ import annotations

from typing import Literal, Protocol

from torch import Tensor

from atoll.aggregation.rounding import Rounding

Feedback = Literal["none", "error", "difference"]
"""What a site carries from one update to the next: nothing, the error of the last one, or what it has sent so far."""


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
        """Values that share bytes; a block starts at a multiple of it, and ends at one or with the region.

        1 means that neighbours can be joined.
        """
        ...

    @property
    def two_limbs(self) -> bool:
        """Whether sums keep a second accumulator, since one does not hold the precision that travels."""
        ...

    @property
    def limit(self) -> float:
        """Largest magnitude that can be written."""
        ...

    @property
    def gain(self) -> float:
        """Largest factor by which a value grows on its way: 1 but where what travels stands for what does not."""
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
    """How an update travels.

    The decoded values of an additive codec may be summed, which is all that a reducer that needs "sum" asks. Masks of
    secure aggregation cover what travels and need more: the same coordinates from every site. A sparse codec does not
    send those, so it is additive and cannot be masked.

    A codec may also have `sparse` and `feedback`: see `is_sparse` and `feedback_of`.
    """

    @property
    def name(self) -> str: ...

    @property
    def additive(self) -> bool: ...

    def encoding(self, dtype: str) -> Encoding:
        """The encoding of differences of a floating or complex tensor of `dtype` (as the manifest names it)."""
        ...


def is_sparse(codec: Codec) -> bool:
    """Whether it leaves most values of an update out: parameters bear that, statistics and whole models do not."""
    return bool(getattr(codec, "sparse", False))


def feedback_of(codec: Codec) -> Feedback:
    """What a site carries between updates that this codec makes."""
    feedback: Feedback = getattr(codec, "feedback", "none")
    return feedback
