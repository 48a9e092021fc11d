"""Asynchronous rounds: a version from the first k updates or more, whatever version they began with.

::

    GATHERING --Ready, enough members--> TRAINING --k updates in--> round closes, the next one opens --> TRAINING
                                            |                              `--last one committed--> OVER (Stop)
                                            `--fewer than k can still come, or nothing for a deadline--> OVER (GiveUp)

Nobody waits for a slow site: when k updates close a round, the tasks that are out go on in the next one, and count
less there, by how many versions they are behind. A site whose update is in begins anew with the version that it went
into. A task that would fall behind by more than `max_staleness` is taken back, and its site begins anew too.

Invariants: a site has one task at a time, and one update in a round; a round closes only when the one before it is
committed. Equal events give equal states and actions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from pydantic import Field, model_validator

from atoll.aggregation.schedule import (
    Accepted,
    Action,
    Cancel,
    Close,
    Committed,
    Dispatch,
    Failed,
    GiveUp,
    Joined,
    Left,
    SetTimer,
    Stop,
    TimerFired,
)
from atoll.aggregation.schedules.members import Membership
from atoll.wire.job import Seconds, Strict

MOST_TRIES = 3  # that a site has to make a lost update again


class Phase(Enum):
    GATHERING = "gathering"
    TRAINING = "training"
    OVER = "over"


@dataclass(frozen=True, slots=True, kw_only=True)
class Out:
    """A task that is under way. `max_weight` bounds its update's, whether or not its site is a member now."""

    site: str
    base_version: int
    max_weight: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferedState:
    """Plain values, sorted by site. `room` and `max_weight` are the terms of the open round's sum: they stay.

    A sum on other terms would begin anew, and no site sends twice what was accepted.
    """

    num_rounds: int
    phase: Phase = Phase.GATHERING
    ready: bool = False
    round: int = 0  # the open one
    version: int = 0
    members: tuple[tuple[str, int], ...] = ()  # (site, max_weight)
    out: tuple[Out, ...] = ()
    room: int = 0
    max_weight: int = 1
    buffer: tuple[str, ...] = ()  # whose update is in this round
    failed: tuple[tuple[str, str], ...] = ()  # (site, reason), of this round
    closing: tuple[str, ...] = ()  # whose update is in the round before, until that is committed
    awaited: tuple[tuple[str, int], ...] = ()  # whose update was in it and was lost, and how often each was asked again
    timers: int = (
        0  # times that the timer was set: each setting has a name of its own, so that none is taken for another
    )

    @property
    def is_over(self) -> bool:
        return self.phase is Phase.OVER

    def ended(self) -> BufferedState:
        return replace(self, phase=Phase.OVER)

    @property
    def busy(self) -> frozenset[str]:
        return frozenset(out.site for out in self.out)

    @property
    def is_closing(self) -> bool:
        """Whether the round before the open one is not committed yet."""
        return bool(self.closing or self.awaited)

    @property
    def timer(self) -> str:
        return f"progress/{self.timers}"


Step = tuple[BufferedState, Sequence[Action]]


class Buffered(Membership[BufferedState]):
    """A version from the first `k` updates to come; slow sites count less, and hold nobody up.

    An update that is s versions behind counts (1 + s)^-exponent of its values (Nguyen et al. 2021, arXiv:2106.06639,
    algorithm 1; the polynomial discount is that of Xie et al. 2019, arXiv:1903.03934, section 5.2, which is k = 1).
    A run gives up where fewer than k sites are left, or nothing came for as long as `deadline`.
    """

    class Options(Strict):
        k: int = Field(ge=1, le=1_000_000)
        min: int = Field(default=2, ge=1, le=1_000_000)  # members without which the run does not start
        max_staleness: int = Field(default=20, ge=0, le=1_000_000)  # versions
        exponent: float = Field(default=0.5, ge=0, le=1)  # beyond 1, k updates would be hardly more than the fresh ones
        deadline: Seconds = 600.0  # without an update

        @model_validator(mode="after")
        def _can_be_filled(self) -> Buffered.Options:
            if self.k > self.min:
                raise ValueError(f"k is at most min ({self.min}), else a run could start whose buffer never fills")
            return self

    def __init__(self, options: Options) -> None:
        self.name = "buffered"
        self.options = options

    @property
    def min_sites(self) -> int:
        return self.options.min

    @property
    def fewest_updates(self) -> int:
        return self.options.k

    @property
    def fixed(self) -> Mapping[str, object]:
        """By option, what has to be the same in all rounds of a run: each closes by its own, whoever is under way."""
        return {}

    def discount(self, staleness: int) -> float:
        return float((1 + staleness) ** -self.options.exponent)

    def init(self, *, num_rounds: int, seed: int) -> BufferedState:
        return BufferedState(num_rounds=num_rounds)

    def init_after(self, round: int, version: int, *, num_rounds: int, seed: int) -> BufferedState:
        return BufferedState(num_rounds=num_rounds, round=round, version=version)

    # --- members ----------------------------------------------------------------------------------------------------

    def _joined(self, state: BufferedState, event: Joined) -> Step:
        if state.phase is Phase.GATHERING:
            return self._start(state) if state.ready and self._enough(state) else (state, ())
        if state.is_closing:
            return state, ()  # it begins with the next version
        return self._begin(state)

    def _left(self, state: BufferedState, event: Left) -> Step:
        return self._settle(state)

    # --- one round --------------------------------------------------------------------------------------------------

    def _start(self, state: BufferedState) -> Step:
        return self._begin(_with_terms(replace(state, phase=Phase.TRAINING, round=state.round + 1)))

    def _begin(self, state: BufferedState) -> Step:
        """New tasks in the open round for members that have none, and fit its sum; the others wait for the next one."""
        free = [member for member in state.members if member[0] not in (*state.busy, *state.buffer)]
        if not state.buffer:
            state = _with_terms(state)
        places = state.room - len(state.out) - len(state.buffer)
        chosen = [member for member in free if member[1] <= state.max_weight][:places]
        if not chosen:
            return self._patient(state)
        begun = [Out(site=site, base_version=state.version, max_weight=weight) for site, weight in chosen]
        state = replace(state, out=_sorted((*state.out, *begun)))
        state, patience = self._patient(state)
        return state, (_dispatch(state, sites=tuple(out.site for out in begun)), *patience)

    def _accepted(self, state: BufferedState, event: Accepted) -> Step:
        if event.round == state.round - 1 and event.site in dict(state.awaited):
            awaited = tuple(pair for pair in state.awaited if pair[0] != event.site)
            return self._close_again(replace(state, closing=_with(state.closing, event.site), awaited=awaited))
        if event.round != state.round or event.site not in state.busy:
            return state, ()
        out = tuple(out for out in state.out if out.site != event.site)
        state, actions = self._settle(replace(state, out=out, buffer=_with(state.buffer, event.site)))
        if actions or state.is_closing:
            return state, actions
        return self._patient(state)

    def _failed(self, state: BufferedState, event: Failed) -> Step:
        if event.round == state.round - 1 and event.site in (*state.closing, *dict(state.awaited)):
            return self._lost(state, event)
        if event.round != state.round:
            return state, ()
        weight = dict(state.members).get(event.site)
        if event.site in state.buffer:  # its bytes were lost before the commit
            state = replace(state, buffer=tuple(site for site in state.buffer if site != event.site))
            again = Out(site=event.site, base_version=state.version, max_weight=weight or state.max_weight)
            state = replace(state, out=_sorted((*state.out, again)))
            state, patience = self._patient(state)
            if weight is None:  # it may come back with its update
                return state, patience
            return state, (_dispatch(state, sites=(event.site,)), *patience)
        if event.site not in state.busy:
            return state, ()
        out = tuple(out for out in state.out if out.site != event.site)
        failed = tuple(sorted((*state.failed, (event.site, event.reason))))
        return self._settle(replace(state, out=out, failed=failed))

    def _lost(self, state: BufferedState, event: Failed) -> Step:
        """An update of the closing round is gone: the round does without it where it can, else its site is asked again."""
        tries = dict(state.awaited).get(event.site, 0) + 1
        state = replace(
            state,
            closing=tuple(site for site in state.closing if site != event.site),
            awaited=tuple(pair for pair in state.awaited if pair[0] != event.site),
        )
        if len(state.closing) >= self.options.k:
            return self._close_again(state)
        if tries > MOST_TRIES:
            reason = (
                f"round {event.round} lost the update of {event.site}, which could not make it again: {event.reason}; "
                "put right what keeps it and submit again"
            )
            return replace(state, phase=Phase.OVER), (GiveUp(reason=reason),)
        state = replace(state, awaited=tuple(sorted((*state.awaited, (event.site, tries)))))
        state, patience = self._patient(state)
        if event.site not in dict(state.members):
            return state, patience
        again = Dispatch(round=event.round, base_version=event.round - 1, sites=(event.site,), max_weight=1)
        return state, (again, *patience)

    def _close_again(self, state: BufferedState) -> Step:
        if state.awaited:
            return state, ()
        return state, (SetTimer(name=state.timer, after_s=0), Close(round=state.round - 1, sites=state.closing))

    def _patient(self, state: BufferedState) -> Step:
        """Sets the timer anew."""
        later = replace(state, timers=state.timers + 1)
        stop = (SetTimer(name=state.timer, after_s=0),) if state.timers else ()
        return later, (*stop, SetTimer(name=later.timer, after_s=self.options.deadline))

    def _settle(self, state: BufferedState) -> Step:
        """Close a round whose buffer is full; give up where it cannot fill any more."""
        if state.phase is not Phase.TRAINING or state.is_closing:
            return state, ()
        if len(state.buffer) >= self.options.k:
            return self._close(state)
        if len(state.buffer) + len(state.out) >= self.options.k:
            return state, ()
        return self._give_up(state, "no more can come", instead="lower k")

    def _close(self, state: BufferedState) -> Step:
        """Combine what is in; what is out goes on in the next round, which is open from now on."""
        number, is_last = state.round, state.round == state.num_rounds
        close = Close(round=number, sites=state.buffer)
        most = self.options.max_staleness
        kept = () if is_last else tuple(out for out in state.out if number - out.base_version <= most)
        late = tuple(out.site for out in state.out if out not in kept)
        why = "the run is over" if is_last else f"it began more than {most} versions ago"
        stopped = (SetTimer(name=state.timer, after_s=0), *self._cancelled(number, late, why), close)
        state = replace(state, round=number + 1, closing=state.buffer, buffer=(), failed=(), out=kept)
        if is_last:
            return state, stopped
        state = _with_terms(state)
        return state, (*stopped, _dispatch(state, carried=tuple(out.site for out in kept)))

    def _committed(self, state: BufferedState, event: Committed) -> Step:
        if not state.closing or event.round != state.round - 1:
            return state, ()
        state = replace(state, version=event.version, closing=(), awaited=())
        if event.round == state.num_rounds:
            return replace(state, phase=Phase.OVER), (Stop(),)
        state, begun = self._begin(state)
        state, settled = self._settle(state)
        return state, (*begun, *settled)

    def _cancelled(self, number: int, sites: tuple[str, ...], reason: str) -> tuple[Action, ...]:
        return (Cancel(round=number, sites=sites, reason=reason),) if sites else ()

    def _timer_fired(self, state: BufferedState, event: TimerFired) -> Step:
        if state.phase is Phase.TRAINING and event.name == state.timer:
            return self._give_up(state, f"nothing came for {self.options.deadline:g} s", instead="raise deadline")
        return state, ()

    def _give_up(self, state: BufferedState, why: str, *, instead: str) -> Step:
        missing = [*(f"{out.site} (no update yet)" for out in state.out), *(f"{s} ({r})" for s, r in state.failed)]
        reason = (
            f"round {state.round} has {len(state.buffer)} of {self.options.k} updates and {why}; missing: "
            f"{', '.join(missing) or 'nobody'}; put right what keeps them and submit again, or {instead} in the job's "
            "schedule"
        )
        return replace(state, phase=Phase.OVER), (GiveUp(reason=reason),)


def _dispatch(state: BufferedState, *, sites: tuple[str, ...] = (), carried: tuple[str, ...] = ()) -> Dispatch:
    return Dispatch(
        round=state.round,
        base_version=state.round - 1,  # every round makes one version
        sites=tuple(sorted(sites)),
        max_weight=state.max_weight,
        num_sites=state.room,
        carried=carried,
    )


def _with_terms(state: BufferedState) -> BufferedState:
    """With terms for the sum of the open round, in which nothing is yet: all that are here or under way fit."""
    weights = {**dict(state.members), **{out.site: out.max_weight for out in state.out}}
    return replace(state, room=max(len(weights), state.room), max_weight=max([state.max_weight, *weights.values()]))


def _sorted(out: tuple[Out, ...]) -> tuple[Out, ...]:
    return tuple(sorted(out, key=lambda one: one.site))


def _with(sites: tuple[str, ...], site: str) -> tuple[str, ...]:
    return tuple(sorted({*sites, site}))
