"""The job's table `[statistics]`: which features, which bins, which quantiles, and how few examples a number is about."""

from __future__ import annotations

import builtins
import itertools
from typing import Annotated

from pydantic import Field, model_validator

from atoll.wire.strict import Strict

MAX_BINS = 1024  # of a histogram
MAX_FEATURES = 256  # of which a site sends statistics
MAX_ALL_BINS = 8192  # of all histograms of a job: what each site sends, and people see, stays below 200 kB


class HistogramSection(Strict):
    """`[statistics.histograms.FEATURE]`: the public edges of its bins, given, or as a range in equal parts."""

    edges: tuple[float, ...] | None = None
    range: tuple[float, float] | None = None
    bins: int = Field(default=64, ge=1, le=MAX_BINS)  # of a range

    @model_validator(mode="after")
    def _rising(self) -> HistogramSection:
        if (self.edges is None) == (self.range is None):
            raise ValueError("give edges, or range and bins")
        given = self.edges or self.range or ()
        if not 2 <= len(given) <= MAX_BINS + 1 or not all(a < b for a, b in itertools.pairwise(given)):
            raise ValueError(f"wanted 2 to {MAX_BINS + 1} rising numbers")
        return self

    @property
    def all_edges(self) -> tuple[float, ...]:
        """Bin i goes from edge i to edge i + 1, computed the same way on every machine."""
        if self.edges is not None:
            return self.edges
        low, high = self.range or (0.0, 1.0)
        return (*(low + (high - low) * i / self.bins for i in builtins.range(self.bins)), high)


class StatisticsSection(Strict):
    """`[statistics]`: what to count at the sites, in place of training (docs/tasks.md)."""

    features: tuple[Annotated[str, Field(min_length=1, max_length=64)], ...] | None = None  # all, where absent
    histograms: dict[str, HistogramSection] = Field(default={}, max_length=MAX_FEATURES)
    quantiles: tuple[Annotated[float, Field(gt=0, lt=1)], ...] = Field(default=(), max_length=100)
    min_cell_count: int = Field(default=1, ge=1, lt=2**53)  # a site's policy may ask for more, never for less
    by_site: bool = False  # people see what each site sent too

    @model_validator(mode="after")
    def _of_known_features(self) -> StatisticsSection:
        if self.quantiles and not self.histograms:
            raise ValueError("quantiles come from histograms: give the feature's edges or range under histograms")
        if (bins := sum(len(histogram.all_edges) - 1 for histogram in self.histograms.values())) > MAX_ALL_BINS:
            raise ValueError(f"histograms have {bins} bins in all, wanted at most {MAX_ALL_BINS}; ask in several runs")
        if self.features is not None and (unknown := sorted(set(self.histograms) - set(self.features))):
            raise ValueError(f"histograms names {', '.join(unknown)}, which features does not")
        return self
