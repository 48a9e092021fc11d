"""Levels of a ring: no overflow, rounding that is unbiased and repeats, the stated error."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from atoll.privacy.secagg.fixed_point import Quantiser, total
from atoll.privacy.secagg.levels import Bits, effective_bits, largest_level

KEY = b"\x09" * 32


def levels(values: np.ndarray, *, num_sites: int, bits: Bits, bound: float, start: int = 0) -> np.ndarray:
    out = np.zeros(values.size, dtype=f"<u{bits // 8}")
    Quantiser(KEY, scale=largest_level(num_sites, bits) / bound, bits=bits).write(values, start, out)
    return total(out)


@pytest.mark.parametrize(
    ("num_sites", "bits", "level"),
    [
        (10, 32, 214_748_363),
        (32, 32, 67_108_862),
        (100, 32, 21_474_835),
        (1000, 32, 2_147_482),
        (10, 16, 3275),
        (32, 16, 1022),
        (100, 16, 326),
        (1000, 16, 31),
    ],
)
def test_levels_of_cohorts(num_sites: int, bits: Bits, level: int) -> None:
    assert largest_level(num_sites, bits) == level
    assert num_sites * (level + 1) <= 2 ** (bits - 1) - 1


def test_a_cohort_too_large_for_its_lane() -> None:
    with pytest.raises(ValueError, match="16 bits hold no sum of 20000 sites"):
        largest_level(20_000, 16)
    assert effective_bits(10, 32) == pytest.approx(27.7, abs=0.05)
    assert effective_bits(10, 32, share=1 / 1024) == pytest.approx(17.7, abs=0.05)


@pytest.mark.parametrize("bits", [16, 32])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_values_at_the_bound_of_all_sites_do_not_overflow(bits: Bits, dtype: type) -> None:
    num_sites, bound = 32, 0.37
    values: NDArray[Any] = np.array([bound, -bound] * 500, dtype=dtype)
    one = levels(values, num_sites=num_sites, bits=bits, bound=float(abs(values[0])))
    assert np.abs(one).max() <= largest_level(num_sites, bits) + 1
    summed = np.zeros(values.size, dtype=f"<u{bits // 8}")
    for _ in range(num_sites):
        summed += one.astype(f"<i{bits // 8}").view(summed.dtype)
    assert np.array_equal(total(summed), num_sites * one)


@pytest.mark.parametrize("bits", [16, 32])
def test_rounding_is_unbiased_and_within_one_level(bits: Bits) -> None:
    values = np.random.default_rng(5).uniform(-1, 1, 200_000)
    exact = values * largest_level(10, bits)
    error = levels(values, num_sites=10, bits=bits, bound=1.0) - exact
    assert np.abs(error).max() < 1 + 1e-6
    # The variance of rounding x at random is f (1 - f) with f the part behind the point: 1/6 in the mean.
    assert abs(error.mean()) < 5 * np.sqrt(1 / 6 / values.size)
    assert error.var() == pytest.approx(1 / 6, rel=0.02)


def test_whole_levels_stay() -> None:
    level = largest_level(10, 32)
    values = np.array([0.0, 1.0, -1.0, 1000.0, -level]) / level
    assert levels(values, num_sites=10, bits=32, bound=1.0).tolist() == [0, 1, -1, 1000, -level]


@settings(max_examples=40, deadline=None)
@given(start=st.integers(0, 70_000), size=st.integers(1, 40_000))
def test_a_slice_has_the_levels_of_the_whole(start: int, size: int) -> None:
    values = np.random.default_rng(2).normal(size=110_000).astype(np.float32)
    whole = levels(values, num_sites=10, bits=32, bound=8.0)
    part = levels(values[start : start + size], num_sites=10, bits=32, bound=8.0, start=start)
    assert np.array_equal(part, whole[start : start + size])


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan")])
def test_a_scale_that_is_none(scale: float) -> None:
    with pytest.raises(ValueError, match="scale"):
        Quantiser(KEY, scale=scale, bits=32)
