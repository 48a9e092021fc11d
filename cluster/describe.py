"""Statistics of one machine's training data: what the app calls features, summed up so that no small group can be seen.

A feature is withheld as a whole where fewer examples than the minimum of a cell have it, or where fewer than that lack
it and some do: the difference to the number of examples would tell of those few.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from atoll.aggregation.statistics import FeatureStatistics, Moments, pooled
from atoll.cluster.app import App
from atoll.wire.errors import AppFailed
from atoll.wire.statistics_section import StatisticsSection

BATCH = 4096  # examples that features() sees at once


class _Feature:
    """What is known of one feature so far."""

    def __init__(self, edges: tuple[float, ...]) -> None:
        self.moments = Moments()
        self._edges = torch.tensor(edges, dtype=torch.float64)
        self._bins = torch.zeros(len(edges) + 1 if edges else 0, dtype=torch.int64)

    def add(self, values_B: Tensor) -> None:
        self.moments.add(values_B.tolist())
        if len(self._bins):
            places_B = torch.bucketize(values_B, self._edges, right=True)
            self._bins += torch.bincount(places_B, minlength=len(self._bins))

    def result(self, num_examples: int, least: int) -> FeatureStatistics | None:
        """None where it is withheld."""
        count = self.moments.count
        if count < max(1, least) or 0 < num_examples - count < least:
            return None
        stops, counts = pooled(self._bins.tolist(), least) if len(self._bins) else ((), ())
        total, low = self.moments.total
        return FeatureStatistics(
            count=count, total=total, total_low=low, squares=self.moments.squares, stops=stops, counts=counts
        )


def describe(
    app: App,
    dataset: Dataset[Any],
    section: StatisticsSection,
    *,
    least: int,
    on_batch: Callable[[], None] = lambda: None,
) -> dict[str, FeatureStatistics]:
    """The statistics that the job asks for, by feature; one that is withheld is not among them.

    Args:
        least: examples in a cell that may be told of.

    Raises:
        AppFailed: the app names no features, or not those of the job, or what it gives are no columns of numbers.
    """
    features: dict[str, _Feature] = {}
    num_examples = 0
    for batch in app.loader(dataset, batch_size=BATCH, shuffle=False, generator=torch.Generator()):
        on_batch()
        columns = _columns(app.features(batch), section)
        if num_examples and columns.keys() != features.keys():
            raise _wrong("names other features in one batch than in another", "; have it name the same ones each time")
        lengths = {len(values_B) for values_B in columns.values()}
        if len(lengths) > 1:
            raise _wrong("gives columns of unlike lengths", "; put NaN where an example lacks a value")
        num_examples += lengths.pop()
        for name, values_B in columns.items():
            if name not in features:
                histogram = section.histograms.get(name)
                features[name] = _Feature(histogram.all_edges if histogram is not None else ())
            features[name].add(values_B[~values_B.isnan()])
    results = {name: feature.result(num_examples, least) for name, feature in sorted(features.items())}
    return {name: result for name, result in results.items() if result is not None}


def _columns(found: Mapping[str, Tensor], section: StatisticsSection) -> dict[str, Tensor]:
    """The columns that the job asks for, (B,) float64 each."""
    wanted = set(section.features if section.features is not None else found) | set(section.histograms)
    if not found or not wanted <= found.keys():
        absent = ", ".join(sorted(wanted - found.keys())) or "anything"
        raise _wrong(f"does not name {absent}", f"; it names {', '.join(sorted(found)) or 'nothing'}")
    columns = {name: torch.as_tensor(found[name]).detach().cpu().double() for name in sorted(wanted)}
    for name, values_B in columns.items():
        if values_B.dim() != 1:
            raise _wrong(f"gives {name!r} with shape {list(values_B.shape)}", ", wanted one number an example")
        if values_B.isinf().any():  # how many there are is nobody's business
            raise _wrong(f"gives infinite values of {name!r}", "; leave them out as NaN")
    return columns


def _wrong(what: str, advice: str) -> AppFailed:
    return AppFailed(f"the app's features() {what}{advice}", field="features")
