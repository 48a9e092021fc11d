"""How many levels a value has in a ring, by the sites of a sum. Without numpy, which an agent does not load."""

from __future__ import annotations

import math
from typing import Literal

Bits = Literal[16, 32]


def largest_level(num_sites: int, bits: Bits) -> int:
    """L, the magnitude that a value at its bound has in the ring.

    Raises:
        ValueError: so many sites leave no level.
    """
    level: int = (2 ** (bits - 1) - 1) // num_sites - 1
    if num_sites < 1 or level < 1:
        raise ValueError(f"{bits} bits hold no sum of {num_sites} sites; take the lane of 32 bits, or fewer sites")
    return level


def effective_bits(num_sites: int, bits: Bits, share: float = 1.0) -> float:
    """Bits of a value at its bound that come through, where a site's weight is `share` of the largest."""
    return math.log2(largest_level(num_sites, bits) * share)
