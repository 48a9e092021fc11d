"""The reducers that the contract suite (`test_reducers.py`) holds, of each kind of need. A new one is one more line."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from samples.median import Median

from atoll.aggregation.parts import build
from atoll.aggregation.reducers import Reducer

ClosedForm = Callable[[Sequence[float], Sequence[int]], float]  # values of one coordinate and weights, by site


@dataclass(frozen=True, slots=True, kw_only=True)
class ReducerCase:
    kind: str
    made_by: Callable[[], Reducer]
    closed_form: ClosedForm
    tolerance: float  # largest error of a coordinate whose values are of the order of 1


def weighted_mean(values: Sequence[float], weights: Sequence[int]) -> float:
    """Exact, rounded once."""
    total = sum((Fraction(value) * weight for value, weight in zip(values, weights, strict=True)), Fraction(0))
    return float(total / sum(weights))


def median(values: Sequence[float], weights: Sequence[int]) -> float:
    """Of the values, whatever their weights."""
    return statistics.median(values)


CASES = (
    ReducerCase(kind="mean", made_by=lambda: build("reducer", "mean", {}), closed_form=weighted_mean, tolerance=2e-15),
    ReducerCase(kind="median", made_by=lambda: Median(Median.Options()), closed_form=median, tolerance=1e-15),
)
