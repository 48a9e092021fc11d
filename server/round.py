"""One round as a state table without I/O: who was asked, whose update is in, and when the round is being closed.

Invariant: an update that was accepted stays in the round until it is committed or declared lost; nothing is accepted
once the round is closing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

Metrics = Mapping[str, tuple[float, float]]  # name -> (sum, count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """An accepted update: what is known of it besides its bytes."""

    task: str
    attempt: int
    weight: int
    metrics: Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """`max_weight` is the largest weight that the cohort declared (w_max of exact sums)."""

    number: int
    base_version: int
    asked: Mapping[str, int]  # attempt by site; a site that is asked again gets the next one
    max_weight: int
    regions: Mapping[str, int] = field(default_factory=dict)  # number of sites below, of those asked that are regions
    room: int = 0  # updates that the sum has room for, where not those of the cohort: a region's round is part of one
    updates: Mapping[str, Update] = field(default_factory=dict)  # by site
    closing: tuple[str, ...] = ()  # sites whose updates make the version; empty while open

    @property
    def cohort(self) -> tuple[str, ...]:
        return tuple(sorted(self.asked))

    @property
    def num_sites(self) -> int:
        """Updates that the sum of the whole round has room for."""
        return self.room or sum(self.regions.get(site, 1) for site in self.asked)

    @property
    def sum_weights(self) -> int:
        return sum(self.updates[site].weight for site in self.closing or self.updates)

    @property
    def missing(self) -> tuple[str, ...]:
        """Members of the cohort whose update is not in, sorted."""
        return tuple(sorted(set(self.asked) - set(self.closing or self.updates)))

    def extended(self, sites: tuple[str, ...], max_weight: int, regions: Mapping[str, int]) -> Round:
        """The round after more sites were asked, or the same ones again."""
        asked = {**self.asked, **{site: self.asked.get(site, 0) + 1 for site in sites}}
        regions = {**self.regions, **regions}
        return replace(self, asked=asked, max_weight=max(self.max_weight, max_weight), regions=regions)

    def accepted(self, site: str, update: Update) -> Round:
        return replace(self, updates={**self.updates, site: update})

    def lost(self, site: str) -> Round:
        """The round without the update of `site`; a round that was closing with it is open again."""
        updates = {name: update for name, update in self.updates.items() if name != site}
        return replace(self, updates=updates, closing=() if site in self.closing else self.closing)

    def closed(self, sites: tuple[str, ...]) -> Round:
        return replace(self, closing=sites)
