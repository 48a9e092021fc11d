"""Statistics over sites: what a site sends of a feature, and what all of them together say. Loads no torch.

A site sends count, sum and sum of squared differences of each feature, and how many values lie in each cell. Its cells
are bins of the job's public grid, neighbours taken together until every cell holds its minimum (`pooled`). So all that
leaves is about groups of that size which have no example in common: what anybody computes from sums and differences
of these numbers is about such groups again, and no small one can be found by taking the rest from a total.

Moments merge as in Chan, Golub, LeVeque 1979 (Updating formulae and a pairwise algorithm for computing sample
variances, Stanford STAN-CS-79-773, eq. 2.1), in rational numbers: the result is rounded once, in no order of sites.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field

from atoll.wire.errors import BadUpdate, TooLarge
from atoll.wire.statistics_section import MAX_FEATURES, StatisticsSection

MAX_NAME = 64  # characters
MAX_COUNT = 2**53
_NEARLY = 1e-9  # of a rank: 0.7 * 10 is the seventh, whatever its last digit

_Finite = Annotated[float, Field(allow_inf_nan=False)]
_Counts = tuple[Annotated[int, Field(ge=1, lt=MAX_COUNT)], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureStatistics:
    """One feature at one site. The sum of its values is `total` + `total_low`.

    Cell i holds the values in bins `stops[i - 1]` to `stops[i]` (from 0) of the grid: those below its first edge, those
    of each bin, those beyond the last edge.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)
    count: Annotated[int, Field(ge=1, lt=MAX_COUNT)]
    total: _Finite
    total_low: _Finite
    squares: Annotated[_Finite, Field(ge=0)]  # of differences to the mean
    stops: _Counts = ()
    counts: _Counts = ()

    @property
    def cells(self) -> list[tuple[int, int, int]]:
        """First bin, the one behind the last, and count of each cell."""
        return [(a, b, n) for a, b, n in zip((0, *self.stops), self.stops, self.counts, strict=False)]


class Moments:
    """Count, sum and squares of values that come in parts, in any order and grouping; exact but for each part's own."""

    def __init__(self) -> None:
        self.count = 0
        self._total = Fraction(0)
        self._between = Fraction(0)  # sum over parts of total^2 / count
        self._within = Fraction(0)  # sum over parts of squares

    def add(self, values: Sequence[float]) -> None:
        """Takes in finite values. Two passes (ibid., eq. 1.7), sums correctly rounded."""
        if not values:
            return
        total = math.fsum(values)
        low = math.fsum(itertools.chain(values, [-total]))
        mean = total / len(values)
        differences = [value - mean for value in values]
        squares = math.fsum(d * d for d in differences) - math.fsum(differences) ** 2 / len(values)
        self.merge(len(values), Fraction(total) + Fraction(low), max(0.0, squares))

    def merge(self, count: int, total: Fraction, squares: float) -> None:
        """Takes in a part by its count, sum and squared differences to its own mean."""
        self.count += count
        self._total += total
        self._between += total * total / count
        self._within += Fraction(squares)

    @property
    def mean(self) -> float:
        return float(self._total / self.count)

    @property
    def total(self) -> tuple[float, float]:
        """The sum, and what is left where that is rounded."""
        rounded = float(self._total)
        return rounded, float(self._total - Fraction(rounded))

    @property
    def squares(self) -> float:
        """Of differences to the mean."""
        return float(self._within + self._between - self._total * self._total / self.count)

    @property
    def variance(self) -> float | None:
        """With n - 1; None of one value."""
        return self.squares / (self.count - 1) if self.count > 1 else None


def pooled(counts: Sequence[int], least: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Stops and counts of cells of at least `least`, from the counts of a grid's bins, together at least `least`.

    From the left, bins are taken together until they are enough; what is left over joins the last cell.
    """
    stops: list[int] = []
    cells: list[int] = []
    held = 0
    for stop, count in enumerate(counts, start=1):
        held += count
        if held >= max(1, least):
            stops.append(stop)
            cells.append(held)
            held = 0
    cells[-1] += held
    stops[-1] = len(counts)
    return tuple(stops), tuple(cells)


def check_statistics(found: Mapping[str, FeatureStatistics], section: StatisticsSection, least: int = 1) -> None:
    """Returns where a site's answer is one that the job asks for, and every cell holds `least` or more.

    Raises:
        BadUpdate, TooLarge: names feature, value and bound.
    """
    least = max(least, section.min_cell_count)
    if len(found) > MAX_FEATURES:
        text = f"statistics of {len(found)} features; name those that are wanted in statistics.features"
        raise TooLarge(text, field="features", value=len(found), bound=MAX_FEATURES)
    for name, feature in found.items():
        _require(
            1 <= len(name) <= MAX_NAME and name.isprintable(), ascii(name[:80]), "name", f"1 to {MAX_NAME} printable"
        )
        asked = section.features is None or name in section.features
        _require(asked, name, "asked for by the job", ", ".join(section.features or ()))
        finite = math.isfinite(feature.total) and math.isfinite(feature.total_low) and math.isfinite(feature.squares)
        _require(finite and feature.squares >= 0, name, "sum and squares", "finite, squares >= 0")
        _require(least <= feature.count < MAX_COUNT, name, "count", f"{least} to {MAX_COUNT - 1}")
        histogram = section.histograms.get(name)
        bins = len(histogram.all_edges) + 1 if histogram is not None else 0
        stops = (0, *feature.stops)
        rising = all(a < b for a, b in itertools.pairwise(stops)) and stops[-1] == bins
        _require(rising and len(feature.stops) == len(feature.counts), name, "cells", f"a partition of {bins} bins")
        _require(all(count >= least for count in feature.counts), name, "count of a cell", f"at least {least}")
        _require(not bins or sum(feature.counts) == feature.count, name, "sum of the cells", "count")


def _require(holds: bool, name: str, what: str, bound: str) -> None:
    if not holds:
        text = f"statistics of feature {name!r}: {what} is not as wanted, {bound}; install the server's version of Atoll there"
        raise BadUpdate(text, field=name, value=what, bound=bound)


# --- over sites -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantile:
    """The value number ceil(q * count) from the smallest lies from `lower` to `upper`; None: beyond the edges."""

    q: float
    value: float | None  # an estimate: values spread evenly over the bins of their cell
    lower: float | None
    upper: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureSummary:
    """One feature over sites. `count` is 0, and nothing else is told, where fewer sites sent it than have to."""

    name: str
    num_sites: int
    num_withheld: int
    count: int = 0
    mean: float | None = None
    variance: float | None = None
    edges: tuple[float, ...] = ()
    least: tuple[int, ...] = ()  # values in each bin of the grid, at least
    most: tuple[int, ...] = ()  # and at most
    quantiles: tuple[Quantile, ...] = ()


def summarise(
    by_site: Mapping[str, Mapping[str, FeatureStatistics]], section: StatisticsSection, fewest: int
) -> list[FeatureSummary]:
    """Every feature over the sites that sent it, by name.

    Args:
        fewest: sites that a number which people see combines at least.
    """
    names = {name for features in by_site.values() for name in features} | set(section.features or ())
    return [_summary(name, by_site, section, fewest) for name in sorted(names)]


def _summary(
    name: str, by_site: Mapping[str, Mapping[str, FeatureStatistics]], section: StatisticsSection, fewest: int
) -> FeatureSummary:
    sent = [features[name] for _, features in sorted(by_site.items()) if name in features]
    withheld = len(by_site) - len(sent)
    if len(sent) < max(1, fewest):
        return FeatureSummary(name=name, num_sites=len(sent), num_withheld=withheld)
    moments = Moments()
    for feature in sent:
        moments.merge(feature.count, Fraction(feature.total) + Fraction(feature.total_low), feature.squares)
    histogram = section.histograms.get(name)
    edges = histogram.all_edges if histogram is not None else ()
    cells = [cell for feature in sent for cell in feature.cells]
    least, most = _bounds(cells, len(edges) + 1) if edges else ((), ())
    return FeatureSummary(
        name=name,
        num_sites=len(sent),
        num_withheld=withheld,
        count=moments.count,
        mean=moments.mean,
        variance=moments.variance,
        edges=edges,
        least=least,
        most=most,
        quantiles=tuple(_quantile(q, cells, edges) for q in section.quantiles) if edges else (),
    )


def _bounds(cells: Sequence[tuple[int, int, int]], num_bins: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    least, most = [0] * num_bins, [0] * num_bins
    for start, stop, count in cells:
        if stop - start == 1:
            least[start] += count
        for bin_ in range(start, stop):
            most[bin_] += count
    return tuple(least), tuple(most)


def _quantile(q: float, cells: Sequence[tuple[int, int, int]], edges: tuple[float, ...]) -> Quantile:
    """Of n values, the one of rank r = ceil(q n) lies in a bin before which at most r - 1 are, and up to which r are."""
    num_bins = len(edges) + 1
    begun, ended, spread = (
        [0.0] * (num_bins + 1) for _ in range(3)
    )  # values before each bin: at most, at least, about
    for start, stop, count in cells:
        begun[start + 1] += count
        ended[stop] += count
        for bin_ in range(start, stop):
            spread[bin_ + 1] += count / (stop - start)
    at_most, at_least, about = (list(itertools.accumulate(counts)) for counts in (begun, ended, spread))
    rank = max(1, math.ceil(q * at_least[-1] - _NEARLY))
    ends = (None, *edges, None)  # of the bins
    lower = ends[bisect_left(at_most, rank) - 1]
    upper = ends[bisect_left(at_least, rank)]
    # The last digits of fractions do not count: the whole is n.
    bin_ = min(bisect_left(about, rank - _NEARLY), num_bins) - 1
    left, right = ends[bin_], ends[bin_ + 1]
    if left is None or right is None:
        value = right if left is None else left
    else:
        value = left + (right - left) * min(1.0, (rank - about[bin_]) / (about[bin_ + 1] - about[bin_]))
    if value is not None:
        value = min(max(value, value if lower is None else lower), value if upper is None else upper)
    return Quantile(q=q, value=value, lower=lower, upper=upper)
