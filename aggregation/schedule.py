"""Who syncs, and when: the events that a schedule is told and the actions that it answers with.

A schedule is a state table without I/O, clock or randomness of its own; the server feeds it and does what it says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

# --- events: what the schedule is told ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """A site accepted the run; `max_weight` bounds the weight of each of its updates.

    Of a region it bounds those of each site below; its own are sums of up to `num_sites` of them.
    """

    site: str
    max_weight: int
    labels: Mapping[str, str]
    num_sites: int = 0  # below a region, over all levels; 0: it is a site itself
    sum_weights: int = 0  # largest weight of an update of a region; 0 of a site


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """A member is gone: its lease ran out, it left the run, or it was revoked."""

    site: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """No offer is unanswered any more (or the wait for answers ended): the members so far are who there is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """An update is whole and valid. Its bytes are folded only when it belongs to a sum that closes."""

    site: str
    round: int
    base_version: int
    weight: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A task came to nothing: the app raised, the update was refused, or an accepted one was lost before its commit."""

    site: str
    round: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TimerFired:
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """Round `round` made model version `version`, durably."""

    round: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The upper server wants a round of this region; the sum of its updates keeps to the terms of the whole round."""

    round: int
    base_version: int
    num_sites: int
    max_weight: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Withdrawn:
    """The upper server does not wait for this region's part of a round any more."""

    round: int
    reason: str


Event = Joined | Left | Ready | Accepted | Failed | TimerFired | Committed | Asked | Withdrawn


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """Of gossip: a site holds the model that it has trained in `round`, durably."""

    site: str
    round: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Met:
    """Of gossip: `site` holds the model of its neighbour `peer`, durably; or cannot come by it, and why."""

    site: str
    peer: str
    round: int
    received: bool
    reason: str = ""
    tried: int = 0  # ways that had failed when it was told this one


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLost:
    """Of gossip: a site has lost the model that it trained in `round`."""

    site: str
    round: int
    reason: str


GossipEvent = Trained | Met | ModelLost  # told to schedules that meet (`gossip`) and to no other


# --- actions: what the schedule wants --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """Give a training task to each of `sites` (sorted): start from `base_version`, for `round`.

    `max_weight` is the largest weight that the cohort declared (w_max of exact sums).
    """

    round: int
    base_version: int
    sites: tuple[str, ...]
    max_weight: int
    num_sites: int = 0  # updates that the sum has room for, in a region that of the whole tree; 0: those of the cohort
    carried: tuple[str, ...] = ()  # sites (sorted) whose open task of an earlier round goes on, and counts in this one


@dataclass(frozen=True, slots=True, kw_only=True)
class Close:
    """Combine the accepted updates of `sites` (sorted) into the next version."""

    round: int
    sites: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """Nobody waits for the updates of these sites any more."""

    round: int
    sites: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SetTimer:
    """Fire `TimerFired(name)` after this time; setting a name again replaces it. 0 clears it."""

    name: str
    after_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """The last round is committed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Abandon:
    """This region has no part in a round; the run goes on with the next one that is asked for."""

    round: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """The run cannot go on; `reason` names who or what is missing."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOwn:
    """Of gossip: each of `sites` (sorted) mixes what it has, or begins with `base_version`, trains, and keeps the model."""

    round: int
    base_version: int
    sites: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Introduce:
    """Of gossip: tell the pairs of the round that are not settled yet, as they stand in the state, of each other."""

    round: int


Action = Dispatch | Close | Cancel | SetTimer | Stop | GiveUp | Abandon | TrainOwn | Introduce

S = TypeVar("S")


class Schedule(Protocol[S]):
    """Pure and deterministic: the same events give the same actions, so a journal of events replays a run.

    The state is a frozen dataclass of plain values; `on` never changes the one it was given.
    """

    def init(self, *, num_rounds: int, seed: int) -> S: ...

    def on(self, state: S, event: Event) -> tuple[S, Sequence[Action]]: ...

    @property
    def min_sites(self) -> int:
        """Members without which no round can start."""
        ...

    @property
    def fewest_updates(self) -> int:
        """Updates that every closed round combines at least; sites refuse a run in which they are too few."""
        ...


@runtime_checkable
class Asynchronous(Protocol):
    """A schedule whose rounds take updates of older base versions too."""

    def discount(self, staleness: int) -> float:
        """What an update counts, from 0 to 1, whose base version is so many versions older than its round's."""
        ...
