"""Pictures of runs: a metric over rounds, over bytes and over simulated hours, and how far the sites lie apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from atoll.simulations.figures import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rounds = Sequence[Mapping[str, Any]]  # of one run, as `RoundResult.record` has them
MEGABYTE = 1e6


def metric_of(entry: Mapping[str, Any], metric: str) -> float | None:
    """A metric of a round: at the server where it was judged there, else at the sites."""
    value = entry["server"].get(metric, entry["evaluate"].get(metric))
    return None if value is None else float(value)


def curves(runs: Mapping[str, Sequence[Rounds]], metric: str) -> Figure:
    """A line for each name, the mean of its runs with a band from the lowest to the highest, in one panel for each x.

    The panel over hours is there where simulated time passed, the one of the sites where more than one was judged.
    Raises ConfigError where matplotlib is not installed.
    """
    every = [entry for group in runs.values() for rounds in group for entry in rounds]
    panels = [("round", _rounds), ("megabytes, both ways", _megabytes)]
    if any(entry["simulated_s"] for entry in every):
        panels.append(("simulated hours", _hours))
    spread = any(metric in entry["spread"] for entry in every)
    number = len(panels) + spread
    figure = new_figure(width=4.2 * number, height=3.6)
    axes = [figure.add_subplot(1, number, place + 1) for place in range(number)]
    for panel, (label, xs) in zip(axes, panels, strict=False):
        panel.set(xlabel=label, ylabel=metric)
        for place, (name, group) in enumerate(runs.items()):
            _band(panel, [(xs(rounds), _values(rounds, metric)) for rounds in group], name, f"C{place % 10}")
    if spread:
        _sites(axes[-1], runs, metric)
    for panel in axes:
        panel.grid(alpha=0.3)
    if len(runs) > 1:
        axes[0].legend(fontsize=7)
    return figure


def _sites(panel: Axes, runs: Mapping[str, Sequence[Rounds]], metric: str) -> None:
    """Of each name's first run: from the worst site to the best, and the middle half."""
    panel.set(xlabel="round", ylabel=f"{metric} at the sites")
    for place, group in enumerate(runs.values()):
        known = [(entry["round"], entry["spread"][metric]) for entry in group[0] if metric in entry["spread"]]
        if known:
            numbers, values = [round_ for round_, _ in known], np.array([five for _, five in known])
            panel.fill_between(numbers, values[:, 0], values[:, 4], color=f"C{place % 10}", alpha=0.12, linewidth=0)
            panel.fill_between(numbers, values[:, 1], values[:, 3], color=f"C{place % 10}", alpha=0.25, linewidth=0)
            panel.plot(numbers, values[:, 2], color=f"C{place % 10}", linewidth=1)


def _band(panel: Axes, lines: Sequence[tuple[NDArray[Any], NDArray[Any]]], name: str, colour: str) -> None:
    length = min((len(x) for x, _ in lines), default=0)
    if not length:
        return
    x = np.mean([line[:length] for line, _ in lines], axis=0)
    values = np.array([line[:length] for _, line in lines])
    known = np.isfinite(values).all(axis=0)
    panel.plot(
        x[known], values[:, known].mean(axis=0), color=colour, linewidth=1.5, label=name, marker="o", markersize=2
    )
    if len(lines) > 1:
        low, high = values[:, known].min(axis=0), values[:, known].max(axis=0)
        panel.fill_between(x[known], low, high, color=colour, alpha=0.15, linewidth=0)


def _values(rounds: Rounds, metric: str) -> NDArray[Any]:
    found = [metric_of(entry, metric) for entry in rounds]
    return np.array([np.nan if value is None else value for value in found])


def _rounds(rounds: Rounds) -> NDArray[Any]:
    return np.array([entry["round"] for entry in rounds], dtype=float)


def _megabytes(rounds: Rounds) -> NDArray[Any]:
    return np.cumsum([(entry["bytes_up"] + entry["bytes_down"]) / MEGABYTE for entry in rounds])


def _hours(rounds: Rounds) -> NDArray[Any]:
    return np.array([entry["simulated_s"] / 3600.0 for entry in rounds])


def metrics_in(rounds: Rounds) -> Iterator[str]:
    """Names of the metrics that rounds have, those of most rounds first."""
    names = [name for entry in rounds for name in {**entry["evaluate"], **entry["server"]}]
    yield from sorted(set(names), key=lambda name: (-names.count(name), name != "accuracy", name))
