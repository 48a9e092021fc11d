"""One round as a state table without I/O: who was asked, whose update is in, and when the round is being closed.

Invariant: an update that was accepted stays in the round until it is committed or declared lost; nothing is accepted
once the round is closing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from atoll.aggregation.lanes import ALL, Share

Metrics = Mapping[str, tuple[float, float]]  # name -> (sum, count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """An accepted update: what is known of it besides its bytes."""

    task: str
    attempt: int
    weight: int
    metrics: Metrics
    dispatched: int = 0  # round in which its task was given, where not the one that it counts in
    statistics: str = ""  # of a site's data, as `server.surveys` writes them down


@dataclass(frozen=True, slots=True, kw_only=True)
class Secured:
    """Of secure aggregation: how far the sessions of one cohort of a round are (secured.py), and what their sum is of."""

    session: int = 0  # number of the last one
    opening: str = ""  # of the one under way: canonical JSON
    said: str = ""  # of one whose survivors are fixed: `SecureSession.pack`
    revealed: tuple[str, ...] = ()  # survivors of the last session that had them: their sum may be known
    failed: tuple[str, ...] = ()  # why the sessions before came to nothing
    sites: tuple[str, ...] = ()  # whose sum it is, once it is known
    weight: int = 0  # sum of the weights, once it is known
    metrics: Metrics = field(default_factory=dict)
    dropped: tuple[str, ...] = ()  # whose updates were to be in the sum and are not
    liars: Mapping[str, str] = field(default_factory=dict)  # who sent what does not hold, and what


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """`max_weight` is the largest weight that the cohort declared (w_max of exact sums)."""

    number: int
    base_version: int
    asked: Mapping[str, int]  # attempt by site; a site that is asked again gets the next one
    bases: Mapping[str, int] = field(default_factory=dict)  # base versions of sites that began with an older one
    max_weight: int
    regions: Mapping[str, int] = field(default_factory=dict)  # number of sites below, of those asked that are regions
    room: int = 0  # updates that the sum has room for, where not those of the cohort: a region's round is part of one
    branches: Mapping[str, int] = field(default_factory=dict)  # group of each site asked, where there are groups
    branch_weights: Mapping[int, int] = field(default_factory=dict)  # largest weight that a group's cohort declared
    updates: Mapping[str, Update] = field(default_factory=dict)  # by site
    closing: tuple[str, ...] = ()  # sites whose updates make the version; empty while open
    share: Share = ALL  # of those that are closing in all members of the run
    all_weights: int = 0  # of all members when it closed
    secured: Mapping[int, Secured] = field(default_factory=dict)  # by part of the round, where updates are masked

    @property
    def cohort(self) -> tuple[str, ...]:
        return tuple(sorted(self.asked))

    @property
    def num_sites(self) -> int:
        """Updates that the sum of the whole round has room for."""
        return self.room or sum(self.regions.get(site, 1) for site in self.asked)

    def terms_of(self, branch: int | None) -> tuple[int, int]:
        """Room for updates, and their largest weight, in the sum of a group, or in the one of all."""
        if branch is None:
            return self.num_sites, self.max_weight
        return sum(other == branch for other in self.branches.values()), self.branch_weights[branch]

    @property
    def sums(self) -> tuple[int | None, ...]:
        """Groups that have a sum of their own; None stands for the one sum of a round without groups."""
        return tuple(sorted(self.branch_weights)) or (None,)

    def in_branch(self, branch: int | None) -> tuple[str, ...]:
        """Sites of a group, or all, whose updates are in, sorted."""
        return tuple(sorted(site for site in self.updates if self.branches.get(site) == branch))

    @property
    def sum_weights(self) -> int:
        return sum(self.updates[site].weight for site in self.closing or self.updates)

    @property
    def missing(self) -> tuple[str, ...]:
        """Members of the cohort whose update is not in, sorted."""
        return tuple(sorted(set(self.asked) - set(self.closing or self.updates)))

    def extended(self, sites: tuple[str, ...], max_weight: int, regions: Mapping[str, int], room: int = 0) -> Round:
        """The round after more sites were asked, or the same ones again."""
        asked = {**self.asked, **{site: self.asked.get(site, 0) + 1 for site in sites}}
        regions = {**self.regions, **regions}
        bases = {site: base for site, base in self.bases.items() if site not in sites}
        most, room = max(self.max_weight, max_weight), max(self.room, room)
        return replace(self, asked=asked, bases=bases, max_weight=most, regions=regions, room=room)

    def grouped(self, sites: tuple[str, ...], branch: int, max_weight: int) -> Round:
        """The round with these sites, just asked, in a group."""
        weights = {**self.branch_weights, branch: max(max_weight, self.branch_weights.get(branch, 0))}
        return replace(self, branches={**self.branches, **dict.fromkeys(sites, branch)}, branch_weights=weights)

    def staleness(self, site: str) -> int:
        """By how many versions the base of a site's update is older than the round's."""
        return self.base_version - self.bases.get(site, self.base_version)

    def carrying(self, site: str, attempt: int, base_version: int) -> Round:
        """The round with a site whose task was given in an earlier one."""
        bases = {**self.bases, site: base_version}
        return replace(self, asked={**self.asked, site: attempt}, bases=bases)

    def without(self, sites: frozenset[str]) -> Round:
        """The round without these members, whose tasks go on in a later one."""
        return replace(self, asked={site: attempt for site, attempt in self.asked.items() if site not in sites})

    def protected(self, part: int, secured: Secured) -> Round:
        return replace(self, secured={**self.secured, part: secured})

    def accepted(self, site: str, update: Update) -> Round:
        return replace(self, updates={**self.updates, site: update})

    def lost(self, site: str) -> Round:
        """The round without the update of `site`; a round that was closing with it is open again."""
        updates = {name: update for name, update in self.updates.items() if name != site}
        return replace(self, updates=updates, closing=() if site in self.closing else self.closing)

    def closed(self, sites: tuple[str, ...], share: Share = ALL, all_weights: int = 0) -> Round:
        return replace(self, closing=sites, share=share, all_weights=all_weights)
