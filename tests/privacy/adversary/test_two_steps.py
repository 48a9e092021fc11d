"""Why no session follows another over one version with other factors: two such sums show the outlier (decision 0017)."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

Vector = NDArray[np.float64]
ALIKE, VALUES = 9, 20_000


def updates(spread: float, seed: int) -> Vector:
    """Nine sites that are alike, of one weight, and one that is not; `spread` says how unequally long they are."""
    draw = np.random.default_rng(seed)
    common = draw.normal(size=VALUES)
    rows = [common + draw.normal(size=VALUES) * (1 + spread * draw.normal()) for _ in range(ALIKE)]
    return np.array([*rows, 4.0 * draw.normal(size=VALUES)])


def weiszfeld_sum(rows: Vector, centre: Vector) -> tuple[Vector, float]:
    """What a server learns of one masked step: sum of b_i x_i, and sum of b_i, with b_i = 1 / ||z - x_i||."""
    factors = 1 / np.linalg.norm(rows - centre, axis=1)
    return factors @ rows, float(factors.sum())


def attack(mean: Vector, weighted: Vector, factors: float, num_sites: int) -> Vector:
    """The update of the site that is unlike the others, which all have one distance from the mean. In closed form.

    The server knows z = mean, S = sum of b_i x_i and B = sum of b_i, where b_i = r for all but the outlier o. Then
    S - B z = (b_o - r) (x_o - z), B = (n - 1) r + b_o and b_o = 1 / ||x_o - z||: three equations for x_o, r and b_o.
    """
    direction = weighted - factors * mean
    length = float(np.linalg.norm(direction))
    # ||x_o - z|| = length / (r - b_o) = 1 / b_o, so b_o (1 + length) = r and B = ((n - 1) (1 + length) + 1) b_o.
    outlying = factors / ((num_sites - 1) * (1 + length) + 1)
    ratio = outlying * (1 + length)
    found: Vector = mean + direction / (outlying - ratio)
    return found


@pytest.mark.parametrize(("spread", "error"), [(0.0, 0.05), (0.01, 0.05), (0.05, 0.2)])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_one_weiszfeld_step_after_the_mean_shows_the_outlier(spread: float, error: float, seed: int) -> None:
    rows = updates(spread, seed)
    mean = rows.mean(axis=0)  # the first masked sum, over all ten
    found = attack(mean, *weiszfeld_sum(rows, mean), ALIKE + 1)  # the second one, over the same ten
    assert np.linalg.norm(found - rows[-1]) <= error * np.linalg.norm(rows[-1])


def test_the_first_sum_alone_or_twice_shows_nothing() -> None:
    rows = updates(0.0, 1)
    mean = rows.mean(axis=0)
    again, factors = rows.sum(axis=0), float(len(rows))  # the same factors: what decision 0013 allows
    assert np.linalg.norm(again - factors * mean) < 1e-9 * np.linalg.norm(rows[-1])
    cosine = mean @ rows[-1] / (np.linalg.norm(mean) * np.linalg.norm(rows[-1]))
    assert cosine < 0.5
