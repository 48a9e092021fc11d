"""How long a round's updates took in simulated time, whose came last, and how old their versions were."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Waited:
    """Of one round's updates. Seconds are simulated, from the task to the update."""

    median_s: float = 0.0
    slowest_s: float = 0.0
    slowest: str = ""  # the site
    staleness: float = 0.0  # versions made between the one an update began with and its arrival, on average
    most_stale: int = 0


@dataclass(slots=True)
class Waits:
    """The updates of rounds that are open."""

    _given_s: dict[str, float] = field(default_factory=dict)  # by task
    _came: dict[int, list[tuple[float, str, int]]] = field(default_factory=dict)  # by round
    _judged: dict[int, dict[str, list[float]]] = field(default_factory=dict)  # by round and metric

    def given(self, task: str, now_s: float) -> None:
        self._given_s[task] = now_s

    def came(self, task: str, site: str, round_: int, now_s: float, staleness: int) -> None:
        self._came.setdefault(round_, []).append((now_s - self._given_s.pop(task, now_s), site, staleness))

    def judged(self, round_: int, metrics: Mapping[str, tuple[float, float]]) -> None:
        """What one site's evaluation of a round's version came to."""
        for name, (total, count) in metrics.items():
            if count > 0 and math.isfinite(total):
                self._judged.setdefault(round_, {}).setdefault(name, []).append(total / count)

    def pack(self) -> dict[str, Any]:
        """All of it, as JSON can hold it."""
        return asdict(self)

    @classmethod
    def unpack(cls, values: Mapping[str, Any]) -> Waits:
        """What `pack` gave."""
        return cls(
            _given_s=dict(values["_given_s"]),
            _came={int(number): [(s, site, age) for s, site, age in came] for number, came in values["_came"].items()},
            _judged={int(number): judged for number, judged in values["_judged"].items()},
        )

    def take_spread(self, round_: int) -> dict[str, tuple[float, ...]]:
        """By metric that several sites have: the worst site's, the quartiles, and the best's."""
        found = self._judged.pop(round_, {})
        return {
            name: tuple(float(value) for value in np.quantile(values, (0, 0.25, 0.5, 0.75, 1)))
            for name, values in found.items()
            if len(values) > 1
        }

    def take(self, round_: int) -> Waited:
        """What a round came to, which is then forgotten."""
        came = self._came.pop(round_, [])
        if not came:
            return Waited()
        slowest_s, slowest, _ = max(came)
        ages = [age for _, _, age in came]
        return Waited(
            median_s=statistics.median(seconds for seconds, _, _ in came),
            slowest_s=slowest_s,
            slowest=slowest,
            staleness=statistics.mean(ages),
            most_stale=max(ages),
        )
