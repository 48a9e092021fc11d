"""Whatever events come in whatever order, the schedule replays and keeps its word."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from samples.rounds import (
    READY,
    accepted,
    committed,
    failed,
    fired,
    joined,
    left,
    play,
    rounds,
)

from atoll.aggregation.schedule import (
    Cancel,
    Close,
    Dispatch,
    Event,
    GiveUp,
    SetTimer,
    Stop,
    TimerFired,
)
from atoll.aggregation.schedules.rounds import Phase

EVENTS = st.lists(
    st.one_of(
        st.sampled_from([*joined("a", "b", "c", "d"), READY, *map(left, "abcd")]),
        st.sampled_from([event for round in (1, 2, 3) for event in accepted("a", "b", "c", "d", round=round)]),
        st.sampled_from([failed(site, round) for site in "abcd" for round in (1, 2)]),
        st.sampled_from([fired(1), fired(2), TimerFired(name="members/2"), committed(1), committed(2)]),
    ),
    max_size=40,
)
OPTIONS = st.sampled_from([{}, {"quorum": 1}, {"min": 3, "quorum": 2}, {"fraction": 0.5}, {"min": 1}])


@settings(max_examples=300)
@given(events=EVENTS, options=OPTIONS, cut=st.integers(0, 40))
def test_any_history_replays_to_the_same_state_and_actions(
    events: list[Event], options: dict[str, Any], cut: int
) -> None:
    one, other = rounds(**options), rounds(**options)
    state, actions = play(one, events)
    assert play(other, events) == (state, actions)
    half, _ = play(other, events[:cut])  # a server that came back goes on from a replayed state
    rest = events[cut:]
    for event, wanted in zip(rest, actions[cut:], strict=True):
        half, found = other.on(half, event)
        assert tuple(found) == wanted
    assert half == state
    assert hash(half) == hash(state)


@settings(max_examples=300)
@given(events=EVENTS, options=OPTIONS)
def test_whatever_happens_the_schedule_keeps_its_word(events: list[Event], options: dict[str, Any]) -> None:
    schedule = rounds(**options)
    state = schedule.init(num_rounds=2, seed=0)
    armed: dict[str, float] = {}
    over = False
    for event in events:
        if isinstance(event, TimerFired):
            armed.pop(event.name, None)
        state, actions = schedule.on(state, event)
        assert not (over and actions)
        for action in actions:
            match action:
                case Dispatch(sites=sites, round=round):
                    assert sites == tuple(sorted(sites))
                    assert sites
                    assert round == state.round
                case Close(sites=sites):
                    assert len(sites) >= (schedule.options.quorum or len(state.cohort))
                    assert set(sites) <= {place.site for place in state.cohort}
                case SetTimer(name=name, after_s=after_s):
                    armed.pop(name, None)
                    if after_s:
                        armed[name] = after_s
                case GiveUp(reason=reason):
                    assert reason
                    over = True
                case Stop():
                    over = True
                case Cancel(sites=sites):
                    assert sites
        if state.phase is Phase.TRAINING:
            assert f"deadline/{state.round}" in armed, "a round without a deadline could hang"
        if state.phase is Phase.GATHERING and state.round:
            assert f"members/{state.round + 1}" in armed
