"""The reducers that the contract suite (`test_reducers.py`) holds. A new one is one more line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from atoll.aggregation.parts import build
from atoll.aggregation.reducers.reduction import Reducer

ClosedForm = Callable[[Sequence[float], Sequence[int]], float]  # values of one coordinate and weights, by site


@dataclass(frozen=True, slots=True, kw_only=True)
class ReducerCase:
    kind: str
    closed_form: ClosedForm
    tolerance: float  # largest error of a coordinate whose values are of the order of 1

    def make(self) -> Reducer:
        made: Reducer = build("reducer", self.kind, {})
        return made


def weighted_mean(values: Sequence[float], weights: Sequence[int]) -> float:
    """Exact, rounded once."""
    total = sum((Fraction(value) * weight for value, weight in zip(values, weights, strict=True)), Fraction(0))
    return float(total / sum(weights))


CASES = (ReducerCase(kind="mean", closed_form=weighted_mean, tolerance=2e-15),)
