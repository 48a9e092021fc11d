"""How the answers of a run that trains nothing look to a person: metrics by site, statistics by feature, histograms."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from atoll.cli.snapshots import metric_values

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from atoll.wire import runs_pb2

BAR_WIDTH = 24
BINS_SHOWN = 24  # of a histogram on screen; --json has all


def answers(record: runs_pb2.RoundRecord) -> Iterator[RenderableType]:
    """Tables of one round; none of a round of training."""
    from rich.text import Text

    if record.features:
        yield features_table(record.features)
        for answer in record.by_site:
            yield Text(answer.site, style="bold")
            yield features_table(answer.features)
        for summary in record.features:
            if summary.least:
                yield histogram_table(summary)
    elif record.by_site:
        yield metrics_table(record)


def features_table(features: Iterable[runs_pb2.FeatureSummary]) -> Table:
    """Count, mean, standard deviation and quantiles of each feature, a row each."""
    found = list(features)
    quantiles = list(dict.fromkeys(quantile.q for summary in found for quantile in summary.quantiles))
    table = _table("feature", "count", "sites", "mean", "deviation", *(f"q {q:g}" for q in quantiles))
    for summary in found:
        values = {quantile.q: _quantile(quantile) for quantile in summary.quantiles}
        deviation = f"{summary.variance**0.5:.6g}" if summary.HasField("variance") else "-"
        cells = [f"{summary.count:,}", _sites(summary), f"{summary.mean:.6g}", deviation]
        withheld = ["withheld", _sites(summary), "-", "-"]
        row = cells if summary.count else withheld
        table.add_row(summary.name, *row, *(values.get(q, "-") for q in quantiles))
    return table


def histogram_table(summary: runs_pb2.FeatureSummary) -> Table:
    """Bins with how many examples lie in each, as bounds where sites counted neighbours together, and a bar."""
    table = _table(summary.name, "examples", "")
    table.columns[2].justify = "left"
    ends = ["below", *(f"{edge:.6g}" for edge in summary.edges)]
    bins = list(zip(ends, summary.least, summary.most, strict=True))
    most = max(summary.most)
    for end, low, high in [found for found in bins if found[2]][:BINS_SHOWN]:
        count = f"{low:,}" if low == high else f"{low:,} to {high:,}"
        table.add_row(end, count, "#" * round(BAR_WIDTH * low / most) + "." * round(BAR_WIDTH * (high - low) / most))
    if sum(1 for found in bins if found[2]) > BINS_SHOWN:
        table.caption = "and more bins; --json has all"
    return table


def metrics_table(record: runs_pb2.RoundRecord) -> Table:
    """Each site's metrics, and those of all together."""
    rows = [(answer.site, metric_values(answer.metrics)) for answer in record.by_site]
    rows.append(("all", metric_values(record.evaluate_metrics)))
    names = list(dict.fromkeys(name for _, values in rows for name in values))
    table = _table("site", *names)
    for site, values in rows:
        found = [values.get(name) for name in names]
        table.add_row(site, *("-" if value is None else f"{value:.4f}" for value in found))
    return table


def _table(*titles: str) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for place, title in enumerate(titles):
        table.add_column(title, justify="right" if place else "left", no_wrap=not place)
    return table


def _sites(summary: runs_pb2.FeatureSummary) -> str:
    return f"{summary.num_sites}/{summary.num_sites + summary.num_withheld}"


def _quantile(quantile: runs_pb2.QuantileSummary) -> str:
    """The estimate with what it is certainly between."""
    if not quantile.HasField("value"):
        return "-"
    low = f"{quantile.lower:.4g}" if quantile.HasField("lower") else ".."
    high = f"{quantile.upper:.4g}" if quantile.HasField("upper") else ".."
    return f"{quantile.value:.4g} ({low} to {high})"
