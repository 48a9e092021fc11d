"""The reducers that the contract suite (`test_reducers.py`) holds, of each kind of need. A new one is one more line."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from fractions import Fraction

from atoll.aggregation.parts import BUILT_IN
from atoll.aggregation.testing.reducer_contract import ReducerCase


def weighted_mean(values: Sequence[float], weights: Sequence[int]) -> float:
    """Exact, rounded once."""
    total = sum((Fraction(value) * weight for value, weight in zip(values, weights, strict=True)), Fraction(0))
    return float(total / sum(weights))


def mean(values: Sequence[float], weights: Sequence[int]) -> float:
    """Of the values, whatever their weights."""
    return statistics.fmean(values)


def median(values: Sequence[float], weights: Sequence[int]) -> float:
    """Of the values, whatever their weights."""
    return statistics.median(values)


def trimmed(values: Sequence[float], weights: Sequence[int]) -> float:
    """Without a quarter at each end."""
    cut = len(values) // 4
    return statistics.fmean(sorted(values)[cut : len(values) - cut])


FAR = 1e9  # a length that no update has
CASES = (
    ReducerCase(kind="mean", closed_form=weighted_mean, tolerance=2e-15),
    ReducerCase(kind="norm_bound", options={"norm": FAR}, closed_form=weighted_mean, tolerance=2e-15),
    ReducerCase(kind="median", closed_form=median),
    ReducerCase(kind="trimmed_mean", options={"fraction": 0.25}, closed_form=trimmed),
    ReducerCase(kind="krum", options={"faulty": 0}),
    ReducerCase(kind="multi_krum", options={"faulty": 0, "select": 4}, closed_form=mean),
    ReducerCase(kind="bulyan", options={"faulty": 0}, closed_form=mean),
    ReducerCase(kind="geometric_median"),
    ReducerCase(kind="centered_clipping", options={"radius": FAR}, closed_form=mean),
    ReducerCase(kind="bucketing", options={"size": 1, "inner": {"kind": "median"}}, closed_form=median),
    ReducerCase(kind="fltrust", options={"trusted": "cedar"}),
    ReducerCase(kind="qfedavg", options={"q": 0.0, "lr": 1.0}, closed_form=mean),
)
OPAQUE = {"append"}  # of payloads that have no values: tests/aggregation/reducers/test_append.py
assert {case.kind for case in CASES} == set(BUILT_IN["reducer"]) - OPAQUE
