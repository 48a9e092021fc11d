"""The unit of exact sums: a power of two, small enough to lose nothing that matters, large enough never to overflow."""

from __future__ import annotations

import math
from fractions import Fraction

SUM_BITS = 62


def quantum_exponent(bound: float, num_sites: int) -> int:
    """The exponent of two of the quantum: -40 for the default bound of 1024 and 4,096 sites."""
    mantissa, exponent = math.frexp(bound)  # bound = mantissa * 2^exponent, mantissa in [0.5, 1)
    return (exponent - 1 if mantissa == 0.5 else exponent) + bits(num_sites) - SUM_BITS


def bits(num_sites: int) -> int:
    """c of N = 2^c, the smallest power of two that is at least `num_sites`."""
    return (num_sites - 1).bit_length()


def in_quanta(value: float, bound: float, num_sites: int) -> Fraction:
    """`value` as an exact number of quanta."""
    exponent = quantum_exponent(bound, num_sites)
    return Fraction(value) * (Fraction(1, 1 << exponent) if exponent >= 0 else Fraction(1 << -exponent))
