"""Pictures by matplotlib, which is loaded here and nowhere else: without a window, and without pyplot's global state."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.wire.errors import ConfigError, LocalError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 150  # of a PNG


def new_figure(*, width: float, height: float) -> Figure:
    """An empty figure of so many inches. Raises ConfigError where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("matplotlib is not installed: pip install 'atoll[simulations]'") from None
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Figure, path: Path) -> None:
    """Writes a figure as a PNG, into a folder that is made where it is missing. Raises LocalError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=DPI)
    except OSError as error:
        raise LocalError(f"{path}: cannot be written: {error.strerror}") from None


def svg_of(figure: Figure) -> str:
    """A figure as an `<svg>` element that stands in an HTML page; equal figures give equal text."""
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "atoll", "svg.fonttype": "none"}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue().partition("<svg")[1] + text.getvalue().partition("<svg")[2]
