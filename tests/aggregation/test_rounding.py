from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.aggregation.rounding import Rounding, rounding_key

SECRET = bytes(range(32))


@given(start=st.integers(0, 10_000), count=st.integers(0, 300))
def test_any_part_can_be_drawn_alone(start: int, count: int) -> None:
    rounding = Rounding(rounding_key(SECRET, 1))
    assert torch.equal(rounding.uniform(start, count), rounding.uniform(0, start + count)[start:])


def test_numbers_far_into_a_huge_model() -> None:
    rounding = Rounding(rounding_key(SECRET, 1))
    far = 10**12 + 3
    assert torch.equal(rounding.uniform(far, 10)[4:], rounding.uniform(far + 4, 6))


def test_numbers_are_uniform_on_the_unit_interval() -> None:
    numbers = Rounding(rounding_key(SECRET, 1)).uniform(0, 1 << 16)
    assert 0 <= numbers.min() < 1e-3
    assert 1 - 1e-3 < numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 5 * (1 / 12 / (1 << 16)) ** 0.5
    counts = torch.histc(numbers, bins=64, min=0, max=1)
    chi_square = ((counts - 1024) ** 2 / 1024).sum()
    assert chi_square < 63 + 5 * (2 * 63) ** 0.5


def test_secret_and_round_each_make_another_key() -> None:
    keys = {rounding_key(secret, round) for secret in (SECRET, bytes(32)) for round in (1, 2, 256)}
    assert len(keys) == 6
    assert {len(key) for key in keys} == {32}


def test_the_numbers_of_a_key_are_fixed_for_ever() -> None:
    numbers = Rounding(rounding_key(SECRET, 1)).uniform(5, 3)
    assert [round(number * 2**24) for number in numbers.tolist()] == GOLDEN


@pytest.mark.parametrize("size", [0, 16, 31, 33])
def test_a_short_secret_is_no_secret(size: int) -> None:
    with pytest.raises(ValueError, match=f"{size} bytes"):
        rounding_key(bytes(size), 1)


GOLDEN = [11850840, 3041143, 3188187]
