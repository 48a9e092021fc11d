"""Groups in step: when a round closes, whose version a site starts from, and what ends the run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from samples.rounds import READY, accepted, committed, failed, left

from atoll.aggregation.parts import build
from atoll.aggregation.schedule import (
    Action,
    Cancel,
    Close,
    Dispatch,
    Event,
    GiveUp,
    Joined,
    SetTimer,
    Stop,
    TimerFired,
)
from atoll.aggregation.schedules.hierarchical import Hierarchical, HierarchicalState
from atoll.aggregation.strategy import resolve
from atoll.server.events import WaitEnded
from atoll.server.run import advance, begin
from atoll.server.run_state import Plan
from atoll.wire.errors import ConfigError
from atoll.wire.job import parse_job

REGIONS = {"a": "north", "b": "north", "c": "south", "d": "south", "e": "south"}


def hierarchical(**options: Any) -> Hierarchical:
    whole = {"label": "region", "groups": ["north", "south"], "rounds": 2, **options}
    made: Hierarchical = build("schedule", "hierarchical", whole)
    return made


def joined(*sites: str, max_weight: int = 10) -> list[Joined]:
    return [
        Joined(site=site, max_weight=max_weight, labels={"region": REGIONS.get(site, "elsewhere")}) for site in sites
    ]


ALL: list[Event] = [*joined("d", "a", "c", "b", "e"), READY]


def dispatch(group: int, *sites: str, round: int = 1) -> Dispatch:
    return Dispatch(round=round, base_version=round - 1, sites=sites, max_weight=10, branch=group)


def play(
    schedule: Hierarchical, events: Sequence[Event], *, num_rounds: int = 4
) -> tuple[HierarchicalState, list[Action]]:
    """The last state, and what the last event led to, but for timers."""
    state = schedule.init(num_rounds=num_rounds, seed=0)
    actions: list[Action] = []
    for event in events:
        state, wanted = schedule.on(state, event)
        actions = [action for action in wanted if not isinstance(action, SetTimer)]
    return state, actions


def test_every_group_begins_with_its_own_sites() -> None:
    assert play(hierarchical(), ALL)[1] == [dispatch(0, "a", "b"), dispatch(1, "c", "d", "e")]


def test_a_round_closes_with_the_last_group() -> None:
    events = [*ALL, *accepted("c", "d", "e")]
    assert play(hierarchical(), events)[1] == []
    events += accepted("b", "a")
    assert play(hierarchical(), events)[1] == [Close(round=1, sites=("a", "b", "c", "d", "e"))]
    both = [dispatch(0, "a", "b", round=2), dispatch(1, "c", "d", "e", round=2)]
    assert play(hierarchical(), [*events, committed(1)])[1] == both
    assert play(hierarchical(), [*events, committed(1)], num_rounds=1)[1] == [Stop()]


def test_a_site_gets_the_version_of_its_group_until_the_groups_are_combined() -> None:
    schedule = hierarchical()
    state, _ = play(schedule, ALL)
    assert [schedule.branch(state, "a", version) for version in range(5)] == [None, 0, None, 0, None]
    assert [schedule.branch(state, "e", version) for version in range(5)] == [None, 1, None, 1, None]


def test_each_group_has_its_own_deadline_and_quorum() -> None:
    schedule = hierarchical(inner={"kind": "rounds", "quorum": 2, "deadline": "5m"})
    state = schedule.init(num_rounds=4, seed=0)
    timers: list[str] = []
    for event in ALL:
        state, wanted = schedule.on(state, event)
        timers += [action.name for action in wanted if isinstance(action, SetTimer)]
    assert timers == ["group-0/deadline/1", "group-1/deadline/1"]
    events = [*ALL, *accepted("c", "d"), TimerFired(name="group-1/deadline/1")]
    late = Cancel(round=1, sites=("e",), reason="round 1 closed with 2 updates")
    assert play(schedule, events)[1] == [late]
    assert play(schedule, [*events, *accepted("a", "b")])[1] == [Close(round=1, sites=("a", "b", "c", "d"))]


def test_a_group_that_cannot_go_on_ends_the_run_and_is_named() -> None:
    assert play(hierarchical(), [*ALL, failed("a")])[1] == []
    (give_up,) = play(hierarchical(), [*ALL, failed("a"), *accepted("b")])[1]
    assert isinstance(give_up, GiveUp)
    assert give_up.reason.startswith("group north: round 1 has 1 of the 2 updates")
    (give_up,) = play(hierarchical(), [*joined("a", "b", "c"), READY])[1][-1:]
    assert isinstance(give_up, GiveUp)
    assert give_up.reason.startswith("group south: round 1 needs 2 sites, there are 1: c")


def test_a_lost_update_opens_its_group_again() -> None:
    events = [*ALL, *accepted("a", "b", "c", "d", "e"), failed("c")]
    assert play(hierarchical(), events)[1] == [dispatch(1, "c")]
    assert play(hierarchical(), [*events, *accepted("c")])[1] == [Close(round=1, sites=("a", "b", "c", "d", "e"))]
    gone = [*ALL, *accepted("a", "b", "c", "d", "e"), left("c"), failed("c")]
    assert play(hierarchical(), gone)[1] == []
    assert play(hierarchical(), [*gone, *accepted("c")])[1] == [Close(round=1, sites=("a", "b", "c", "d", "e"))]


def test_a_group_waits_for_members_while_the_other_begins() -> None:
    events = [*ALL, *accepted("a", "b", "c", "d", "e"), left("a"), committed(1)]
    assert play(hierarchical(), events)[1] == [dispatch(1, "c", "d", "e", round=2)]
    assert play(hierarchical(), [*events, *joined("a")])[1] == [dispatch(0, "a", "b", round=2)]


def test_a_run_begins_once_every_group_has_enough() -> None:
    plan = Plan(
        schedule=hierarchical(),
        num_rounds=2,
        seed=0,
        evaluate_every=1,
        evaluate_at_sites=False,
        evaluate_at_server=False,
    )
    state = begin(plan)
    may: list[bool] = []
    for event in joined("c", "d", "e", "a", "b"):
        state, _ = advance(plan, state, event)
        may.append(state.may_begin(plan))
    assert may == [False, False, False, False, True]
    state, _ = advance(plan, begin(plan), joined("c")[0])
    assert state.wait_over(plan, "too few") == WaitEnded(reason="too few")
    for event in joined("d", "e", "a"):
        state, _ = advance(plan, state, event)
    state, _ = advance(plan, state, state.wait_over(plan, "too few"))
    assert state.reason.startswith("group north: round 1 needs 2 sites, there are 1: a")


def test_only_sites_of_a_group_are_asked() -> None:
    schedule = hierarchical(inner={"kind": "rounds", "where": {"device": "gpu"}})
    gpu = {"device": "gpu"}
    assert schedule.takes("a", {"region": "north", **gpu})
    assert not schedule.takes("a", {"region": "north"})
    assert not schedule.takes("a", {"region": "elsewhere", **gpu})
    assert not schedule.takes("a", gpu)
    state, _ = play(hierarchical(), joined("z"))
    assert state.homes == ()


def test_a_site_stays_in_its_group() -> None:
    moved = Joined(site="a", max_weight=10, labels={"region": "south"})
    state, _ = play(hierarchical(), [*ALL, left("a"), moved])
    assert dict(state.homes)["a"] == 0
    assert "a" in dict(state.groups[0].members)


def test_what_a_version_mixes_and_needs() -> None:
    schedule = hierarchical(inner={"kind": "rounds", "min": 4, "quorum": 3})
    assert (schedule.min_sites, schedule.fewest_updates) == (8, 3)
    stepped = hierarchical(inner={"kind": "every_steps", "steps": 20})
    assert (stepped.exchange.steps, hierarchical().exchange.steps) == (20, None)


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"groups": ["north"]}, "strategy.schedule.groups"),
        ({"groups": ["north", "north"]}, "strategy.schedule.groups"),
        ({"rounds": 0}, "strategy.schedule.rounds"),
        ({"label": ""}, "strategy.schedule.label"),
        ({"inner": {"kind": "cyclic"}}, "strategy.schedule.inner.kind"),
        ({"inner": {"kind": "buffered", "k": 1}}, "strategy.schedule.inner.kind"),
        ({"inner": {"kind": "every_steps", "steps": 4, "fragments": 2}}, "strategy.schedule.inner.kind"),
        ({"inner": {"kind": "rounds", "min": 0}}, "strategy.schedule.inner.min"),
        ({"inner_optimizer": {"kind": "sgd", "lr": -1}}, "strategy.schedule.inner_optimizer.lr"),
    ],
)
def test_bad_options_name_their_key(options: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        hierarchical(**options)
    assert caught.value.key == key


def test_rounds_that_would_be_in_no_common_version_are_refused() -> None:
    schedule = {"kind": "hierarchical", "label": "region", "groups": ["north", "south"], "rounds": 4}
    table = {"job": {"name": "a", "app": "a", "rounds": 10}, "strategy": {"schedule": schedule}}
    with pytest.raises(ConfigError, match=r"job\.rounds = 10 with strategy\.schedule\.rounds = 4") as caught:
        resolve(parse_job(table))
    assert (caught.value.key, caught.value.bound) == ("job.rounds", "a multiple of 4")
