"""What a command prints: data on stdout, words for people on stderr, so that `atoll ... --json | jq` always works."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any


def print_json(value: Any) -> None:
    """Prints `value` as one line of JSON on stdout. Raises ValueError on NaN or infinity, which JSON does not have."""
    print(json.dumps(value, allow_nan=False, separators=(", ", ": ")), flush=True)


def note(text: str) -> None:
    """Prints a line for a person on stderr."""
    print(printable(text), file=sys.stderr, flush=True)


def printable(text: str) -> str:
    """A text without what a terminal would obey: part of it may come from another organisation."""
    return "".join(sign if sign.isprintable() or sign in "\n\t" else "\N{REPLACEMENT CHARACTER}" for sign in text)


def one_line(text: str) -> str:
    """The same on one line."""
    return printable(" ".join(text.split()))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, empty: str) -> None:
    """Prints rows in aligned columns on stdout; the text `empty` on stderr where there are none."""
    cells = [tuple(row) for row in rows]
    if not cells:
        note(empty)
        return
    widths = [max(len(cell) for cell in column) for column in zip(columns, *cells, strict=True)]
    for row in (tuple(columns), *cells):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def age(seconds: float) -> str:
    """A time span in one unit: "3 s", "12 min", "5 h", "2 d"."""
    for unit, length_s in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= length_s:
            return f"{seconds / length_s:.0f} {unit}"
    return f"{max(seconds, 0.0):.0f} s"


def size(num_bytes: float) -> str:
    """A number of bytes in binary units: "512 B", "1.5 MiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"
