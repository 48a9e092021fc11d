"""Weight transfer: one site after the other, each from the version that the one before it made.

::

    GATHERING --Ready, enough members--> TRAINING --the one update in--> CLOSING --Committed--> TRAINING (next site)
        ^                                  | ^ `--failed, or deadline: skipped, the next one is asked--'   `--> OVER (Stop)
        |                                  | `--its update lost before the commit: asked again--'
        `--nobody is there: wait one deadline  `--a whole lap without an update--> OVER (GiveUp)

Invariants: one site has a task at any time, and a version mixes one update. A lap asks each site once, in an order that
is fixed when it begins; who joins meanwhile is in the next lap. Equal events give equal states and actions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal

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
from atoll.aggregation.schedules.members import Members, Membership
from atoll.aggregation.schedules.sampling import lot
from atoll.wire.job import Seconds, SiteName, Strict


class Phase(Enum):
    GATHERING = "gathering"
    TRAINING = "training"
    CLOSING = "closing"
    OVER = "over"


@dataclass(frozen=True, slots=True, kw_only=True)
class CyclicState:
    """Plain values. `members` are sorted; `lap` holds whose turn is still to come, in order."""

    num_rounds: int
    seed: int
    phase: Phase = Phase.GATHERING
    ready: bool = False
    round: int = 0
    version: int = 0
    members: Members = ()
    num_laps: int = 0  # begun
    lap: tuple[str, ...] = ()
    site: str = ""  # whose turn it is, or was last
    max_weight: int = 1  # of its update
    skipped: tuple[tuple[str, str], ...] = ()  # (site, reason) since the last update, in order
    timers: int = 0  # times that the timer was set: each setting has a name of its own

    @property
    def is_over(self) -> bool:
        return self.phase is Phase.OVER

    def ended(self) -> CyclicState:
        return replace(self, phase=Phase.OVER)

    @property
    def timer(self) -> str:
        return f"turn/{self.timers}"


Step = tuple[CyclicState, Sequence[Action]]


class Cyclic(Membership[CyclicState]):
    """Cyclical weight transfer: each site trains the version that the one before it made.

    (Chang et al. 2018, doi:10.1093/jamia/ocy017, J. Am. Med. Inform. Assoc. 25(8), 945-954.) A round is one site's turn.
    A site that fails, or whose update is not in at the deadline, is skipped in this lap and the next one starts from the
    same version; the run gives up where a whole lap brings no update.
    """

    class Options(Strict):
        order: Literal["name", "random", "given"] = (
            "name"  # of a lap: random draws a new one each lap; given: as `sites`
        )
        sites: tuple[SiteName, ...] = Field(default=(), max_length=100_000)  # only these; all members where absent
        min: int = Field(default=2, ge=1, le=1_000_000)  # members without which the run does not start
        deadline: Seconds = 600.0  # of one turn

        @model_validator(mode="after")
        def _order_is_given(self) -> Cyclic.Options:
            if self.order == "given" and not self.sites:
                raise ValueError('order = "given" needs sites, in that order')
            if len(set(self.sites)) < len(self.sites):
                raise ValueError("sites names one twice; a lap asks each site once")
            if self.sites and len(self.sites) < self.min:
                raise ValueError(f"sites names {len(self.sites)}, fewer than min ({self.min})")
            return self

    def __init__(self, options: Options) -> None:
        self.name = "cyclic"
        self.options = options

    @property
    def min_sites(self) -> int:
        return self.options.min

    @property
    def fewest_updates(self) -> int:
        return 1

    @property
    def fixed(self) -> Mapping[str, object]:
        """By option, what has to be the same in all rounds of a run."""
        return {"sites": self.options.sites}  # who is offered the run

    @property
    def draws(self) -> bool:
        """Whether a round may close without some of the members."""
        return True

    def takes(self, site: str, labels: Mapping[str, str]) -> bool:
        """Whether this site can be asked."""
        return not self.options.sites or site in self.options.sites

    def init(self, *, num_rounds: int, seed: int) -> CyclicState:
        return CyclicState(num_rounds=num_rounds, seed=seed)

    def init_after(self, round: int, version: int, *, num_rounds: int, seed: int) -> CyclicState:
        """As `init`, with a new lap: whose turn it was in the old one is not known."""
        return replace(self.init(num_rounds=num_rounds, seed=seed), round=round, version=version, num_laps=round)

    # --- members ----------------------------------------------------------------------------------------------------

    def _takes(self, event: Joined) -> bool:
        return self.takes(event.site, event.labels)

    def _joined(self, state: CyclicState, event: Joined) -> Step:
        if state.phase is Phase.GATHERING and state.ready and (state.round > 0 or self._enough(state)):
            return self._start(state)
        return state, ()  # a site whose turn it is may come back with its update until the deadline

    def _left(self, state: CyclicState, event: Left) -> Step:
        return state, ()

    # --- turns ------------------------------------------------------------------------------------------------------

    def _start(self, state: CyclicState) -> Step:
        """The next round: the next turn, in a new lap where this one is over."""
        return self._turn(replace(state, round=state.round + 1, skipped=()))

    def _turn(self, state: CyclicState) -> Step:
        """Ask the next site of the lap that is here; the others are passed over."""
        weights = dict(state.members)
        if not weights:
            return self._wait_for_members(state)
        skipped = dict(state.skipped)
        if weights.keys() <= skipped.keys():
            return self._give_up(state)
        if not any(site in weights for site in state.lap):
            state = replace(state, num_laps=state.num_laps + 1)
            state = replace(state, lap=self._order(state))
        while state.lap[0] not in weights:
            state = replace(state, lap=state.lap[1:])
        site, *rest = state.lap
        state = replace(state, phase=Phase.TRAINING, site=site, max_weight=weights[site], lap=tuple(rest))
        state, timer = self._timed(state)
        return state, (_dispatch(state), *timer)

    def _order(self, state: CyclicState) -> tuple[str, ...]:
        names = [site for site, _ in state.members]
        match self.options.order:
            case "name":
                return tuple(sorted(names))
            case "random":
                return tuple(sorted(names, key=lambda site: lot(state.seed, state.num_laps, site)))
            case "given":
                return tuple(site for site in self.options.sites if site in names)

    def _skip(self, state: CyclicState, reason: str) -> Step:
        return self._turn(replace(state, skipped=(*state.skipped, (state.site, reason))))

    def _accepted(self, state: CyclicState, event: Accepted) -> Step:
        if state.phase is not Phase.TRAINING or (event.round, event.site) != (state.round, state.site):
            return state, ()
        stop = SetTimer(name=state.timer, after_s=0)
        return replace(state, phase=Phase.CLOSING), (stop, Close(round=state.round, sites=(state.site,)))

    def _failed(self, state: CyclicState, event: Failed) -> Step:
        if (event.round, event.site) != (state.round, state.site):
            return state, ()
        if state.phase is Phase.CLOSING:  # its update was lost before the commit
            state, timer = self._timed(replace(state, phase=Phase.TRAINING))
            here = state.site in dict(state.members)
            return state, (*((_dispatch(state),) if here else ()), *timer)
        if state.phase is not Phase.TRAINING:
            return state, ()
        return self._skip(state, event.reason)

    def _timer_fired(self, state: CyclicState, event: TimerFired) -> Step:
        if event.name != state.timer:
            return state, ()
        if state.phase is Phase.GATHERING:
            return self._nobody(state)
        if state.phase is not Phase.TRAINING:
            return state, ()
        here = state.site in dict(state.members)
        why = f"no update within {self.options.deadline:g} s" if here else "gone"
        late = Cancel(round=state.round, sites=(state.site,), reason=f"its turn is over: {why}")
        state, actions = self._skip(state, why)
        return state, (late, *actions)

    def _timed(self, state: CyclicState) -> Step:
        """Sets the timer anew."""
        later = replace(state, timers=state.timers + 1)
        stop = (SetTimer(name=state.timer, after_s=0),) if state.timers else ()
        return later, (*stop, SetTimer(name=later.timer, after_s=self.options.deadline))

    # --- between turns, and the end ---------------------------------------------------------------------------------

    def _committed(self, state: CyclicState, event: Committed) -> Step:
        if state.phase is not Phase.CLOSING or event.round != state.round:
            return state, ()
        state = replace(state, version=event.version)
        if state.round >= state.num_rounds:
            return state.ended(), (Stop(),)
        return self._start(state)

    def _wait_for_members(self, state: CyclicState) -> Step:
        """Nobody is there: the first to come within one deadline goes on."""
        waiting = replace(state, phase=Phase.GATHERING, round=state.round - 1)
        return self._timed(waiting)

    def _nobody(self, state: CyclicState) -> Step:
        reason = (
            f"round {state.round + 1} has nobody to ask: every site is gone, and none came back for "
            f"{self.options.deadline:g} s; start the sites again and submit again"
        )
        return state.ended(), (GiveUp(reason=reason),)

    def _give_up(self, state: CyclicState) -> Step:
        names = "; ".join(f"{site}: {reason}" for site, reason in state.skipped)
        reason = (
            f"round {state.round} found no site whose update comes, in a whole lap; skipped: {names}; put right what "
            "keeps them and submit again, or raise deadline in the job's schedule"
        )
        return state.ended(), (GiveUp(reason=reason),)


def _dispatch(state: CyclicState) -> Dispatch:
    return Dispatch(
        round=state.round,
        base_version=state.version,
        sites=(state.site,),
        max_weight=state.max_weight,
        num_sites=1,  # however many were asked before it: the sum holds one update
    )
