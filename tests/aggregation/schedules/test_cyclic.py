"""Weight transfer: whose turn it is, what happens when a site is gone, and when it ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from samples.rounds import READY, accepted, committed, failed, joined, left

from atoll.aggregation.parts import build
from atoll.aggregation.schedule import (
    Action,
    Cancel,
    Close,
    Dispatch,
    Event,
    GiveUp,
    SetTimer,
    Stop,
    TimerFired,
)
from atoll.aggregation.schedules.cyclic import Cyclic, CyclicState
from atoll.wire.errors import ConfigError


def cyclic(**options: Any) -> Cyclic:
    made: Cyclic = build("schedule", "cyclic", options)
    return made


def turn(site: str, round: int = 1, *, base: int | None = None) -> Dispatch:
    base_version = round - 1 if base is None else base
    return Dispatch(round=round, base_version=base_version, sites=(site,), max_weight=10, num_sites=1)


def play(schedule: Cyclic, events: Sequence[Event], *, num_rounds: int = 9) -> tuple[CyclicState, list[Action]]:
    """The last state, and what the last event led to, but for timers."""
    state = schedule.init(num_rounds=num_rounds, seed=4)
    actions: list[Action] = []
    for event in events:
        state, wanted = schedule.on(state, event)
        actions = [action for action in wanted if not isinstance(action, SetTimer)]
    return state, actions


def late(state: CyclicState) -> Event:
    return TimerFired(name=state.timer)


ABC: list[Event] = [*joined("c", "a", "b"), READY]


def whole_turn(site: str, round: int) -> list[Event]:
    return [*accepted(site, round=round), committed(round)]


def order_of(schedule: Cyclic, events: Sequence[Event], num_turns: int) -> str:
    """Whose turn it is in each round, where all deliver."""
    state, _ = play(schedule, events, num_rounds=num_turns + 1)
    sites = ""
    for round_ in range(1, num_turns + 1):
        sites += state.site
        for event in whole_turn(state.site, round_):
            state, _ = schedule.on(state, event)
    return sites


def test_one_site_after_the_other_starts_from_the_version_before() -> None:
    assert play(cyclic(), ABC)[1] == [turn("a")]
    assert play(cyclic(), [*ABC, *accepted("a")])[1] == [Close(round=1, sites=("a",))]
    assert play(cyclic(), [*ABC, *whole_turn("a", 1)])[1] == [turn("b", 2)]
    assert play(cyclic(), [*ABC, *whole_turn("a", 1), *whole_turn("b", 2)])[1] == [turn("c", 3)]
    assert play(cyclic(), [*ABC, *whole_turn("a", 1)], num_rounds=1)[1] == [Stop()]


def test_the_order_of_laps() -> None:
    assert order_of(cyclic(), ABC, 7) == "abcabca"
    assert order_of(cyclic(order="given", sites=["c", "a", "b"]), ABC, 7) == "cabcabc"
    assert order_of(cyclic(sites=["c", "a"]), ABC, 4) == "acac"
    drawn = order_of(cyclic(order="random"), ABC, 30)
    laps = [drawn[start : start + 3] for start in range(0, 30, 3)]
    assert all(sorted(lap) == ["a", "b", "c"] for lap in laps)
    assert len(set(laps)) > 2
    assert drawn == order_of(cyclic(order="random"), [*joined("b", "c", "a"), READY], 30)


def test_only_given_sites_take_part() -> None:
    schedule = cyclic(sites=["a", "c"])
    assert [schedule.takes(site, {}) for site in "abc"] == [True, False, True]


def test_who_joins_during_a_lap_is_in_the_next() -> None:
    events = [*joined("a", "c"), READY, *joined("b"), *whole_turn("a", 1)]
    assert play(cyclic(), events)[1] == [turn("c", 2)]
    events += [*whole_turn("c", 2), *whole_turn("a", 3)]
    assert play(cyclic(), events)[1] == [turn("b", 4)]


def test_a_site_that_is_gone_when_its_turn_comes_is_passed_over() -> None:
    assert play(cyclic(), [*ABC, left("b"), *whole_turn("a", 1)])[1] == [turn("c", 2)]


def test_a_site_that_goes_in_its_turn_may_come_back_until_the_deadline() -> None:
    state, actions = play(cyclic(), [*ABC, left("a")])
    assert actions == []
    assert play(cyclic(), [*ABC, left("a"), *accepted("a")])[1] == [Close(round=1, sites=("a",))]
    cancel = Cancel(round=1, sites=("a",), reason="its turn is over: gone")
    assert play(cyclic(), [*ABC, left("a"), late(state)])[1] == [cancel, turn("b")]


def test_a_site_that_is_late_or_fails_is_skipped_and_the_next_starts_from_the_same_version() -> None:
    events = [*ABC, *whole_turn("a", 1)]
    state, _ = play(cyclic(deadline="5m"), events)
    cancel = Cancel(round=2, sites=("b",), reason="its turn is over: no update within 300 s")
    assert play(cyclic(deadline="5m"), [*events, late(state)])[1] == [cancel, turn("c", 2)]
    assert play(cyclic(), [*events, failed("b", 2)])[1] == [turn("c", 2)]
    # And its turn comes again in the next lap.
    events += [failed("b", 2), *whole_turn("c", 2), *whole_turn("a", 3)]
    assert play(cyclic(), events)[1] == [turn("b", 4)]


def test_a_timer_that_was_set_anew_ends_no_turn() -> None:
    state, _ = play(cyclic(), ABC)
    assert play(cyclic(), [*ABC, *whole_turn("a", 1), late(state)])[1] == []
    assert play(cyclic(), [*ABC, *accepted("a"), late(state)])[1] == []


def test_a_lap_without_an_update_ends_the_run() -> None:
    events = [*ABC, failed("a"), failed("b", reason="no disk"), failed("c")]
    (give_up,) = play(cyclic(), events)[1]
    assert isinstance(give_up, GiveUp)
    assert "round 1 found no site whose update comes, in a whole lap" in give_up.reason
    assert "skipped: a: out of memory; b: no disk; c: out of memory; put right" in give_up.reason


def test_those_who_had_their_turn_are_asked_again_where_all_others_fail() -> None:
    events = [*ABC, *whole_turn("a", 1), failed("b", 2), failed("c", 2)]
    assert play(cyclic(), events)[1] == [turn("a", 2)]


def test_where_everybody_is_gone_the_first_to_come_back_goes_on() -> None:
    events = [*joined("a", "b"), READY, *accepted("a"), left("a"), left("b"), committed(1)]
    state, actions = play(cyclic(), events)
    assert actions == []
    assert play(cyclic(), [*events, *joined("b")])[1] == [turn("b", 2)]
    (give_up,) = play(cyclic(), [*events, late(state)])[1]
    assert isinstance(give_up, GiveUp)
    assert "round 2 has nobody to ask" in give_up.reason


def test_an_update_that_is_lost_before_its_commit_is_asked_for_again() -> None:
    events = [*ABC, *accepted("a"), failed("a", reason="lost")]
    assert play(cyclic(), events)[1] == [turn("a")]
    assert play(cyclic(), [*events, *accepted("a")])[1] == [Close(round=1, sites=("a",))]
    assert play(cyclic(), [*events, failed("a")])[1] == [turn("b")]


def test_too_few_to_begin_with() -> None:
    (give_up,) = play(cyclic(min=4), ABC)[1]
    assert isinstance(give_up, GiveUp)
    assert "the run needs 4 sites, there are 3: a, b, c" in give_up.reason


def test_a_version_mixes_one_update() -> None:
    assert cyclic(min=7).fewest_updates == 1
    assert cyclic(min=7).min_sites == 7


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"order": "size"}, "strategy.schedule.order"),
        ({"order": "given"}, "strategy.schedule"),
        ({"sites": ["a", "a"]}, "strategy.schedule"),
        ({"sites": ["a", "b"], "min": 3}, "strategy.schedule"),
        ({"sites": ["Not A Name"]}, "strategy.schedule.sites.0"),
        ({"min": 0}, "strategy.schedule.min"),
        ({"deadline": 0}, "strategy.schedule.deadline"),
    ],
)
def test_bad_options_name_their_key(options: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        cyclic(**options)
    assert caught.value.key == key


def test_a_run_that_goes_on_begins_a_new_lap_with_its_numbers() -> None:
    schedule = cyclic(min=2)
    state = schedule.init_after(5, 5, num_rounds=7, seed=1)
    asked = []
    for event in [*joined("b", "a"), READY, *accepted("a", round=6), committed(6)]:
        state, actions = schedule.on(state, event)
        asked += [action for action in actions if isinstance(action, Dispatch)]
    assert asked == [turn("a", 6), turn("b", 7)]
