"""What a site's machine and line are like: speed, bandwidth, latency, and the hours in which it is there.

They come from distributions, or from a trace: a file with a row for each site, CSV with a line of names or a JSON list of
tables. Columns, all but the first of which may be left out or empty:

    site            its name; without it rows are dealt to the sites in turn
    step_s          seconds of an optimizer step
    up_mbit_s       megabits (10^6) a second from the site, and to it: down_mbit_s
    latency_s       seconds that a message takes each way
    available       hours of the day in which it is there, such as "0-6 22-24"
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from atoll.simulations.clock import Speeds, require, require_known
from atoll.wire.errors import ConfigError

DAY_S = 86400.0
BYTES_A_MEGABIT = 125_000.0
_COLUMNS = ("site", "step_s", "up_mbit_s", "down_mbit_s", "latency_s", "available")
_HOURS = re.compile(r"(\d+(?:\.\d+)?)-(\d+(?:\.\d+)?)")
Windows = tuple[tuple[float, float], ...]  # seconds of a day, in order, apart from each other


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """The lines of the sites. 0: bytes take no time. `spread` is the deviation of the logarithm, as in `Speeds`."""

    up_mbit_s: float = 0.0
    down_mbit_s: float = 0.0
    latency_s: float = 0.0
    spread: float = 0.0  # of both bandwidths: a site with a slow line has it both ways
    seed: int = 0

    def __post_init__(self) -> None:
        for name, high in (("up_mbit_s", 1e6), ("down_mbit_s", 1e6), ("latency_s", 3600.0), ("spread", 5.0)):
            require(f"network.{name}", getattr(self, name), 0.0, high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Availability:
    """Each site is there for `hours` of every day, from an hour on that lies around `peak` by so many hours of deviation."""

    hours: float = 24.0
    peak: float = 22.0  # the hour at which a site becomes available, on average
    deviation: float = 2.0
    seed: int = 0

    def __post_init__(self) -> None:
        require("availability.hours", self.hours, 0.1, 24.0)
        require("availability.peak", self.peak, 0.0, 24.0)
        require("availability.deviation", self.deviation, 0.0, 24.0)

    def windows(self, num_sites: int) -> list[Windows]:
        """The hours of each site, in seconds of a day."""
        if self.hours == 24.0:
            return [((0.0, DAY_S),)] * num_sites
        begins = self.peak + self.deviation * np.random.default_rng(self.seed).standard_normal(num_sites)
        return [_around_midnight(float(begin) % 24.0 * 3600.0, self.hours * 3600.0) for begin in begins]


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One site's machine and line. A bandwidth of 0: bytes take no time."""

    step_s: float = 0.0
    up_mbit_s: float = 0.0
    down_mbit_s: float = 0.0
    latency_s: float = 0.0
    windows: Windows = ((0.0, DAY_S),)

    @property
    def timed(self) -> bool:
        """Whether anything at it takes time."""
        return any((self.step_s, self.up_mbit_s, self.down_mbit_s, self.latency_s)) or self.windows != ((0.0, DAY_S),)

    def transfer_s(self, down_bytes: int, up_bytes: int) -> float:
        """Seconds that a task spends on the line, both ways."""
        down_s = down_bytes / (self.down_mbit_s * BYTES_A_MEGABIT) if self.down_mbit_s else 0.0
        up_s = up_bytes / (self.up_mbit_s * BYTES_A_MEGABIT) if self.up_mbit_s else 0.0
        return down_s + up_s + 2 * self.latency_s

    def elapsed_s(self, now_s: float, busy_s: float) -> float:
        """Seconds until so many have passed in which the site is there; it stops and goes on with its hours."""
        open_s = sum(stop - start for start, stop in self.windows)
        days, left_s = divmod(busy_s, open_s)
        if days and not left_s:  # the last window's end, and not the next one's beginning
            days, left_s = days - 1, open_s
        day_s, at_s = now_s // DAY_S * DAY_S, now_s % DAY_S
        for number in range(3):
            for start, stop in self.windows:
                begin = max(start, at_s) if number == 0 else start
                if begin > stop or (begin == stop and left_s):
                    continue
                if left_s <= stop - begin:
                    return day_s + number * DAY_S + begin + left_s + days * DAY_S - now_s
                left_s -= stop - begin
        raise AssertionError("a device is there for some of each day")


def devices(
    sites: Sequence[str],
    *,
    speeds: Speeds,
    network: Network,
    availability: Availability,
    trace: Path | Sequence[Mapping[str, Any]] | None = None,
) -> dict[str, Device]:
    """The device of each site; what a trace says of it goes before the distributions.

    Raises:
        ConfigError: the trace cannot be read, names a site that is not there, or has a bad value.
    """
    step_s, windows = speeds.step_seconds(sites), availability.windows(len(sites))
    factors = np.exp(network.spread * np.random.default_rng(network.seed).standard_normal(len(sites)))
    rows = _rows_by_site(trace, sites) if trace is not None else {}
    return {
        site: Device(
            **{
                "step_s": step_s[site],
                "up_mbit_s": network.up_mbit_s * float(factor),
                "down_mbit_s": network.down_mbit_s * float(factor),
                "latency_s": network.latency_s,
                "windows": hours,
                **rows.get(site, {}),
            }
        )
        for site, factor, hours in zip(sites, factors, windows, strict=True)
    }


def _around_midnight(begin_s: float, length_s: float) -> Windows:
    end_s = begin_s + length_s
    return ((begin_s, end_s),) if end_s <= DAY_S else ((0.0, end_s - DAY_S), (begin_s, DAY_S))


def _rows_by_site(trace: Path | Sequence[Mapping[str, Any]], sites: Sequence[str]) -> dict[str, dict[str, Any]]:
    name = str(trace) if isinstance(trace, Path) else "trace"
    rows = _read(trace) if isinstance(trace, Path) else list(trace)
    checked = [_checked(row, f"{name}, row {number}") for number, row in enumerate(rows, 1)]
    if not checked:
        raise ConfigError(f"{name}: has no rows; wanted one for each site", key="trace")
    named = [row.pop("site") for row in checked if "site" in row]
    if not named:
        return {site: checked[place % len(checked)] for place, site in enumerate(sites)}
    if len(named) < len(checked) or len(set(named)) < len(named):
        raise ConfigError(f"{name}: wanted a name in every row or in none, and none twice", key="trace.site")
    require_known(f"{name}: column site", named, sites)
    return dict(zip(named, checked, strict=True))


def _read(path: Path) -> list[Mapping[str, Any]]:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}", key="trace", value=str(path)) from None
    if path.suffix != ".json":
        return list(csv.DictReader(text.splitlines()))
    try:
        rows = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{path}: is not JSON: {error}", key="trace", value=str(path)) from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f"{path}: wanted a list of tables", key="trace", value=str(path))
    return rows


def _checked(row: Mapping[str, Any], place: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for column, value in row.items():
        if column not in _COLUMNS:
            known = ", ".join(_COLUMNS)
            raise ConfigError(f"{place}: unknown column {column!r}; known: {known}", key=f"trace.{column}", bound=known)
        if value is None or value == "":
            continue
        if column == "available":
            found["windows"] = _windows(str(value), place)
        else:
            found[column] = str(value) if column == "site" else _number(value, column, place)
    return found


def _number(value: Any, column: str, place: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = -1.0
    require(f"{place}: {column}", number, 0.0, 1e6)
    return number


def _windows(text: str, place: str) -> Windows:
    found = [_HOURS.fullmatch(part) for part in text.split()]
    hours = sorted((float(match[1]), float(match[2])) for match in found if match is not None)
    ends = [0.0, *(end for _, end in hours)]
    if len(hours) < len(found) or not hours or any(not end <= start < stop <= 24 for end, (start, stop) in zip(ends, hours, strict=False)):  # fmt: skip
        text = f'{place}: available = "{text}": wanted hours such as "0-6 22-24", in order and apart'
        raise ConfigError(text, key="trace.available")
    return tuple((start * 3600.0, stop * 3600.0) for start, stop in hours)
