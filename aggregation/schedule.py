"""Who syncs, and when: the events that a schedule is told and the actions that it answers with.

A schedule is a state table without I/O, clock or randomness of its own; the server feeds it and does what it says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

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
    counted_round: int = 0  # the last one whose version holds this region's part; 0: none


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
    branch: int | None = (
        None  # group of these sites, whose updates make a version of its own; None: there are no groups
    )
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
class Resumable(Protocol):
    """A schedule that can begin after rounds of another run, with its numbers going on."""

    def init_after(self, round: int, version: int, *, num_rounds: int, seed: int) -> Any:
        """As `init`, where rounds up to `round` are done and made `version`; `num_rounds` counts them too."""
        ...


def initial(schedule: Schedule[S], num_rounds: int, seed: int, done_rounds: int, version: int) -> S:
    """The state that a run begins with, after so many rounds of the run that it goes on from."""
    if not done_rounds:
        return schedule.init(num_rounds=num_rounds, seed=seed)
    assert isinstance(schedule, Resumable)  # a submission that is not has been refused
    state: S = schedule.init_after(done_rounds, version, num_rounds=num_rounds, seed=seed)
    return state


@runtime_checkable
class Changeable(Protocol):
    """A schedule whose options may be others from a round on: its state means the same to all of them."""

    @property
    def fixed(self) -> Mapping[str, object]:
        """By option, what has to be the same in all rounds of a run."""
        ...


@runtime_checkable
class Asynchronous(Protocol):
    """A schedule whose rounds take updates of older base versions too."""

    def discount(self, staleness: int) -> float:
        """What an update counts, from 0 to 1, whose base version is so many versions older than its round's."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """What a round asks of a site beyond the job's work, and how much of the model it moves."""

    steps: int | None = None  # optimizer steps of a round, whose state goes on over rounds; None: as the job says
    num_fragments: int = 1  # of the model, exchanged in turns
    alpha: float = 1.0  # weight of the new value of a fragment against the site's own


@runtime_checkable
class Stepped(Protocol):
    """A schedule that counts the steps of sites, and may exchange a part of the model at a time."""

    @property
    def exchange(self) -> Exchange: ...


@runtime_checkable
class Branching(Protocol):
    """A schedule in which groups of sites have versions of their own between those that all have in common."""

    @property
    def num_branches(self) -> int: ...

    @property
    def combines_every(self) -> int:
        """Rounds from one version of all to the next."""
        ...

    @property
    def inner_optimizer(self) -> Any:
        """The server optimizer of a group's versions."""
        ...

    def is_complete(self, state: Any) -> bool:
        """Whether every group has the members without which it cannot begin."""
        ...

    def branch(self, state: Any, site: str, version: int) -> int | None:
        """Whose form of a version a site gets: its group's, or None for the one that all have in common."""
        ...


@runtime_checkable
class Selective(Protocol):
    """A schedule that asks only some of the sites that there are."""

    def takes(self, site: str, labels: Mapping[str, str]) -> bool:
        """Whether a site of this name and labels can be asked; others are not offered the run."""
        ...
