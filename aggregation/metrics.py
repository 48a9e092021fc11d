"""Metric sums of sites, added so that the order of arrival changes no bit."""

from __future__ import annotations

import math
from collections.abc import Mapping

MetricSums = Mapping[str, tuple[float, float]]
"""Sum and count by metric name; the metric is sum / count."""


def combine_metrics(by_site: Mapping[str, MetricSums]) -> dict[str, tuple[float, float]]:
    """Sums and counts over sites, by name in sorted order; a site that lacks a metric does not count in it.

    Sums are correctly rounded (`math.fsum`), whatever the number of sites.
    """
    names = sorted({name for sums in by_site.values() for name in sums})
    return {name: _total([sums[name] for _, sums in sorted(by_site.items()) if name in sums]) for name in names}


def _total(pairs: list[tuple[float, float]]) -> tuple[float, float]:
    return _sum([pair[0] for pair in pairs]), _sum([pair[1] for pair in pairs])


def _sum(values: list[float]) -> float:
    try:
        return math.fsum(values)
    except OverflowError:  # finite values whose sum is not, or nearly: infinity is then what there is to show
        return math.fsum(value * 2.0**-64 for value in values) * 2.0**64
