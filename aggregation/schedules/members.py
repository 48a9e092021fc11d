"""What schedules have in common: who is a member, when the first round may start, and which event goes where.

Invariant: a schedule that is over does nothing more, and an event that does not matter changes nothing.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Generic, Protocol, Self, TypeVar

from atoll.aggregation.schedule import (
    Accepted,
    Action,
    Asked,
    Committed,
    Event,
    Failed,
    GiveUp,
    Joined,
    Left,
    Ready,
    TimerFired,
    Withdrawn,
)

Members = tuple[tuple[str, int], ...]  # (site, max_weight), sorted


class HasMembers(Protocol):
    """What a state has at least: a frozen dataclass of plain values."""

    @property
    def ready(self) -> bool: ...

    @property
    def members(self) -> Members: ...

    @property
    def is_over(self) -> bool: ...

    def ended(self) -> Self:
        """The same, over."""
        ...


S = TypeVar("S", bound=HasMembers)


class Membership(Generic[S]):
    """The part of a state table that is the same in all: membership, and the first start."""

    @property
    @abstractmethod
    def min_sites(self) -> int:
        """Members without which no round can start."""

    def on(self, state: S, event: Event) -> tuple[S, Sequence[Action]]:
        """The state after `event` and what is to be done; events that do not matter change nothing."""
        if state.is_over:
            return state, ()
        match event:
            case Joined():
                if not self._takes(event):
                    return state, ()
                return self._joined(_replaced(state, members=with_member(state.members, event)), event)
            case Left():
                members = tuple(member for member in state.members if member[0] != event.site)
                return self._left(_replaced(state, members=members), event)
            case Ready():
                return self._ready(state)
            case Accepted():
                return self._accepted(state, event)
            case Failed():
                return self._failed(state, event)
            case TimerFired():
                return self._timer_fired(state, event)
            case Committed():
                return self._committed(state, event)
            case Asked() | Withdrawn():  # of a region's rounds (relayed.py)
                return state, ()

    def gathered(self, state: S, events: Iterable[Joined]) -> S:
        """The state when all of these have joined before the run was ready: as one after the other, but in one pass.

        Raises:
            ValueError: the run is ready, or over.
        """
        if state.ready or state.is_over:
            raise ValueError("only who joins before a run is ready can be taken together with others")
        weights = dict(state.members) | {event.site: event.max_weight for event in events if self._takes(event)}
        return _replaced(state, members=tuple(sorted(weights.items())))

    def _takes(self, event: Joined) -> bool:
        """Whether this site can be asked at all."""
        return True

    def _ready(self, state: S) -> tuple[S, Sequence[Action]]:
        if state.ready:
            return state, ()
        state = _replaced(state, ready=True)
        return self._start(state) if self._enough(state) else self._too_few(state)

    def _enough(self, state: S) -> bool:
        return len(state.members) >= self.min_sites

    def _too_few(self, state: S) -> tuple[S, Sequence[Action]]:
        here = ", ".join(site for site, _ in state.members) or "nobody"
        reason = (
            f"{self._who_waits(state)} needs {self.min_sites} sites, there are {len(state.members)}: {here}; start the "
            "others again, or lower min in the job's schedule"
        )
        return state.ended(), (GiveUp(reason=reason),)

    def _who_waits(self, state: S) -> str:
        """What cannot start with too few sites, for people."""
        return "the run"

    # --- what differs -----------------------------------------------------------------------------------------------

    @abstractmethod
    def _joined(self, state: S, event: Joined) -> tuple[S, Sequence[Action]]:
        """The site is among the members now."""

    @abstractmethod
    def _left(self, state: S, event: Left) -> tuple[S, Sequence[Action]]:
        """The site is not among them any more."""

    @abstractmethod
    def _start(self, state: S) -> tuple[S, Sequence[Action]]:
        """The next round begins; there are enough members for it."""

    @abstractmethod
    def _accepted(self, state: S, event: Accepted) -> tuple[S, Sequence[Action]]: ...

    @abstractmethod
    def _failed(self, state: S, event: Failed) -> tuple[S, Sequence[Action]]: ...

    @abstractmethod
    def _timer_fired(self, state: S, event: TimerFired) -> tuple[S, Sequence[Action]]: ...

    @abstractmethod
    def _committed(self, state: S, event: Committed) -> tuple[S, Sequence[Action]]: ...


def with_member(members: Members, event: Joined) -> Members:
    """The members with this site, whose weight may be another than before."""
    others = (member for member in members if member[0] != event.site)
    return tuple(sorted((*others, (event.site, event.max_weight))))


def _replaced(state: S, **changes: Any) -> S:
    changed: S = replace(state, **changes)  # type: ignore[type-var]  # a protocol cannot say that it is a dataclass
    return changed
