"""Sites drawn by weight, by how often they came, by label; and more of them asked than are wanted."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from samples.rounds import READY, S, accepted, after, close, committed, deadline, failed, joined, play, rounds

from atoll.aggregation.combinations import Combined, refusal
from atoll.aggregation.parts import build
from atoll.aggregation.schedule import Cancel, Dispatch, Event, GiveUp, Joined, Selective, SetTimer
from atoll.aggregation.schedules.rounds import Rounds
from atoll.aggregation.schedules.sampling import draw
from atoll.wire.errors import ConfigError


def cohorts(schedule: Rounds, events: list[Event], num_rounds: int, *, fails: tuple[str, ...] = ()) -> list[list[str]]:
    """Who is asked in each round of a run in which all but `fails` deliver."""
    state, _ = play(schedule, events, num_rounds=num_rounds + 1)
    drawn = []
    for round_ in range(1, num_rounds + 1):
        sites = [place.site for place in state.cohort]
        drawn.append(sites)
        told: list[Event] = [failed(site, round_) for site in sites if site in fails]
        told += [*accepted(*(site for site in sites if site not in fails), round=round_), committed(round_)]
        for event in told:
            state, _ = schedule.on(state, event)
    return drawn


def weighted(weights: dict[str, int]) -> list[Event]:
    return [*(Joined(site=site, max_weight=weight, labels={}) for site, weight in weights.items()), READY]


def test_by_weight_a_site_with_three_times_the_examples_is_drawn_three_times_as_often() -> None:
    schedule = rounds(fraction=0.25, min=1, sample="weight")
    drawn = Counter(
        site for some in cohorts(schedule, weighted({"a": 300, "b": 100, "c": 100, "d": 100}), 600) for site in some
    )
    assert sum(drawn.values()) == 600
    assert 265 <= drawn["a"] <= 335  # 300 expected, deviation 12
    assert all(65 <= drawn[site] <= 135 for site in "bcd")  # 100 expected, deviation 9


def test_lots_are_those_of_seed_round_and_name_whoever_else_is_there() -> None:
    members = tuple((f"s{n}", 1 + n) for n in range(9))
    for chance in (None, lambda site, max_weight: float(max_weight)):
        one = draw(members, 4, seed=5, round_=2, chance=chance)
        assert draw(members[::-1], 4, seed=5, round_=2, chance=chance) == one == tuple(sorted(one))
        gone = next(member for member in members if member not in one)
        assert draw(tuple(m for m in members if m != gone), 4, seed=5, round_=2, chance=chance) == one
        assert draw(members, 4, seed=5, round_=3, chance=chance) != one


def test_a_site_that_missed_rounds_is_drawn_less_often_until_it_delivers() -> None:
    schedule = rounds(fraction=0.5, min=1, quorum=1, sample="available")
    events = [*joined("a", "b", "c", "d"), READY]
    drawn = Counter(site for some in cohorts(schedule, events, 200, fails=("d",)) for site in some)
    assert drawn["d"] < 60  # 100 where all are alike
    assert min(drawn[site] for site in "abc") > 100
    assert drawn["d"] > 5  # and yet it is asked again
    state, _ = play(schedule, events)
    assert state.missed == ()
    asked = [place.site for place in state.cohort]
    told: list[Event] = [*accepted(asked[0]), failed(asked[1]), committed(1)]
    for event in told:
        state, _ = schedule.on(state, event)
    assert state.missed == ((asked[1], 1),)


def test_a_lost_update_that_came_again_is_no_missed_round() -> None:
    schedule = rounds(min=1, sample="available")
    events = [*joined("a"), READY, *accepted("a"), failed("a"), *accepted("a"), committed(1)]
    assert play(schedule, events)[0].missed == ()


LABELLED: list[Event] = [
    Joined(site="a", max_weight=10, labels={"zone": "north", "device": "gpu"}),
    Joined(site="b", max_weight=10, labels={"zone": "south", "device": "gpu"}),
    Joined(site="c", max_weight=10, labels={"zone": "north", "device": "gpu", "more": "x"}),
    Joined(site="d", max_weight=10, labels={"zone": "north"}),
    Joined(site="e", max_weight=10, labels={}),
]


def test_only_sites_with_every_label_take_part() -> None:
    schedule = rounds(where={"zone": "north", "device": "gpu"})
    (first, _) = after(schedule, [*LABELLED, READY])
    assert first == Dispatch(round=1, base_version=0, sites=("a", "c"), max_weight=10)
    assert isinstance(schedule, Selective)
    assert [schedule.takes(event.site, event.labels) for event in LABELLED if isinstance(event, Joined)] == [
        1,
        0,
        1,
        0,
        0,
    ]


def test_sites_with_other_labels_do_not_count_as_members() -> None:
    (give_up,) = after(rounds(where={"zone": "south"}), [*LABELLED, READY])
    assert isinstance(give_up, GiveUp)
    assert "round 1 needs 2 sites, there are 1: b" in give_up.reason


TEN = [*joined(*(f"s{n}" for n in range(10))), READY]


def test_more_are_asked_than_are_wanted_and_the_first_of_them_count() -> None:
    schedule = rounds(fraction=0.5, over=1.3)
    (asked, _) = after(schedule, TEN)
    assert isinstance(asked, Dispatch)
    assert len(asked.sites) == 7
    early, late = asked.sites[:5], asked.sites[5:]
    assert after(schedule, [*TEN, *accepted(*early[:4])]) == ()
    assert after(schedule, [*TEN, *accepted(*early)]) == (
        deadline(after_s=0),
        Cancel(round=1, sites=late, reason="round 1 closed with 5 updates"),
        close(*early),
    )
    state, _ = play(schedule, [*TEN, *accepted(*early), *accepted(late[0]), committed(1)])
    assert (state.round, len(state.cohort)) == (2, 7)


def test_a_failure_among_more_than_are_wanted_costs_nothing() -> None:
    schedule = rounds(fraction=0.5, over=1.3)
    (asked, _) = after(schedule, TEN)
    assert isinstance(asked, Dispatch)
    told = [*TEN, failed(asked.sites[0]), failed(asked.sites[1]), *accepted(*asked.sites[2:6])]
    assert after(schedule, told) == ()
    assert after(schedule, [*told, *accepted(asked.sites[6])]) == (deadline(after_s=0), close(*asked.sites[2:]))
    (give_up,) = after(schedule, [*TEN, *(failed(site) for site in asked.sites[:3]), *accepted(*asked.sites[3:])])
    assert isinstance(give_up, GiveUp)
    assert "round 1 has 4 of the 5 updates" in give_up.reason


def test_no_more_are_asked_than_there_are() -> None:
    (asked, _) = after(rounds(over=2.0), [*joined("a", "b"), READY])
    assert asked == Dispatch(round=1, base_version=0, sites=("a", "b"), max_weight=10)


def test_a_lost_update_of_a_round_that_cancelled_others_waits_for_that_site_alone() -> None:
    schedule = rounds(min=2, over=2.0, fraction=0.1)
    events = [*joined("a", "b", "c", "d"), READY]
    (asked, _) = after(schedule, events)
    assert isinstance(asked, Dispatch)
    first, second, *_ = asked.sites
    told = [*events, *accepted(first, second), failed(first)]
    again = Dispatch(round=1, base_version=0, sites=(first,), max_weight=10)
    assert after(schedule, told) == (again, SetTimer(name="deadline/1", after_s=S))
    (give_up,) = after(schedule, [*told, failed(first)])
    assert isinstance(give_up, GiveUp)
    assert "too late" in give_up.reason


def test_a_trusted_site_cannot_be_left_out_by_over_provisioning() -> None:
    found = refusal(
        Combined(
            schedule=rounds(over=1.5),
            codec=build("codec", "native", {}),
            reducer=build("reducer", "fltrust", {"trusted": "a"}),
            buffers="mean",
            server_evaluation=False,
        )
    )
    assert found is not None
    assert "set fraction = 1, and over = 1" in found.reason


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"sample": "best"}, "strategy.schedule.sample"),
        ({"over": 0.9}, "strategy.schedule.over"),
        ({"over": 11}, "strategy.schedule.over"),
        ({"where": {"zone": ""}}, "strategy.schedule.where.zone"),
        ({"where": "north"}, "strategy.schedule.where"),
    ],
)
def test_bad_options_name_their_key(options: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        rounds(**options)
    assert caught.value.key == key
    assert caught.value.bound
