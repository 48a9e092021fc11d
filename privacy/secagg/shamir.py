"""Shamir's secret sharing (1979, "How to Share a Secret") of 32-byte secrets over the prime field of 2^256 + 297.

Share number x is the value at x of a random polynomial of degree t - 1 whose value at 0 is the secret: t shares give
it, t - 1 say nothing about it. The field holds any 32 bytes, and more shares than a cohort has sites.

Python's integers take time that depends on their values; the secrets here serve one session, inside one process.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Final

PRIME: Final = 2**256 + 297  # the smallest prime above 2^256
SECRET_BYTES: Final = 32
SHARE_BYTES: Final = 33  # big endian


def split(
    secret: bytes, threshold: int, numbers: Sequence[int], below: Callable[[int], int] = secrets.randbelow
) -> dict[int, bytes]:
    """A share for each of `numbers`, any `threshold` of which give the secret.

    Args:
        below: draws a number from 0 to below its argument, uniformly; another one only to repeat a transcript.

    Raises:
        ValueError: the secret is not 32 bytes, numbers are not different and positive, or are fewer than `threshold`.
    """
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"a secret of {len(secret)} bytes, wanted {SECRET_BYTES}")
    if len(set(numbers)) != len(numbers) or not all(0 < number < PRIME for number in numbers):
        raise ValueError("shares need different, positive numbers")
    if not 1 <= threshold <= len(numbers):
        raise ValueError(f"{len(numbers)} shares of which {threshold} are needed")
    coefficients = [int.from_bytes(secret, "big"), *(below(PRIME) for _ in range(threshold - 1))]
    return {number: _value(coefficients, number).to_bytes(SHARE_BYTES, "big") for number in numbers}


def rebuild(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """The secret, from the `threshold` shares with the smallest numbers.

    Raises:
        ValueError: there are too few, one is no element of the field, or together they give no 32 bytes: at least one
            of them is wrong.
    """
    if not 1 <= threshold <= len(shares):
        raise ValueError(f"{len(shares)} shares where {threshold} are needed")
    numbers = tuple(sorted(shares)[:threshold])
    secret = 0
    for number, weight in zip(numbers, _weights_at_zero(numbers), strict=True):
        secret += weight * element(shares[number])
    secret %= PRIME
    if secret >= 1 << (8 * SECRET_BYTES):
        raise ValueError("the shares are of no secret of 32 bytes")
    return secret.to_bytes(SECRET_BYTES, "big")


def element(share: bytes) -> int:
    """The element of the field that a share is. Raises ValueError."""
    value = int.from_bytes(share, "big")
    if len(share) != SHARE_BYTES or value >= PRIME:
        raise ValueError(f"a share of {len(share)} bytes is no element of the field")
    return value


def _value(coefficients: Sequence[int], number: int) -> int:
    value = 0
    for coefficient in reversed(coefficients):  # Horner
        value = (value * number + coefficient) % PRIME
    return value


@lru_cache(maxsize=256)
def _weights_at_zero(numbers: tuple[int, ...]) -> tuple[int, ...]:
    """Lagrange's coefficients at 0: all secrets that one set of sites rebuilds share them."""
    weights = []
    for number in numbers:
        over, under = 1, 1
        for other in numbers:
            if other != number:
                over = over * other % PRIME
                under = under * (other - number) % PRIME
        weights.append(over * pow(under, -1, PRIME) % PRIME)
    return tuple(weights)
