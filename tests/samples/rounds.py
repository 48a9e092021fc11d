"""What tests of the schedule `rounds` tell it, and what they hear."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from atoll.aggregation.parts import build
from atoll.aggregation.schedule import (
    Accepted,
    Action,
    Close,
    Committed,
    Dispatch,
    Event,
    Failed,
    Joined,
    Left,
    Ready,
    SetTimer,
    TimerFired,
)
from atoll.aggregation.schedules.rounds import Rounds, RoundsState

S = 600.0  # the default deadline, seconds


def rounds(**options: Any) -> Rounds:
    made: Rounds = build("schedule", "rounds", options)
    return made


def joined(*sites: str, max_weight: int = 10) -> list[Event]:
    return [Joined(site=site, max_weight=max_weight, labels={}) for site in sites]


def accepted(*sites: str, round: int = 1, weight: int = 5) -> list[Event]:
    return [Accepted(site=site, round=round, base_version=round - 1, weight=weight) for site in sites]


def failed(site: str, round: int = 1, reason: str = "out of memory") -> Event:
    return Failed(site=site, round=round, reason=reason)


def left(site: str) -> Event:
    return Left(site=site, reason="lease ran out")


def fired(round: int = 1) -> Event:
    return TimerFired(name=f"deadline/{round}")


def committed(round: int) -> Event:
    return Committed(round=round, version=round)


ADVICE = "; start the others again, or lower min in the job's schedule"
QUORUM_ADVICE = "; put right what keeps them and submit again, or lower the quorum of the schedule"
READY = Ready()


def play(
    schedule: Rounds, events: Sequence[Event], *, num_rounds: int = 3, seed: int = 0
) -> tuple[RoundsState, list[tuple[Action, ...]]]:
    """The last state, and the actions after each event."""
    state, actions = schedule.init(num_rounds=num_rounds, seed=seed), []
    for event in events:
        state, wanted = schedule.on(state, event)
        actions.append(tuple(wanted))
    return state, actions


def after(schedule: Rounds, events: Sequence[Event], *, num_rounds: int = 3) -> tuple[Action, ...]:
    """What the last event led to."""
    return play(schedule, events, num_rounds=num_rounds)[1][-1]


def dispatch(*sites: str, round: int = 1, max_weight: int = 10) -> Dispatch:
    return Dispatch(round=round, base_version=round - 1, sites=sites, max_weight=max_weight)


def deadline(round: int = 1, after_s: float = S) -> SetTimer:
    return SetTimer(name=f"deadline/{round}", after_s=after_s)


def close(*sites: str, round: int = 1) -> Close:
    return Close(round=round, sites=sites)
