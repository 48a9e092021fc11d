"""Who is in a round's cohort, and how few may be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from samples.rounds import (
    READY,
    accepted,
    after,
    committed,
    joined,
    play,
    rounds,
)

from atoll.aggregation.schedule import (
    Dispatch,
    Event,
)
from atoll.aggregation.schedules.rounds import Rounds, RoundsState


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


def test_the_minimum_is_told_to_those_who_wait() -> None:
    assert rounds().min_sites == 2
    assert rounds(min=7).min_sites == 7


def test_a_round_combines_its_minimum_or_its_quorum() -> None:
    assert rounds(min=7).fewest_updates == 7
    assert rounds(min=7, quorum=4).fewest_updates == 4
    assert rounds(min=7, fraction=1.0).fewest_updates == 7
