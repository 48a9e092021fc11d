"""The rounds of a region: each when the upper server asks for it, with all of the region's sites.

::

    GATHERING --Ready, enough members--> IDLE --Asked--> a round (rounds.py) --all in, or quorum--> SEALED
                                          ^ `<--Abandon: too few, or withdrawn--'                     |
                                          `-------------Committed, by the upper server----------------'

Invariant: nothing starts a round but `Asked`, and a round that came to nothing ends neither run nor region. Which sites
take part is settled with `Ready`, since their number and weights are declared then and hold for the whole run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pydantic import Field

from atoll.aggregation.schedule import (
    Abandon,
    Action,
    Asked,
    Committed,
    Dispatch,
    Event,
    GiveUp,
    Joined,
    Left,
    Ready,
    SetTimer,
    Withdrawn,
)
from atoll.aggregation.schedules.rounds import Phase, Rounds, RoundsState
from atoll.wire.job import Seconds, Strict


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """A member as it was when the region joined the run."""

    site: str
    max_weight: int
    num_sites: int  # 1 of a site
    sum_weights: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayedState:
    """Plain values. `declared` is sorted, and empty until the region has joined the run."""

    inner: RoundsState  # of the round that was asked for last
    joined: tuple[Declared, ...] = ()  # everyone so far, sorted
    declared: tuple[Declared, ...] = ()
    asked: Asked | None = None  # the round under way

    @property
    def max_weight(self) -> int:
        """Largest weight of one site."""
        return max(member.max_weight for member in self.declared)

    @property
    def num_sites(self) -> int:
        return sum(member.num_sites for member in self.declared)

    @property
    def sum_weights(self) -> int:
        return sum(member.sum_weights for member in self.declared)


Step = tuple[RelayedState, Sequence[Action]]


class Relayed:
    """One round of all members for each that the upper server asks for."""

    class Options(Strict):
        min: int = Field(default=2, ge=1, le=1_000_000)  # members without which the region takes no part
        quorum: int | None = Field(default=None, ge=1)  # updates that suffice; all where absent
        deadline: Seconds = 600.0  # of a round, from dispatch

    def __init__(self, options: Options) -> None:
        self.name = "relayed"
        self.options = options
        self._rounds = Rounds(Rounds.Options(min=options.min, quorum=options.quorum, deadline=options.deadline))

    @property
    def min_sites(self) -> int:
        return self._rounds.min_sites

    @property
    def fewest_updates(self) -> int:
        return self._rounds.fewest_updates

    def init(self, *, num_rounds: int, seed: int) -> RelayedState:
        return RelayedState(inner=self._rounds.init(num_rounds=num_rounds, seed=seed))

    def on(self, state: RelayedState, event: Event) -> Step:
        """The state after `event` and what is to be done."""
        match event:
            case Ready():
                enough = len(state.inner.members) >= self.options.min
                return (state if state.declared or not enough else _declare(state)), ()
            case Asked():
                return self._asked(state, event)
            case Committed() if state.asked is not None and event.round < state.asked.round:
                return state, ()
            case Committed():
                return _idle(state, event.version), _no_deadline(state)
            case Withdrawn():
                if state.asked is None or state.asked.round != event.round:
                    return state, ()
                actions = (*_no_deadline(state), Abandon(round=event.round, reason=event.reason))
                return _idle(state, state.inner.version), actions
            case Joined():
                state = state if state.declared else replace(state, joined=_with(state.joined, event))
            case Left() if not state.declared:
                state = replace(state, joined=tuple(member for member in state.joined if member.site != event.site))
        return self._inner(state, event)

    def _asked(self, state: RelayedState, event: Asked) -> Step:
        """A round over all members; one that is under way already goes on."""
        if event == state.asked:
            return state, ()
        before: tuple[Action, ...] = ()
        if state.asked is not None:
            reason = f"the upper server asks for round {event.round}"
            before = (*_no_deadline(state), Abandon(round=state.asked.round, reason=reason))
        idle = _idle(state, event.base_version)
        state = replace(idle, asked=event, inner=replace(idle.inner, round=event.round - 1))
        state, actions = self._inner(state, Ready())
        return state, (*before, *actions)

    def _inner(self, state: RelayedState, event: Event) -> Step:
        """What `rounds` says to it, in the terms of the upper server's round."""
        inner, actions = self._rounds.on(state.inner, event)
        if inner == state.inner and not actions:
            return state, ()
        state = replace(state, inner=inner)
        wanted: list[Action] = []
        for action in actions:
            if isinstance(action, GiveUp):
                assert state.asked is not None  # `rounds` gives up on rounds only, and those were asked for
                wanted += [*_no_deadline(state), Abandon(round=state.asked.round, reason=action.reason)]
                state = _idle(state, state.inner.version)
            elif isinstance(action, Dispatch):
                assert state.asked is not None
                terms = state.asked
                wanted.append(replace(action, max_weight=terms.max_weight, num_sites=terms.num_sites))
            else:
                wanted.append(action)
        return state, tuple(wanted)


def _declare(state: RelayedState) -> RelayedState:
    return replace(state, declared=state.joined)


def _with(joined: tuple[Declared, ...], event: Joined) -> tuple[Declared, ...]:
    member = Declared(
        site=event.site,
        max_weight=event.max_weight,
        num_sites=event.num_sites or 1,
        sum_weights=event.sum_weights or event.max_weight,
    )
    others = [other for other in joined if other.site != event.site]
    return tuple(sorted((*others, member), key=lambda member: member.site))


def _idle(state: RelayedState, version: int) -> RelayedState:
    """Between rounds: members come and go, and nothing starts."""
    inner = replace(state.inner, phase=Phase.GATHERING, ready=False, version=version, cohort=())
    return replace(state, inner=inner, asked=None)


def _no_deadline(state: RelayedState) -> tuple[Action, ...]:
    return (SetTimer(name=f"deadline/{state.asked.round}", after_s=0),) if state.asked is not None else ()
