"""Simulated time: how long a site's training takes, and what comes next.

Time is virtual: it passes from one event to the next, whatever the machine that simulates needs for it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from atoll.wire.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """How long an optimizer step takes at each site, in simulated seconds.

    Every site has `step_s`, times a draw from a log-normal distribution of median 1 where `spread` is not 0; of the
    sites a share of `stragglers` is slower by `slowdown`. `by_site` says it of single sites instead. With the defaults
    no time passes: updates come in the order in which their tasks were given.
    """

    step_s: float = 0.0
    spread: float = 0.0  # standard deviation of the logarithm
    stragglers: float = 0.0  # of the sites, rounded to the nearest number
    slowdown: float = 10.0
    seed: int = 0  # of the draws
    by_site: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require("speeds.step_s", self.step_s, 0.0, 1e6)
        require("speeds.spread", self.spread, 0.0, 5.0)
        require("speeds.stragglers", self.stragglers, 0.0, 1.0)
        require("speeds.slowdown", self.slowdown, 1.0, 1e6)
        for site, seconds in self.by_site.items():
            require(f"speeds.by_site.{site}", seconds, 0.0, 1e6)

    def step_seconds(self, sites: Sequence[str]) -> dict[str, float]:
        """Seconds of a step by site.

        Raises:
            ConfigError: `by_site` names a site that is not there.
        """
        require_known("speeds.by_site", self.by_site, sites)
        rng = np.random.default_rng(self.seed)
        factors = np.exp(self.spread * rng.standard_normal(len(sites)))
        slow = rng.permutation(len(sites))[: round(self.stragglers * len(sites))]
        factors[slow] *= self.slowdown
        drawn = {site: self.step_s * float(factor) for site, factor in zip(sites, factors, strict=True)}
        return {**drawn, **self.by_site}


def require(key: str, value: float, low: float, high: float) -> None:
    """Returns where a value is within its bounds. Raises ConfigError, which names both."""
    if not low <= value <= high:  # NaN compares false
        text = f"{key} = {value}: wanted {low:g} to {high:g}"
        raise ConfigError(text, key=key, value=str(value), bound=f"{low:g} to {high:g}")


def require_known(key: str, named: Iterable[str], sites: Sequence[str]) -> None:
    """Returns where all of the named sites are there. Raises ConfigError, which names those that are not."""
    if strangers := sorted(set(named) - set(sites)):
        raise ConfigError(
            f"{key} names {', '.join(strangers)}, which no site is called; the sites are "
            f"{', '.join(sites[:10])}{', ...' if len(sites) > 10 else ''}",
            key=key,
            value=strangers[0],
        )


class Clock:
    """What is due, in the order of its time; of equal times, in the order in which it was set."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, int, Any]] = []
        self._count = 0

    def set(self, after_s: float, what: Any) -> None:
        """Have `what` come up `after_s` seconds from now."""
        self._count += 1
        heapq.heappush(self._due, (self.now_s + after_s, self._count, what))

    @property
    def standing(self) -> tuple[float, int, Sequence[tuple[float, int, Any]]]:
        """The time, how often something was set, and what is due: all that there is."""
        return self.now_s, self._count, self._due

    def restore(self, now_s: float, count: int, due: Iterable[tuple[float, int, Any]]) -> None:
        """Go on from what `standing` gave."""
        self.now_s, self._count, self._due = now_s, count, list(due)
        heapq.heapify(self._due)

    def next(self) -> Any:
        """What is due next; time passes until then. None where nothing is."""
        if not self._due:
            return None
        at_s, _, what = heapq.heappop(self._due)
        self.now_s = max(self.now_s, at_s)
        return what
