"""Metric sums of sites, put together so that the order of arrival changes no bit.

A metric is a sum and a count. Over sites both are added, so that it is the mean over all examples. `evaluation.metrics`
of a job adds others, made of the same pairs: the worst site's accuracy, for example, or what a plugin computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from atoll.aggregation import parts, plugins
from atoll.wire.errors import ConfigError
from atoll.wire.job import Job

MetricSums = Mapping[str, tuple[float, float]]
"""Sum and count by metric name; the metric is sum / count."""

Pairs = Mapping[str, tuple[float, float]]
"""Sum and count of one metric by site; at least one site, and each count above 0."""


def combine_metrics(by_site: Mapping[str, MetricSums]) -> dict[str, tuple[float, float]]:
    """Sums and counts over sites, by name in sorted order; a site that lacks a metric does not count in it.

    Sums are correctly rounded (`math.fsum`), whatever the number of sites.
    """
    names = sorted({name for sums in by_site.values() for name in sums})
    return {name: _total([sums[name] for _, sums in sorted(by_site.items()) if name in sums]) for name in names}


class MetricRules:
    """What a job makes of its sites' metrics.

    Raises:
        ConfigError: `evaluation.metrics` names an aggregation that is neither built in nor installed here.
    """

    def __init__(self, job: Job) -> None:
        self._rules = {
            name: (section.of, aggregation(section.by, f"evaluation.metrics.{name}.by"))
            for name, section in sorted((job.evaluation.metrics or {}).items())
        }

    def combine(self, by_site: Mapping[str, MetricSums]) -> dict[str, tuple[float, float]]:
        """As `combine_metrics`, with the job's own metrics as pairs (value, 1); one that has no value is left out.

        A plugin that raises, or gives no number, has no value.
        """
        combined = combine_metrics(by_site)
        for name, (of, aggregate) in self._rules.items():
            pairs = {site: sums[of] for site, sums in sorted(by_site.items()) if of in sums and sums[of][1] > 0}
            value = _value(aggregate, pairs) if pairs else None
            combined.pop(name, None)
            if value is not None:
                combined[name] = (value, 1.0)
        return dict(sorted(combined.items()))


def value_of(sums: MetricSums, name: str) -> float | None:
    """The metric; None where it is absent, nothing was counted, or it is not finite."""
    total, count = sums.get(name, (0.0, 0.0))
    value = total / count if count > 0 else math.nan
    return value if math.isfinite(value) else None


def aggregation(by: str, key: str) -> Callable[[Pairs], Any]:
    """The function of that name.

    Raises:
        ConfigError: nothing brings it; or the plugin cannot be imported, or is no function.
    """
    if by in BUILT_IN:
        return BUILT_IN[by]
    plugin = plugins.find("metric", by, key)
    if plugin is None:
        raise parts.unknown_kind(key, by, [*BUILT_IN, *(point.name for point in plugins.installed("metric"))])
    if not callable(plugin.value):
        raise ConfigError(f"{key} = {by!r}: {plugin.source} gives no function", key=key, value=by, bound="a function")
    function: Callable[[Pairs], Any] = plugin.value
    return function


def require_sums(job: Job) -> None:
    """Returns where all metrics of a job can be made of sums over sites, which is what a region reports.

    Raises:
        ConfigError: names the metric and why.
    """
    for name, section in (job.evaluation.metrics or {}).items():
        if section.by not in _OF_SUMS:
            key = f"evaluation.metrics.{name}.by"
            raise ConfigError(
                f"{key} = {section.by!r}: a region reports sums over its sites, of which this cannot be made; take "
                f"{' or '.join(sorted(_OF_SUMS))}, or name sites of this federation alone in job.sites",
                key=key,
                value=section.by,
                bound=", ".join(sorted(_OF_SUMS)),
            )


def _mean(pairs: Pairs) -> float:
    total, count = _total(list(pairs.values()))
    return total / count


def _means(pairs: Pairs) -> list[float]:
    return [total / count for total, count in pairs.values()]


BUILT_IN: Final[Mapping[str, Callable[[Pairs], float]]] = {
    "mean": _mean,  # over all examples
    "sum": lambda pairs: _sum([total for total, _ in pairs.values()]),
    "min": lambda pairs: min(_means(pairs)),
    "max": lambda pairs: max(_means(pairs)),
    "site_mean": lambda pairs: _sum(_means(pairs)) / len(pairs),  # each site counts the same
}
_OF_SUMS: Final = frozenset({"mean", "sum"})


def _value(aggregate: Callable[[Pairs], Any], pairs: Pairs) -> float | None:
    try:
        value = float(aggregate(pairs))
    except Exception:  # noqa: BLE001  a plugin may raise anything, and no metric is worth a run
        return None
    return value if math.isfinite(value) else None


def _total(pairs: list[tuple[float, float]]) -> tuple[float, float]:
    return _sum([pair[0] for pair in pairs]), _sum([pair[1] for pair in pairs])


def _sum(values: list[float]) -> float:
    try:
        return math.fsum(values)
    except OverflowError:  # finite values whose sum is not, or nearly: infinity is then what there is to show
        return math.fsum(value * 2.0**-64 for value in values) * 2.0**64
