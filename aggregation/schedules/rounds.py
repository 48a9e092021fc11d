"""Synchronous rounds: sample a cohort, wait for it or for its quorum, combine, go on.

::

    GATHERING --Ready, enough members--> TRAINING --all in, or quorum at the deadline--> CLOSING
        ^                                   ^  `--too few--> OVER (GiveUp)                  |
        |                                   `------update lost before its commit------------|
        `------too few members------- Committed --next round--> TRAINING, or OVER (Stop) <--'

Invariant: every wait is bounded by the deadline, and every end names its reason. Equal events give equal states and
actions: the cohort of a round is a function of seed, round and members.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Annotated, Literal

from pydantic import Field, StringConstraints, model_validator

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
from atoll.aggregation.schedules.sampling import Chance, draw
from atoll.wire.job import Seconds, Strict

LabelText = Annotated[str, StringConstraints(min_length=1, max_length=63)]  # a label of a site, or its value


class Phase(Enum):
    GATHERING = "gathering"
    TRAINING = "training"
    CLOSING = "closing"
    OVER = "over"


class Standing(Enum):
    """Where a member of the cohort stands in the round."""

    ASKED = "no update yet"
    GONE = "gone"  # not waited for once the quorum is there; may come back until the deadline
    IN = "accepted"
    FAILED = "failed"
    LATE = "too late"  # its task was taken back when the round closed


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One member of the cohort. `reason` where it is gone or failed."""

    site: str
    max_weight: int
    standing: Standing = Standing.ASKED
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundsState:
    """Plain values. `members` are (site, max_weight), sorted; `cohort` is sorted by site."""

    num_rounds: int
    seed: int
    phase: Phase = Phase.GATHERING
    ready: bool = False
    round: int = 0
    version: int = 0
    members: tuple[tuple[str, int], ...] = ()
    cohort: tuple[Place, ...] = ()
    target: int = 0  # updates with which the round closes at once; fewer than the cohort where more were asked
    missed: tuple[tuple[str, int], ...] = ()  # (site, rounds in a row without its update), sorted; sample = available

    @property
    def is_over(self) -> bool:
        return self.phase is Phase.OVER

    def ended(self) -> RoundsState:
        return replace(self, phase=Phase.OVER)

    def those(self, standing: Standing) -> tuple[str, ...]:
        """Sites of the cohort that stand so, sorted."""
        return tuple(place.site for place in self.cohort if place.standing is standing)


Step = tuple[RoundsState, Sequence[Action]]


class Rounds(Membership[RoundsState]):
    """Synchronous rounds over a sample of the members, closed at a quorum when the deadline comes.

    Cohort: max(min, fraction of members), drawn anew each round (McMahan et al. 2016, arXiv:1602.05629, algorithm 1),
    and `over` times as many asked (Bonawitz et al. 2019, arXiv:1902.01046, section 2.2), of which the first to come
    count. A round closes when as many updates as are wanted are in; when nobody is left to wait for and the quorum is
    met; or at the deadline with the quorum. Without the quorum the run gives up and names who is missing.
    """

    class Options(Strict):
        fraction: float = Field(default=1.0, gt=0, le=1)  # of the members, rounded up
        min: int = Field(default=2, ge=1, le=1_000_000)  # members without which no round starts
        quorum: int | None = Field(default=None, ge=1)  # updates that suffice; the whole cohort where absent
        deadline: Seconds = 600.0  # from dispatch
        sample: Literal["uniform", "weight", "available"] = "uniform"  # how the cohort is drawn
        where: dict[LabelText, LabelText] = Field(
            default={}, max_length=32
        )  # labels that a site must have, all of them
        over: float = Field(default=1.0, ge=1, le=10)  # times as many sites asked as are wanted

        @model_validator(mode="after")
        def _quorum_can_be_met(self) -> Rounds.Options:
            if self.quorum is not None and self.quorum > self.min:
                raise ValueError(f"quorum is at most min ({self.min}), else a round could start that can never close")
            return self

    def __init__(self, options: Options) -> None:
        self.name = "rounds"
        self.options = options

    @property
    def min_sites(self) -> int:
        return self.options.min

    @property
    def fewest_updates(self) -> int:
        return self.options.quorum or self.options.min

    def takes(self, site: str, labels: Mapping[str, str]) -> bool:
        """Whether a site of this name and labels can be asked."""
        return all(labels.get(name) == value for name, value in self.options.where.items())

    @property
    def fixed(self) -> Mapping[str, object]:
        """By option, what has to be the same in all rounds of a run."""
        return {"where": self.options.where}  # who is offered the run

    @property
    def draws(self) -> bool:
        """Whether a round may close without some of the members."""
        return self.options.fraction < 1 or self.options.over > 1

    def init(self, *, num_rounds: int, seed: int) -> RoundsState:
        return RoundsState(num_rounds=num_rounds, seed=seed)

    def init_after(self, round: int, version: int, *, num_rounds: int, seed: int) -> RoundsState:
        return replace(self.init(num_rounds=num_rounds, seed=seed), round=round, version=version)

    # --- members ----------------------------------------------------------------------------------------------------

    def _takes(self, event: Joined) -> bool:
        return self.takes(event.site, event.labels)

    def _joined(self, state: RoundsState, event: Joined) -> Step:
        if state.phase is Phase.TRAINING and event.site in state.those(Standing.GONE):
            return _standing(state, event.site, Standing.ASKED), ()
        return (
            self._start(state)
            if state.phase is Phase.GATHERING and state.ready and self._enough(state)
            else (state, ())
        )

    def _left(self, state: RoundsState, event: Left) -> Step:
        if event.site not in state.those(Standing.ASKED):
            return state, ()
        return self._settle(_standing(state, event.site, Standing.GONE, event.reason))

    def _who_waits(self, state: RoundsState) -> str:
        return f"round {state.round + 1}"

    # --- one round --------------------------------------------------------------------------------------------------

    def _start(self, state: RoundsState) -> Step:
        """Dispatch the next round to a fresh cohort."""
        round_ = state.round + 1
        waited = state.phase is Phase.GATHERING and state.round > 0
        wanted = max(self.options.min, share(self.options.fraction, len(state.members)))
        asked = share(self.options.over, wanted)
        drawn = draw(state.members, asked, seed=state.seed, round_=round_, chance=self._chance(state))
        cohort = tuple(Place(site=site, max_weight=max_weight) for site, max_weight in drawn)
        state = replace(state, phase=Phase.TRAINING, round=round_, cohort=cohort, target=min(wanted, len(cohort)))
        actions: list[Action] = [
            _dispatch(state, tuple(place.site for place in cohort)),
            SetTimer(name=_deadline(round_), after_s=self.options.deadline),
        ]
        if waited:
            actions.append(SetTimer(name=_members_timer(round_), after_s=0))
        return state, actions

    def _chance(self, state: RoundsState) -> Chance | None:
        """How likely a site is drawn, where not all are alike."""
        match self.options.sample:
            case "uniform":
                return None
            case "weight":
                return lambda site, max_weight: float(max_weight)
            case "available":
                missed = dict(state.missed)
                return lambda site, max_weight: 1.0 / (1 + missed.get(site, 0))

    def _accepted(self, state: RoundsState, event: Accepted) -> Step:
        # A site that had gone, or whose failure was told before, is welcome as long as the round is open.
        if state.phase is not Phase.TRAINING or event.round != state.round or not _asked(state, event.site):
            return state, ()
        return self._settle(_standing(state, event.site, Standing.IN))

    def _failed(self, state: RoundsState, event: Failed) -> Step:
        if event.round != state.round or state.phase not in (Phase.TRAINING, Phase.CLOSING):
            return state, ()
        if event.site in state.those(Standing.IN):
            return self._lost(state, event)
        if not _asked(state, event.site) or state.phase is Phase.CLOSING:
            return state, ()
        return self._settle(_standing(state, event.site, Standing.FAILED, event.reason))

    def _lost(self, state: RoundsState, event: Failed) -> Step:
        """An accepted update is gone before its commit: the round opens again and the site is asked once more."""
        again = replace(state, phase=Phase.TRAINING)
        if event.site not in (site for site, _ in state.members):
            again = _standing(again, event.site, Standing.GONE, event.reason)
            state, actions = self._settle(again)
            if state.phase is Phase.TRAINING:
                actions = (*actions, SetTimer(name=_deadline(state.round), after_s=self.options.deadline))
            return state, actions
        again = _standing(again, event.site, Standing.ASKED)
        timer = SetTimer(name=_deadline(state.round), after_s=self.options.deadline)
        return again, (_dispatch(again, (event.site,)), timer)

    def _settle(self, state: RoundsState) -> Step:
        """Close where as many updates are in as are wanted; close or give up where nobody is left to wait for."""
        if state.phase is not Phase.TRAINING:
            return state, ()
        if len(state.those(Standing.IN)) >= state.target:
            return self._close(state)
        if state.those(Standing.ASKED):
            return state, ()
        if self._met(state):
            return self._close(state)
        # Short of the quorum: those who are gone may come back until the deadline, those who failed will not.
        return (state, ()) if self._within_reach(state) else self._give_up(state)

    def _timer_fired(self, state: RoundsState, event: TimerFired) -> Step:
        if state.phase is Phase.TRAINING and event.name == _deadline(state.round):
            return self._close(state) if self._met(state) else self._give_up(state)
        if state.phase is Phase.GATHERING and event.name == _members_timer(state.round + 1):
            return self._too_few(state)
        return state, ()

    def _quorum(self, state: RoundsState) -> int:
        return self.options.quorum or state.target

    def _met(self, state: RoundsState) -> bool:
        return len(state.those(Standing.IN)) >= self._quorum(state)

    def _within_reach(self, state: RoundsState) -> bool:
        possible = len(state.those(Standing.IN)) + len(state.those(Standing.GONE))
        return possible >= self._quorum(state)

    def _close(self, state: RoundsState) -> Step:
        late = state.those(Standing.ASKED) + state.those(Standing.GONE)
        actions: list[Action] = [SetTimer(name=_deadline(state.round), after_s=0)]
        if late:
            reason = f"round {state.round} closed with {len(state.those(Standing.IN))} updates"
            actions.append(Cancel(round=state.round, sites=tuple(sorted(late)), reason=reason))
        actions.append(Close(round=state.round, sites=state.those(Standing.IN)))
        for site in late:
            state = _standing(state, site, Standing.LATE)
        return replace(state, phase=Phase.CLOSING), actions

    def _missed(self, state: RoundsState) -> tuple[tuple[str, int], ...]:
        """Rounds in a row without a site's update, after this one."""
        if self.options.sample != "available":
            return ()
        missed = dict(state.missed)
        for place in state.cohort:
            before = missed.pop(place.site, 0)
            if place.standing is not Standing.IN:
                missed[place.site] = before + 1
        return tuple(sorted(missed.items()))

    def _give_up(self, state: RoundsState) -> Step:
        missing = [place for place in state.cohort if place.standing is not Standing.IN]
        names = "; ".join(f"{p.site}: {p.standing.value}{f' ({p.reason})' if p.reason else ''}" for p in missing)
        reason = (
            f"round {state.round} has {len(state.those(Standing.IN))} of the {self._quorum(state)} updates that it "
            f"needs; missing: {names}; put right what keeps them and submit again, or lower the quorum of the schedule"
        )
        return replace(state, phase=Phase.OVER), (GiveUp(reason=reason),)

    # --- between rounds ---------------------------------------------------------------------------------------------

    def _committed(self, state: RoundsState, event: Committed) -> Step:
        if state.phase is not Phase.CLOSING or event.round != state.round:
            return state, ()
        state = replace(state, version=event.version, missed=self._missed(state), cohort=())
        if state.round >= state.num_rounds:
            return replace(state, phase=Phase.OVER), (Stop(),)
        if self._enough(state):
            return self._start(state)
        timer = SetTimer(name=_members_timer(state.round + 1), after_s=self.options.deadline)
        return replace(state, phase=Phase.GATHERING), (timer,)


def _deadline(round_: int) -> str:
    return f"deadline/{round_}"


def _members_timer(round_: int) -> str:
    return f"members/{round_}"


def share(fraction: float, num_members: int) -> int:
    """Rounded up, but 0.7 of 10 are 7: the product's last digit does not count."""
    return math.ceil(fraction * num_members - 1e-9)


def _asked(state: RoundsState, site: str) -> bool:
    return any(place.site == site for place in state.cohort)


def _standing(state: RoundsState, site: str, standing: Standing, reason: str = "") -> RoundsState:
    cohort = tuple(
        replace(place, standing=standing, reason=reason) if place.site == site else place for place in state.cohort
    )
    return replace(state, cohort=cohort)


def _dispatch(state: RoundsState, sites: tuple[str, ...]) -> Dispatch:
    return Dispatch(
        round=state.round,
        base_version=state.version,
        sites=sites,
        max_weight=max(place.max_weight for place in state.cohort),
    )
