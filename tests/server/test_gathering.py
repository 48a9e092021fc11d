"""Sites that join at once: the state is that of joining one after the other."""

from __future__ import annotations

from typing import Any

import pytest
from samples.simulated import points_job

from atoll.aggregation.schedule import Joined, Ready
from atoll.server.gathering import gathered
from atoll.server.plan import plan_of
from atoll.server.run import advance, begin
from atoll.wire.job import parse_job

SCHEDULES: dict[str, dict[str, Any]] = {
    "rounds": {"kind": "rounds", "min": 3, "where": {"region": "north"}},
    "every_steps": {"kind": "every_steps", "steps": 4, "min": 3},
    "buffered": {"kind": "buffered", "k": 2, "min": 3},
    "cyclic": {"kind": "cyclic"},
    "hierarchical": {"kind": "hierarchical", "label": "region", "groups": ["north", "south"], "rounds": 2},
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_joining_at_once_is_joining_one_after_the_other(name: str) -> None:
    work = {"batch_size": 8} if name == "every_steps" else {"epochs": 1, "batch_size": 8}
    plan = plan_of(parse_job(points_job(schedule=SCHEDULES[name], work=work)))
    events = [
        Joined(site=f"site-{n}", max_weight=10 * n, labels={"region": ("north", "south")[n % 2]})
        for n in (3, 9, 1, 8, 2, 7, 4, 6)
    ]
    one_by_one = begin(plan)
    for event in events:
        one_by_one, _ = advance(plan, one_by_one, event)
    at_once = gathered(plan, begin(plan), events)
    assert at_once == one_by_one
    assert advance(plan, at_once, Ready()) == advance(plan, one_by_one, Ready())


def test_who_joins_a_run_that_is_ready_cannot_be_taken_together() -> None:
    plan = plan_of(parse_job(points_job(min_sites=1)))
    first = gathered(plan, begin(plan), [Joined(site="site-1", max_weight=1, labels={})])
    state, _ = advance(plan, first, Ready())
    with pytest.raises(ValueError, match="before a run is ready"):
        gathered(plan, state, [Joined(site="site-2", max_weight=1, labels={})])
