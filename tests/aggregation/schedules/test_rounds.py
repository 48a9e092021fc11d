from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.aggregation.parts import build
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
    Joined,
    Left,
    Ready,
    SetTimer,
    Stop,
    TimerFired,
)
from atoll.aggregation.schedules.rounds import Phase, Rounds, RoundsState

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


ABC = [*joined("c", "a", "b"), READY]
IN_ABC = accepted("a", "b", "c")

TABLE: dict[str, tuple[dict[str, Any], list[Event], tuple[Action, ...]]] = {
    "nothing happens before ready": ({}, joined("a", "b", "c"), ()),
    "ready starts the first round": ({}, ABC, (dispatch("a", "b", "c"), deadline())),
    "the deadline is the job's": (
        {"deadline": "90s"},
        ABC,
        (dispatch("a", "b", "c"), SetTimer(name="deadline/1", after_s=90.0)),
    ),
    "the largest weight of the cohort is told": (
        {},
        [*joined("a", max_weight=7), *joined("b", max_weight=90), READY],
        (dispatch("a", "b", max_weight=90), deadline()),
    ),
    "too few at ready": (
        {"min": 4},
        ABC,
        (GiveUp(reason=f"round 1 needs 4 sites, there are 3: a, b, c{ADVICE}"),),
    ),
    "nobody at ready": ({}, [READY], (GiveUp(reason=f"round 1 needs 2 sites, there are 0: nobody{ADVICE}"),)),
    "ready twice": ({}, [*ABC, READY], ()),
    "some are in": ({}, [*ABC, *accepted("b", "a")], ()),
    "all in": ({}, [*ABC, *IN_ABC], (deadline(after_s=0), close("a", "b", "c"))),
    "in any order": ({}, [*ABC, *reversed(IN_ABC)], (deadline(after_s=0), close("a", "b", "c"))),
    "twice in counts once": ({}, [*ABC, *accepted("a", "a", "b")], ()),
    "an update of another round": ({}, [*ABC, *accepted("a", "b"), *accepted("c", round=2)], ()),
    "an update of a stranger": ({}, [*ABC, *accepted("a", "b", "z")], ()),
    "quorum without deadline waits": ({"quorum": 2}, [*ABC, *accepted("a", "b")], ()),
    "quorum at the deadline": (
        {"quorum": 2},
        [*ABC, *accepted("a", "b"), fired()],
        (
            deadline(after_s=0),
            Cancel(round=1, sites=("c",), reason="round 1 closed with 2 updates"),
            close("a", "b"),
        ),
    ),
    "quorum when the last one fails": (
        {"quorum": 2},
        [*ABC, *accepted("a", "b"), failed("c")],
        (deadline(after_s=0), close("a", "b")),
    ),
    "quorum when the last one leaves": (
        {"quorum": 2},
        [*ABC, *accepted("a", "b"), left("c")],
        (
            deadline(after_s=0),
            Cancel(round=1, sites=("c",), reason="round 1 closed with 2 updates"),
            close("a", "b"),
        ),
    ),
    "quorum when one leaves before the others are in": (
        {"quorum": 2},
        [*ABC, left("b"), *accepted("a", "c")],
        (
            deadline(after_s=0),
            Cancel(round=1, sites=("b",), reason="round 1 closed with 2 updates"),
            close("a", "c"),
        ),
    ),
    "below the quorum at the deadline": (
        {"quorum": 2},
        [*ABC, *accepted("b"), left("c"), fired()],
        (
            GiveUp(
                reason="round 1 has 1 of the 2 updates that it needs; missing: a: no update yet; "
                "c: gone (lease ran out)"
            ),
        ),
    ),
    "the whole cohort is the quorum where none is given": (
        {},
        [*ABC, *accepted("a", "b"), fired()],
        (GiveUp(reason="round 1 has 2 of the 3 updates that it needs; missing: c: no update yet"),),
    ),
    "a failure that makes the quorum impossible": (
        {},
        [*ABC, *accepted("a", "b"), failed("c")],
        (GiveUp(reason="round 1 has 2 of the 3 updates that it needs; missing: c: failed (out of memory)"),),
    ),
    "a gone site may come back until the deadline": ({}, [*ABC, *accepted("a", "b"), left("c")], ()),
    "it came back with its update": (
        {},
        [*ABC, *accepted("a", "b"), left("c"), *joined("c"), *accepted("c")],
        (deadline(after_s=0), close("a", "b", "c")),
    ),
    "its update came before itself": (
        {},
        [*ABC, *accepted("a", "b"), left("c"), *accepted("c")],
        (deadline(after_s=0), close("a", "b", "c")),
    ),
    "it came back and failed": (
        {},
        [*ABC, *accepted("a", "b"), left("c"), *joined("c"), failed("c")],
        (GiveUp(reason="round 1 has 2 of the 3 updates that it needs; missing: c: failed (out of memory)"),),
    ),
    "it did not come back": (
        {},
        [*ABC, *accepted("a", "b"), left("c"), fired()],
        (GiveUp(reason="round 1 has 2 of the 3 updates that it needs; missing: c: gone (lease ran out)"),),
    ),
    "whoever leaves after its update is in it": (
        {},
        [*ABC, *accepted("a"), left("a"), *accepted("b", "c")],
        (deadline(after_s=0), close("a", "b", "c")),
    ),
    "a lost update is asked for again": (
        {},
        [*ABC, *accepted("a", "b"), failed("a")],
        (dispatch("a"), deadline()),
    ),
    "a lost update opens a closing round": (
        {},
        [*ABC, *IN_ABC, failed("b")],
        (dispatch("b"), deadline()),
    ),
    "and closes it again": (
        {},
        [*ABC, *IN_ABC, failed("b"), *accepted("b")],
        (deadline(after_s=0), close("a", "b", "c")),
    ),
    "lost twice is a failure": (
        {"quorum": 2},
        [*ABC, *IN_ABC, failed("b"), failed("b")],
        (deadline(after_s=0), close("a", "c")),
    ),
    "the update of one who left is lost": (
        {},
        [*ABC, *IN_ABC, left("b"), failed("b")],
        (deadline(),),
    ),
    "it is lost, but the quorum stands": (
        {"quorum": 2},
        [*ABC, *IN_ABC, left("b"), failed("b")],
        (
            deadline(after_s=0),
            Cancel(round=1, sites=("b",), reason="round 1 closed with 2 updates"),
            close("a", "c"),
        ),
    ),
    "the deadline of another round": ({"quorum": 2}, [*ABC, *accepted("a", "b"), fired(2)], ()),
    "a late joiner waits for the next round": ({}, [*ABC, *joined("d")], ()),
    "a late joiner does not hold up the round": (
        {},
        [*ABC, *joined("d"), *IN_ABC],
        (deadline(after_s=0), close("a", "b", "c")),
    ),
    "and is in the next one": (
        {},
        [*ABC, *joined("d"), *IN_ABC, committed(1)],
        (dispatch("a", "b", "c", "d", round=2), deadline(2)),
    ),
    "whoever left is not": (
        {},
        [*ABC, *IN_ABC, left("c"), committed(1)],
        (dispatch("a", "b", round=2), deadline(2)),
    ),
    "a site that came back with another weight": (
        {},
        [*ABC, *IN_ABC, left("c"), *joined("c", max_weight=99), committed(1)],
        (dispatch("a", "b", "c", round=2, max_weight=99), deadline(2)),
    ),
    "too few are left: wait for members": (
        {},
        [*ABC, *IN_ABC, left("c"), left("b"), committed(1)],
        (SetTimer(name="members/2", after_s=S),),
    ),
    "a member comes": (
        {},
        [*ABC, *IN_ABC, left("c"), left("b"), committed(1), *joined("d")],
        (dispatch("a", "d", round=2), deadline(2), SetTimer(name="members/2", after_s=0)),
    ),
    "nobody comes": (
        {},
        [*ABC, *IN_ABC, left("c"), left("b"), committed(1), TimerFired(name="members/2")],
        (GiveUp(reason=f"round 2 needs 2 sites, there are 1: a{ADVICE}"),),
    ),
    "a commit that nobody asked for": ({}, [*ABC, committed(1)], ()),
    "a failure while closing of one who was not in": (
        {"quorum": 2},
        [*ABC, *accepted("a", "b"), fired(), failed("c")],
        (),
    ),
    "an update while closing": ({"quorum": 2}, [*ABC, *accepted("a", "b"), fired(), *accepted("c")], ()),
    "nothing after the end": ({"min": 4}, [*ABC, *joined("d"), READY], ()),
    "one site alone": ({"min": 1}, [*joined("a"), READY, *accepted("a")], (deadline(after_s=0), close("a"))),
}


@pytest.mark.parametrize("name", TABLE)
def test_table(name: str) -> None:
    options, events, wanted = TABLE[name]
    assert after(rounds(**options), events) == wanted


def whole_run(num_rounds: int) -> list[Event]:
    events = list(ABC)
    for round in range(1, num_rounds + 1):
        events += [*accepted("a", "b", "c", round=round), committed(round)]
    return events


def test_a_run_stops_after_its_last_round() -> None:
    state, actions = play(rounds(), whole_run(3), num_rounds=3)
    assert actions[-1] == (Stop(),)
    assert (state.phase, state.round, state.version) == (Phase.OVER, 3, 3)
    assert sum(isinstance(action, Dispatch) for some in actions for action in some) == 3


@pytest.mark.parametrize(
    ("options", "num_members", "size"),
    [
        ({"fraction": 0.5}, 10, 5),
        ({"fraction": 0.7}, 10, 7),
        ({"fraction": 0.71}, 10, 8),
        ({"fraction": 0.01}, 10, 2),
        ({"fraction": 0.01, "min": 5}, 10, 5),
        ({"fraction": 1.0}, 7, 7),
        ({"fraction": 0.3, "min": 1}, 1, 1),
    ],
)
def test_the_size_of_the_cohort(options: dict[str, Any], num_members: int, size: int) -> None:
    actions = after(rounds(**options), [*joined(*(f"s{n}" for n in range(num_members))), READY])
    assert isinstance(actions[0], Dispatch)
    assert len(actions[0].sites) == size
    assert list(actions[0].sites) == sorted(actions[0].sites)


def cohort(seed: int, round: int, sites: Sequence[str]) -> tuple[str, ...]:
    schedule = rounds(fraction=0.3)
    events: list[Event] = [*joined(*sites), READY]
    state, _ = play(schedule, events, num_rounds=99, seed=seed)
    for number in range(1, round):
        state, _ = play_on(schedule, state, accepted(*(place.site for place in state.cohort), round=number))
        state, _ = play_on(schedule, state, [committed(number)])
    return tuple(place.site for place in state.cohort)


def play_on(schedule: Rounds, state: RoundsState, events: Sequence[Event]) -> tuple[RoundsState, None]:
    for event in events:
        state, _ = schedule.on(state, event)
    return state, None


def test_sampling_follows_seed_and_round_and_no_order() -> None:
    sites = [f"site-{n}" for n in range(20)]
    assert cohort(1, 1, sites) == cohort(1, 1, sites[::-1])
    assert cohort(1, 1, sites) != cohort(2, 1, sites)
    assert cohort(1, 2, sites) != cohort(1, 1, sites)
    drawn = [site for round in range(1, 41) for site in cohort(7, round, sites)]
    counts = [drawn.count(site) for site in sites]
    assert sum(counts) == 40 * 6
    assert min(counts) >= 4  # 12 expected, deviation 2.9
    assert max(counts) <= 22


def test_sampling_is_fixed_for_ever() -> None:
    assert cohort(42, 1, [f"site-{n}" for n in range(10)]) == GOLDEN_COHORT


GOLDEN_COHORT = ("site-0", "site-4", "site-5")

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


def test_the_minimum_is_told_to_those_who_wait() -> None:
    assert rounds().min_sites == 2
    assert rounds(min=7).min_sites == 7


def test_a_round_combines_its_minimum_or_its_quorum() -> None:
    assert rounds(min=7).fewest_updates == 7
    assert rounds(min=7, quorum=4).fewest_updates == 4
    assert rounds(min=7, fraction=1.0).fewest_updates == 7
