"""Statistics over sites: exact whatever the partition, and no number about a small group."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from atoll.aggregation.statistics import FeatureStatistics, Moments, check_statistics, pooled, summarise
from atoll.wire.errors import BadUpdate, TooLarge
from atoll.wire.statistics_section import StatisticsSection

VALUES = st.floats(-1e6, 1e6, allow_nan=False, width=64)
SECTION = StatisticsSection.model_validate(
    {"histograms": {"x": {"range": [-3.0, 3.0], "bins": 24}}, "quantiles": [0.01, 0.25, 0.5, 0.9, 0.999]}
)
EDGES = np.array(SECTION.histograms["x"].all_edges)


def exact(values: Sequence[float]) -> tuple[float, float]:
    """Mean and variance in rational numbers, rounded once."""
    whole = [Fraction(value) for value in values]
    mean = sum(whole, Fraction(0)) / len(whole)
    squares = sum(((value - mean) ** 2 for value in whole), Fraction(0))
    return float(mean), float(squares / max(1, len(whole) - 1))


def sent(values: NDArray[np.float64], least: int = 5, batches: int = 3) -> FeatureStatistics:
    """What a site sends of a feature."""
    moments = Moments()
    for batch in np.array_split(values, batches):
        moments.add(batch.tolist())
    bins = np.bincount(np.searchsorted(EDGES, values, side="right"), minlength=len(EDGES) + 1)
    stops, counts = pooled(bins.tolist(), least)
    total, low = moments.total
    return FeatureStatistics(
        count=moments.count, total=total, total_low=low, squares=moments.squares, stops=stops, counts=counts
    )


@given(st.lists(VALUES, min_size=2, max_size=60), st.integers(0, 2**32 - 1))
def test_any_partition_gives_the_moments_of_the_whole(values: list[float], seed: int) -> None:
    rng = np.random.default_rng(seed)
    cuts = sorted(rng.integers(0, len(values) + 1, size=rng.integers(0, 6)))
    parts = [values[a:b] for a, b in itertools.pairwise([0, *cuts, len(values)])]
    rng.shuffle(parts)
    sites = {}
    for number, part in enumerate(parts):
        if part:
            moments = Moments()
            moments.add(part)
            total, low = moments.total
            found = FeatureStatistics(count=len(part), total=total, total_low=low, squares=moments.squares)
            sites[f"site-{number}"] = {"x": found}
    [summary] = summarise(sites, StatisticsSection(), 1)
    mean, variance = exact(values)
    assert summary.count == len(values)
    assert summary.mean == pytest.approx(mean, rel=1e-12, abs=1e-300)
    assert summary.variance == pytest.approx(variance, rel=1e-12, abs=1e-18)


def test_a_small_spread_far_from_zero_is_not_lost() -> None:
    """Where the square of the mean is 10^16 times the variance, sums of squares would have no digit left."""
    rng = np.random.default_rng(0)
    values = 1e8 + rng.normal(size=3000)
    by_site = {}
    for number, part in enumerate(np.split(values, [500, 1700])):
        moments = Moments()
        moments.add(part.tolist())
        total, low = moments.total
        by_site[str(number)] = {
            "x": FeatureStatistics(count=len(part), total=total, total_low=low, squares=moments.squares)
        }
    [summary] = summarise(by_site, StatisticsSection(), 3)
    mean, variance = exact(values.tolist())
    assert summary.mean == mean
    assert summary.variance == pytest.approx(variance, rel=1e-12)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=40), st.integers(1, 12))
def test_no_cell_is_small_and_none_is_lost(bins: list[int], least: int) -> None:
    if sum(bins) < least:
        return
    stops, counts = pooled(bins, least)
    assert min(counts) >= least
    assert sum(counts) == sum(bins)
    assert list(stops) == sorted(set(stops))
    assert stops[-1] == len(bins)
    assert [sum(bins[a:b]) for a, b in zip((0, *stops), stops, strict=False)] == list(counts)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=40), st.integers(2, 12))
def test_nothing_small_follows_from_what_is_told(bins: list[int], least: int) -> None:
    """All that is told are sums over disjoint groups, so any two of them differ by nobody or by a whole cell."""
    if sum(bins) < least:
        return
    _, counts = pooled(bins, least)
    totals = [0, *itertools.accumulate(counts)]
    assert all(b - a == 0 or b - a >= least for a, b in itertools.combinations(totals, 2))


@given(st.integers(0, 2**32 - 1))
def test_bounds_hold_for_every_bin_and_quantile(seed: int) -> None:
    rng = np.random.default_rng(seed)
    parts = [rng.normal(rng.normal(), 2, size=rng.integers(20, 200)) for _ in range(4)]
    by_site = {f"site-{number}": {"x": sent(part)} for number, part in enumerate(parts)}
    for features in by_site.values():
        check_statistics(features, SECTION, 5)
    [summary] = summarise(by_site, SECTION, 4)
    whole = np.concatenate(parts)
    bins = np.bincount(np.searchsorted(EDGES, whole, side="right"), minlength=len(EDGES) + 1)
    assert all(low <= count <= high for low, count, high in zip(summary.least, bins, summary.most, strict=True))
    for quantile in summary.quantiles:
        true = np.quantile(whole, quantile.q, method="inverted_cdf")
        assert quantile.lower is None or quantile.lower <= true
        assert quantile.upper is None or true <= quantile.upper
        if quantile.value is not None:
            assert quantile.lower is None or quantile.lower <= quantile.value
            assert quantile.upper is None or quantile.value <= quantile.upper


def test_a_quantile_is_known_to_a_cell() -> None:
    """Ten thousand values: the interval is a bin, and the estimate within it."""
    values = np.random.default_rng(1).normal(size=10_000)
    [summary] = summarise({"a": {"x": sent(values[:4000])}, "b": {"x": sent(values[4000:])}}, SECTION, 2)
    middle = summary.quantiles[2]
    assert middle.lower is not None
    assert middle.upper is not None
    assert middle.value is not None
    assert middle.upper - middle.lower == pytest.approx(0.25)
    assert abs(middle.value - float(np.quantile(values, 0.5))) < 0.05
    assert summary.quantiles[-1].upper is None  # beyond the last edge


def test_nobody_is_told_of_fewer_sites_than_the_run_combines() -> None:
    by_site = {"a": {"x": sent(np.ones(20))}, "b": {"x": sent(np.ones(20)), "y": sent(np.ones(20))}, "c": {}}
    x, y = summarise(by_site, StatisticsSection(), 2)
    assert (x.count, x.num_sites, x.num_withheld) == (40, 2, 1)
    assert (y.count, y.mean, y.num_sites, y.num_withheld) == (0, None, 1, 2)


GOOD = sent(np.random.default_rng(2).normal(size=100))


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (replace(GOOD, total=float("nan")), "sum and squares is not as wanted, finite"),
        (replace(GOOD, total_low=float("inf")), "sum and squares"),
        (replace(GOOD, squares=-1.0), "sum and squares"),
        (replace(GOOD, count=4), "count is not as wanted, 5 to"),
        (replace(GOOD, count=101), "sum of the cells is not as wanted, count"),
        (replace(GOOD, stops=()), "cells is not as wanted, a partition of 26 bins"),
        (replace(GOOD, stops=GOOD.stops[::-1]), "a partition of 26 bins"),
        (replace(GOOD, stops=(*GOOD.stops[:-1], 27)), "a partition of 26 bins"),
        (replace(GOOD, counts=(GOOD.counts[0] + GOOD.counts[1] - 4, 4, *GOOD.counts[2:])), "at least 5"),
    ],
)
def test_what_a_site_must_not_send(bad: FeatureStatistics, words: str) -> None:
    check_statistics({"x": GOOD}, SECTION, 5)
    with pytest.raises(BadUpdate, match=words) as refused:
        check_statistics({"x": bad}, SECTION, 5)
    assert refused.value.field == "x"


def test_the_larger_minimum_counts_and_only_what_was_asked_for_is_taken() -> None:
    section = SECTION.model_copy(update={"min_cell_count": 101})
    with pytest.raises(BadUpdate, match="101 to"):
        check_statistics({"x": GOOD}, section, 5)
    only = StatisticsSection(features=("y",))
    with pytest.raises(BadUpdate, match="asked for by the job is not as wanted, y"):
        check_statistics({"x": replace(GOOD, stops=(), counts=())}, only)
    with pytest.raises(TooLarge, match="257 features"):
        check_statistics({f"f{number}": GOOD for number in range(257)}, SECTION)
    with pytest.raises(BadUpdate, match="printable"):
        check_statistics({"a\nb": replace(GOOD, stops=(), counts=())}, StatisticsSection())
