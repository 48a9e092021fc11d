"""Secret sharing: every set of t shares gives the secret, and fewer say nothing."""

from __future__ import annotations

import itertools
import secrets

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.privacy.secagg.shamir import PRIME, SHARE_BYTES, element, rebuild, split


def is_prime(number: int) -> bool:
    """Miller and Rabin, with the first twenty primes as bases."""
    odd, twos = number - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71):
        value = pow(base, odd, number)
        if value in (1, number - 1):
            continue
        if not any((value := value * value % number) == number - 1 for _ in range(twos - 1)):
            return False
    return True


def test_the_modulus_is_the_smallest_prime_above_all_secrets() -> None:
    assert is_prime(PRIME)
    assert not any(is_prime(number) for number in range(2**256 + 1, PRIME, 2))


def test_every_quorum_gives_the_secret() -> None:
    secret = secrets.token_bytes(32)
    shares = split(secret, 3, range(1, 6))
    for numbers in itertools.combinations(shares, 3):
        assert rebuild({number: shares[number] for number in numbers}, 3) == secret
    assert rebuild(shares, 3) == secret


@settings(max_examples=50, deadline=None)
@given(
    secret=st.binary(min_size=32, max_size=32), threshold=st.integers(1, 12), spare=st.integers(0, 5), data=st.data()
)
def test_any_secret_and_threshold(secret: bytes, threshold: int, spare: int, data: st.DataObject) -> None:
    numbers = data.draw(
        st.lists(st.integers(1, 65_536), min_size=threshold + spare, max_size=threshold + spare, unique=True)
    )
    shares = split(secret, threshold, numbers)
    assert all(len(share) == SHARE_BYTES for share in shares.values())
    some = data.draw(st.permutations(numbers))[:threshold]
    assert rebuild({number: shares[number] for number in some}, threshold) == secret


@pytest.mark.parametrize("secret", [bytes(32), b"\xff" * 32])
def test_the_smallest_and_the_largest_secret(secret: bytes) -> None:
    assert rebuild(split(secret, 4, range(1, 8)), 4) == secret


def test_fewer_shares_fit_every_secret() -> None:
    """Two of three shares, and for any claimed secret a third share that makes it: they say nothing."""
    shares = split(secrets.token_bytes(32), 3, [1, 2, 3])
    known = {1: shares[1], 2: shares[2]}
    for claimed in (bytes(32), b"\xff" * 32, secrets.token_bytes(32)):
        # The value at 3 of the polynomial through (0, claimed), (1, ...), (2, ...), by Lagrange: weights 1, -3, 3.
        third = (int.from_bytes(claimed, "big") - 3 * element(known[1]) + 3 * element(known[2])) % PRIME
        assert rebuild({**known, 3: third.to_bytes(SHARE_BYTES, "big")}, 3) == claimed


def test_a_wrong_share_gives_another_secret_or_an_error() -> None:
    secret = secrets.token_bytes(32)
    shares = split(secret, 3, [1, 2, 3])
    shares[2] = ((element(shares[2]) + 1) % PRIME).to_bytes(SHARE_BYTES, "big")
    assert rebuild(shares, 3) != secret


def test_what_is_no_sharing() -> None:
    with pytest.raises(ValueError, match="31 bytes"):
        split(bytes(31), 2, [1, 2])
    with pytest.raises(ValueError, match="different, positive"):
        split(bytes(32), 2, [1, 1])
    with pytest.raises(ValueError, match="different, positive"):
        split(bytes(32), 2, [0, 1])  # the share at 0 is the secret
    with pytest.raises(ValueError, match="2 shares of which 3"):
        split(bytes(32), 3, [1, 2])
    with pytest.raises(ValueError, match="1 shares where 2"):
        rebuild({1: bytes(33)}, 2)
    with pytest.raises(ValueError, match="no element"):
        rebuild({1: PRIME.to_bytes(33, "big"), 2: bytes(33)}, 2)
    with pytest.raises(ValueError, match="no element"):
        rebuild({1: bytes(32), 2: bytes(33)}, 2)
    with pytest.raises(ValueError, match="no secret"):
        rebuild({1: (2**256).to_bytes(33, "big")}, 1)
