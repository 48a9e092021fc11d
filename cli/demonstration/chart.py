"""Accuracy over rounds, drawn with characters and as a PNG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

EIGHTHS = " ▁▂▃▄▅▆▇█"
HEIGHT = 8  # lines
COLUMN = 2  # characters a round
WIDTH = 60  # characters; more rounds are thinned out


def draw(values: Sequence[float], reference: float, *, height: int = HEIGHT, width: int = WIDTH) -> list[str]:
    """Lines of a bar chart, one column a round, with `reference` marked at the right edge.

    Args:
        values: one a round, 0 to 1.
        reference: the value of the central training, 0 to 1.
    """
    shown = _thin(values, width // COLUMN)
    low = math.floor(min([*shown, reference]) * 10 - 1e-9) / 10
    low = max(min(low, 0.9), 0.0)
    step = (1.0 - low) / height
    marked = min(int((reference - low) / step), height - 1)
    lines = []
    for row in reversed(range(height)):
        bottom = low + row * step
        bars = "".join(_cell(value, bottom, step) * (COLUMN - 1) + " " for value in shown)
        mark = f"┄ central {reference:.3f}" if row == marked else ""
        lines.append(f"{bottom + step:5.2f} ┤{bars}{mark}".rstrip())
    lines.append(f"{low:5.2f} └{'─' * (COLUMN * len(shown))} rounds")
    return lines


def write_png(path: Path, values: Mapping[int, float], reference: float, *, title: str) -> bool:
    """Writes accuracy by round as a PNG; False where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(list(values), list(values.values()), marker="o", markersize=3, label="federated")
    axes.axhline(reference, color="grey", linestyle="--", linewidth=1, label="same model, all data in one place")
    axes.set(xlabel="round", ylabel="test accuracy", title=title)
    axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return True


def _thin(values: Sequence[float], most: int) -> list[float]:
    """At most so many of the values, evenly spread, the last one among them."""
    stride = max(math.ceil(len(values) / most), 1)
    return list(values[::-1][::stride][::-1])


def _cell(value: float, bottom: float, step: float) -> str:
    filled = round((value - bottom) / step * (len(EIGHTHS) - 1))
    return EIGHTHS[max(0, min(filled, len(EIGHTHS) - 1))]
