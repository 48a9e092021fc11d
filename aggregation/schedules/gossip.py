"""Decentralised averaging: every site trains its own model and mixes it with its neighbours' (docs/decisions/0012).

::

    GATHERING --Ready, enough--> TRAINING --all in, or enough at the deadline--> EXCHANGING
        ^                          ^  `--too few--> OVER (GiveUp)                     | every pair settled, or deadline
        |                          |------------ round without a version -------------|
        |                          |                                                  v
        `--too few members-- Committed <-- CLOSING <--all in, or enough-- COLLECTING (every `every` rounds, and the last)

Invariants: every wait is bounded by the deadline; two sites mix only where both hold the other's model; equal events
give equal states, weights and actions. The graph is drawn over those that trained in the round, so equal survivors mix
equally.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal

from pydantic import Field, field_validator

from atoll.aggregation.graphs import metropolis, pairs
from atoll.aggregation.schedule import (
    Accepted,
    Action,
    Cancel,
    Close,
    Committed,
    Dispatch,
    Event,
    Failed,
    GiveUp,
    GossipEvent,
    Introduce,
    Joined,
    Left,
    Met,
    ModelLost,
    Ready,
    SetTimer,
    Stop,
    TimerFired,
    Trained,
    TrainOwn,
)
from atoll.aggregation.schedules.links import Link, Tried, links_of
from atoll.aggregation.schedules.rounds import Place, Standing
from atoll.wire.job import Label, Seconds, SiteName, Strict

ZONE = "zone"  # the label by which a site declares its zone


class Phase(Enum):
    GATHERING = "gathering"
    TRAINING = "training"
    EXCHANGING = "exchanging"
    COLLECTING = "collecting"
    CLOSING = "closing"
    OVER = "over"


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What a site's next training begins with: the models of `round` by these weights, its own among them, by name."""

    site: str
    round: int
    shares: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GossipState:
    """Plain values, sorted by site. `cohort` is who was asked in the present phase, to train or to be collected."""

    num_rounds: int
    phase: Phase = Phase.GATHERING
    ready: bool = False
    round: int = 0
    version: int = 0
    members: tuple[str, ...] = ()
    cohort: tuple[Place, ...] = ()
    links: tuple[Link, ...] = ()
    tried: tuple[Tried, ...] = ()  # pairs of which not every way works
    starts: tuple[Start, ...] = ()

    def those(self, *standings: Standing) -> tuple[str, ...]:
        """Sites of the cohort that stand so, sorted."""
        return tuple(place.site for place in self.cohort if place.standing in standings)

    def start_of(self, site: str) -> Start | None:
        """What the site's next task begins with; None where it begins with a version."""
        return next((start for start in self.starts if start.site == site), None)


Step = tuple[GossipState, Sequence[Action]]


class Gossip:
    """Sites of one zone train and mix with their neighbours in a graph, directly; versions are means of their models.

    D-PSGD (Lian et al. 2017, arXiv:1705.09056) in the order of its section 4, remark: train, then mix; with the weights
    of Metropolis-Hastings (Xiao and Boyd 2004). Sites have to accept the zone in their policies.
    """

    class Options(Strict):
        zone: Label  # label "zone" of the sites that take part, which their policies have to accept
        graph: Literal["ring", "complete", "exponential", "torus"] | tuple[tuple[SiteName, SiteName], ...] = "ring"
        every: int | None = Field(default=None, ge=1)  # rounds from version to version; one after the last where absent
        min: int = Field(default=2, ge=2, le=1_000_000)  # sites without which no round goes on
        deadline: Seconds = 600.0  # for each of training, exchange and collection

        @field_validator("graph")
        @classmethod
        def _of_two_sites(cls, graph: str | tuple[tuple[str, str], ...]) -> str | tuple[tuple[str, str], ...]:
            if not isinstance(graph, str):
                if not graph:
                    raise ValueError("a list of pairs has one at least")
                if loops := [a for a, b in graph if a == b]:
                    raise ValueError(f"{loops[0]} is paired with itself")
            return graph

    def __init__(self, options: Options) -> None:
        self.name = "gossip"
        self.options = options

    @property
    def min_sites(self) -> int:
        return self.options.min

    @property
    def fewest_updates(self) -> int:
        return self.options.min

    def init(self, *, num_rounds: int, seed: int) -> GossipState:
        return GossipState(num_rounds=num_rounds)

    def on(self, state: GossipState, event: Event | GossipEvent) -> Step:
        """The state after `event` and what is to be done; events that do not matter change nothing."""
        if state.phase is Phase.OVER:
            return state, ()
        match event:
            case Joined():
                return self._joined(state, event)
            case Left():
                return self._left(state, event)
            case Ready() if not state.ready:
                return self._begin(replace(state, ready=True))
            case Trained():
                return self._in(state, event.site, event.round, Phase.TRAINING)
            case Accepted():
                return self._in(state, event.site, event.round, Phase.COLLECTING)
            case Failed():
                return self._failed(state, event)
            case ModelLost():
                return self._model_lost(state, event)
            case Met():
                return self._met(state, event)
            case TimerFired():
                return self._timer_fired(state, event)
            case Committed() if state.phase is Phase.CLOSING and event.round == state.round:
                return self._next(replace(state, version=event.version))
            case _:
                return state, ()

    # --- members ----------------------------------------------------------------------------------------------------

    def _joined(self, state: GossipState, event: Joined) -> Step:
        if event.labels.get(ZONE) != self.options.zone:
            return state, ()
        known = tuple(tried for tried in state.tried if event.site not in tried.pair)  # it may have moved
        state = replace(state, members=tuple(sorted({*state.members, event.site})), tried=known)
        if event.site in state.those(Standing.GONE):
            return _standing(state, event.site, Standing.ASKED), ()
        return self._begin(state) if state.phase is Phase.GATHERING and self._enough(state) else (state, ())

    def _left(self, state: GossipState, event: Left) -> Step:
        state = replace(state, members=tuple(site for site in state.members if site != event.site))
        if event.site in state.those(Standing.ASKED):
            state = _standing(state, event.site, Standing.GONE, event.reason)
        links = tuple(link.given_up() if event.site in link.pair else link for link in state.links)
        return self._settle(replace(state, links=links))

    def _enough(self, state: GossipState) -> bool:
        return len(state.members) >= self.options.min

    # --- a round ----------------------------------------------------------------------------------------------------

    def _begin(self, state: GossipState) -> Step:
        """The training of the next round."""
        if not state.ready:
            return state, ()
        if not self._enough(state):
            return self._too_few(state)
        round_ = state.round + 1
        waited = SetTimer(name=_timer("members", round_), after_s=0)
        actions: tuple[Action, ...] = (waited,) if state.phase is Phase.GATHERING and state.round else ()
        state = _asking(replace(state, phase=Phase.TRAINING, round=round_, links=()), state.members)
        train = TrainOwn(round=round_, base_version=state.version, sites=state.members)
        return state, (train, self._deadline(state), *actions)

    def _in(self, state: GossipState, site: str, round_: int, phase: Phase) -> Step:
        """A site has trained, or its update is in."""
        asked = (Standing.ASKED, Standing.GONE, Standing.FAILED)
        if (state.phase, state.round) != (phase, round_) or site not in state.those(*asked):
            return state, ()
        return self._settle(_standing(state, site, Standing.IN))

    def _failed(self, state: GossipState, event: Failed) -> Step:
        if event.round != state.round or state.phase not in (Phase.TRAINING, Phase.COLLECTING, Phase.CLOSING):
            return state, ()
        if state.phase is not Phase.TRAINING and event.site in state.those(Standing.IN):
            return self._update_lost(state, event)
        if event.site not in state.those(Standing.ASKED, Standing.GONE) or state.phase is Phase.CLOSING:
            return state, ()
        return self._settle(_standing(state, event.site, Standing.FAILED, event.reason))

    def _update_lost(self, state: GossipState, event: Failed) -> Step:
        """An accepted update is gone before its commit: the collection opens again, and the site is asked once more."""
        here = event.site in state.members
        state = _standing(state, event.site, Standing.ASKED if here else Standing.GONE, event.reason)
        state = replace(state, phase=Phase.COLLECTING)
        if not here:
            state, actions = self._settle(state)
            return state, actions if state.phase is not Phase.COLLECTING else (*actions, self._deadline(state))
        return state, (_dispatch(state, (event.site,)), self._deadline(state))

    def _settle(self, state: GossipState, *, at_deadline: bool = False) -> Step:
        """Go on where nobody is left to wait for, or no time."""
        if state.phase is Phase.EXCHANGING:
            over = all(link.over for link in state.links)
            return self._mix(state) if over or at_deadline else (state, ())
        if state.phase not in (Phase.TRAINING, Phase.COLLECTING) or (state.those(Standing.ASKED) and not at_deadline):
            return state, ()
        num_in = len(state.those(Standing.IN))
        if num_in < self.options.min:
            within_reach = num_in + len(state.those(Standing.GONE)) >= self.options.min
            return (state, ()) if within_reach and not at_deadline else self._give_up(state)
        late = tuple(sorted(state.those(Standing.ASKED, Standing.GONE)))
        reason = f"round {state.round} goes on with {num_in} sites"
        cancel = [Cancel(round=state.round, sites=late, reason=reason)] if late else []
        done = SetTimer(name=self._deadline(state).name, after_s=0)
        state, actions = self._exchange(state) if state.phase is Phase.TRAINING else self._close(state)
        return state, (done, *cancel, *actions)

    def _exchange(self, state: GossipState) -> Step:
        links = links_of(pairs(self.options.graph, state.those(Standing.IN)), state.tried)
        state = replace(state, phase=Phase.EXCHANGING, links=links)
        if not links:
            return self._mix(state)
        return state, (self._deadline(state), Introduce(round=state.round))

    def _met(self, state: GossipState, event: Met) -> Step:
        if state.phase is not Phase.EXCHANGING or event.round != state.round:
            return state, ()
        pair = tuple(sorted((event.site, event.peer)))
        links = tuple(link.heard(event) if link.pair == pair else link for link in state.links)
        if links == state.links:
            return state, ()
        moved = any(new.tried != old.tried for new, old in zip(links, state.links, strict=True))
        state = _remembering(replace(state, links=links))
        if moved:
            return state, (Introduce(round=state.round),)
        return self._settle(state)

    def _model_lost(self, state: GossipState, event: ModelLost) -> Step:
        """A site begins with a version again; where it was exchanging that model, nobody mixes it."""
        starts = tuple(start for start in state.starts if (start.site, start.round) != (event.site, event.round))
        state = replace(state, starts=starts)
        if event.round != state.round:
            return state, ()
        if state.phase is Phase.TRAINING and event.site in state.those(Standing.IN):
            return self._settle(_standing(state, event.site, Standing.FAILED, event.reason))
        if state.phase is not Phase.EXCHANGING:
            return state, ()
        links = tuple(link.undone() if event.site in link.pair else link for link in state.links)
        return self._settle(_standing(replace(state, links=links), event.site, Standing.FAILED, event.reason))

    def _mix(self, state: GossipState) -> Step:
        """The weights of the round are what they are from here on."""
        sites = state.those(Standing.IN)
        weights = metropolis(sites, [link.pair for link in state.links if link.met])
        starts = {start.site: start for start in state.starts}
        for site in sites:
            shares = tuple((other, float(weight)) for other, weight in weights[site].items() if weight)
            starts[site] = Start(site=site, round=state.round, shares=shares)
        done = SetTimer(name=self._deadline(state).name, after_s=0)
        links = tuple(link.given_up() for link in state.links)
        state = replace(state, links=links, starts=tuple(starts[site] for site in sorted(starts)))
        state, actions = self._collect(state) if self._gives_version(state) else self._next(state)
        return state, (done, *actions)

    # --- a version --------------------------------------------------------------------------------------------------

    def _gives_version(self, state: GossipState) -> bool:
        last = state.round >= state.num_rounds
        return last or (self.options.every is not None and state.round % self.options.every == 0)

    def _collect(self, state: GossipState) -> Step:
        sites = state.those(Standing.IN)
        state = _asking(replace(state, phase=Phase.COLLECTING), sites)
        for site in sites:
            if site not in state.members:
                state = _standing(state, site, Standing.GONE, "it left during the exchange")
        first = (_dispatch(state, sites), self._deadline(state))
        state, actions = self._settle(state)
        return state, (*first, *actions)

    def _close(self, state: GossipState) -> Step:
        return replace(state, phase=Phase.CLOSING), (Close(round=state.round, sites=state.those(Standing.IN)),)

    def _next(self, state: GossipState) -> Step:
        if state.round >= state.num_rounds:
            return replace(state, phase=Phase.OVER), (Stop(),)
        if self._enough(state):
            return self._begin(state)
        timer = SetTimer(name=_timer("members", state.round + 1), after_s=self.options.deadline)
        return replace(state, phase=Phase.GATHERING), (timer,)

    # --- time, and ends ---------------------------------------------------------------------------------------------

    def _deadline(self, state: GossipState) -> SetTimer:
        return SetTimer(name=_timer(state.phase.value, state.round), after_s=self.options.deadline)

    def _timer_fired(self, state: GossipState, event: TimerFired) -> Step:
        if event.name == _timer(state.phase.value, state.round):
            return self._settle(state, at_deadline=True)
        if state.phase is Phase.GATHERING and event.name == _timer("members", state.round + 1):
            return self._too_few(state)
        return state, ()

    def _too_few(self, state: GossipState) -> Step:
        here = ", ".join(state.members) or "nobody"
        reason = (
            f"round {state.round + 1} needs {self.options.min} sites of zone {self.options.zone!r}, there are "
            f"{len(state.members)}: {here}; start the others again, or lower min in the job's schedule"
        )
        return replace(state, phase=Phase.OVER), (GiveUp(reason=reason),)

    def _give_up(self, state: GossipState) -> Step:
        missing = [place for place in state.cohort if place.standing is not Standing.IN]
        names = "; ".join(f"{p.site}: {p.standing.value}{f' ({p.reason})' if p.reason else ''}" for p in missing)
        reason = (
            f"round {state.round}, {state.phase.value}: {len(state.those(Standing.IN))} of the {self.options.min} sites "
            f"that it needs; missing: {names}; put right what keeps them and submit again, or lower min in the schedule"
        )
        return replace(state, phase=Phase.OVER), (GiveUp(reason=reason),)


def _timer(what: str, round_: int) -> str:
    return f"{what}/{round_}"


def _dispatch(state: GossipState, sites: tuple[str, ...]) -> Dispatch:
    return Dispatch(round=state.round, base_version=state.version, sites=sites, max_weight=1)


def _asking(state: GossipState, sites: Sequence[str]) -> GossipState:
    return replace(state, cohort=tuple(Place(site=site, max_weight=1) for site in sites))


def _standing(state: GossipState, site: str, standing: Standing, reason: str = "") -> GossipState:
    cohort = tuple(
        replace(place, standing=standing, reason=reason) if place.site == site else place for place in state.cohort
    )
    return replace(state, cohort=cohort)


def _remembering(state: GossipState) -> GossipState:
    """The state that knows of later rounds which ways do not work."""
    known = {tried.pair: tried for tried in state.tried}
    known |= {link.pair: link.tried for link in state.links if link.tried.reasons}
    return replace(state, tried=tuple(known[pair] for pair in sorted(known)))
