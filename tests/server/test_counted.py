"""Whose updates count, and what share of all they are: the same after a replay, in a federation and in a tree."""

from __future__ import annotations

import pytest

from atoll.aggregation.lanes import Share
from atoll.aggregation.parts import build
from atoll.aggregation.schedule import Asked, Committed, Joined, Left, Ready, TimerFired
from atoll.server import counted
from atoll.server.events import RunEvent, UpdateAccepted, decode_event, encode_event
from atoll.server.messages import task_message
from atoll.server.round import Round, Update
from atoll.server.run import advance, begin, replay
from atoll.server.run_state import Plan, RunState

WEIGHTS = {"a": 10, "b": 30, "c": 20, "d": 40}


def plan() -> Plan:
    return Plan(
        schedule=build("schedule", "rounds", {"min": 3, "quorum": 2, "deadline": 60}),
        num_rounds=9,
        seed=1,
        evaluate_every=1,
        evaluate_at_sites=False,
        evaluate_at_server=False,
    )


def joined(site: str, *, num_sites: int = 0, sum_weights: int = 0) -> Joined:
    return Joined(site=site, max_weight=WEIGHTS[site], labels={}, num_sites=num_sites, sum_weights=sum_weights)


def accepted(site: str, round: int, attempt: int = 1) -> UpdateAccepted:
    task = f"r{round}.{site}"
    return UpdateAccepted(task=task, attempt=attempt, site=site, round=round, weight=WEIGHTS[site] - 1, metrics={})


class Run:
    """A run in memory, with its journal."""

    def __init__(self) -> None:
        self.plan, self.journal = plan(), list[bytes]()
        self.state = begin(self.plan)

    def tell(self, *events: RunEvent) -> RunState:
        for event in events:
            self.journal.append(encode_event(event))
            self.state, _ = advance(self.plan, self.state, event)
        return self.state

    def counted_in_task(self, site: str) -> int:
        (task,) = (task for task in self.state.tasks.values() if task.site == site and task.kind == "train")
        return task_message("run", task, self.state).counted_round


def test_each_task_says_which_of_the_sites_rounds_was_the_last_that_counted() -> None:
    run = Run()
    run.tell(*map(joined, "abc"), Ready())
    assert [run.counted_in_task(site) for site in "abc"] == [0, 0, 0]
    run.tell(accepted("a", 1), accepted("b", 1), TimerFired(name="deadline/1"))
    closing = run.state.rounds[1]
    assert closing.closing == ("a", "b")
    assert closing.share == Share(cohort=40 / 60)
    run.tell(Committed(round=1, version=1))
    assert [run.counted_in_task(site) for site in "abc"] == [1, 1, 0]
    run.tell(accepted("a", 2), accepted("c", 2), TimerFired(name="deadline/2"), Committed(round=2, version=2))
    assert [run.counted_in_task(site) for site in "abc"] == [2, 1, 2]
    assert replay(run.plan, [decode_event(entry) for entry in run.journal]) == run.state


def test_who_left_and_who_joined_are_among_all() -> None:
    run = Run()
    run.tell(*map(joined, "abc"), Ready())
    run.tell(*(accepted(site, 1) for site in "abc"))
    assert run.state.rounds[1].share == Share()
    run.tell(Committed(round=1, version=1), joined("d"), Left(site="c", reason="its lease ran out"))
    run.tell(accepted("a", 2), accepted("b", 2), TimerFired(name="deadline/2"))
    assert run.state.rounds[2].share == Share(cohort=40 / 100, before=60 / 100)
    run.tell(Committed(round=2, version=2))
    assert run.state.all_weights == 100


def test_a_region_weighs_what_it_sent_of_what_it_declared() -> None:
    state = RunState(
        phase=begin(plan()).phase,
        schedule=None,
        members={"a": joined("a"), "d": joined("d", num_sites=5, sum_weights=90)},
    )
    round_ = Round(number=1, base_version=0, asked={"a": 1, "d": 1}, max_weight=40)
    for site, weight in {"a": 9, "d": 45}.items():
        round_ = round_.accepted(site, Update(task=f"r1.{site}", attempt=1, weight=weight, metrics={}))
    assert counted.closed(state, round_, ("a", "d")).share == Share(cohort=(10 + 45) / 100)


@pytest.mark.parametrize("told", [1, 0], ids=["counted", "left-out"])
def test_a_region_learns_with_its_next_round_whether_its_part_counted(told: int) -> None:
    state = RunState(phase=begin(plan()).phase, schedule=None, counted={"a": 0})
    round_ = Round(number=1, base_version=0, asked={"a": 1, "b": 1}, max_weight=40)
    round_ = round_.accepted("a", Update(task="r1.a", attempt=1, weight=9, metrics={})).closed(("a",))
    state = counted.committed(state, round_, delegated=True)
    assert state.counted == {"a": 0}
    again = counted.asked(state, Asked(round=2, base_version=1, num_sites=2, max_weight=40, counted_round=told))
    assert again.counted == {"a": told}
    assert counted.asked(again, Asked(round=3, base_version=2, num_sites=2, max_weight=40, counted_round=1)) == again
