"""Gossip in the state table of a run: its journal replays to the same state at every step, weights and all."""

from __future__ import annotations

import pytest

from atoll.aggregation.schedule import Committed, Joined, Left, Ready, TimerFired
from atoll.aggregation.schedules.gossip import Gossip, GossipState
from atoll.server.events import ModelKept, PeerMet, RunEvent, TaskLost, UpdateAccepted, decode_event, encode_event
from atoll.server.messages import committed_message, task_message
from atoll.server.run import advance, begin, outstanding, replay
from atoll.server.run_state import CommitRound, Exchanging, Phase, Plan, RunAction, RunState, SendTask, WithdrawTask
from atoll.wire import control_pb2 as pb

RUN = "01JDQ3T4V8Z6K1M2N3P4Q5R6S7"
SITES = ("a", "b", "c")
PAIRS = (("a", "b"), ("a", "c"), ("b", "c"))


class Run:
    """A run of three sites on a ring, a version after the second round and the last; each event is replayed."""

    def __init__(self, *, least: int = 2) -> None:
        self.plan = Plan(
            schedule=Gossip(Gossip.Options(zone="reef", min=least, every=2)),
            num_rounds=3,
            seed=1,
            evaluate_every=1,
            evaluate_at_sites=True,
            evaluate_at_server=False,
        )
        self.state: RunState = begin(self.plan)
        self.events: list[RunEvent] = []
        for site in SITES:
            self.tell(Joined(site=site, max_weight=100, labels={"zone": "reef"}))
        self.begun = self.tell(Ready())

    def tell(self, event: RunEvent) -> tuple[RunAction, ...]:
        state, actions = advance(self.plan, self.state, event)
        if state is not self.state:
            self.events.append(decode_event(encode_event(event)))
        self.state = state
        assert replay(self.plan, self.events) == self.state
        return actions

    def keep(self, *sites: str, round: int = 1) -> tuple[RunAction, ...]:
        actions: tuple[RunAction, ...] = ()
        for site in sites:
            actions = self.tell(ModelKept(task=f"g{round}.{site}", attempt=1, site=site, round=round, crc32=round))
        return actions

    def meet(self, *pairs: tuple[str, str], round: int = 1) -> tuple[RunAction, ...]:
        actions: tuple[RunAction, ...] = ()
        for a, b in pairs:
            for site, peer in ((a, b), (b, a)):
                actions = self.tell(PeerMet(site=site, peer=peer, round=round, received=True))
        return actions

    def update(self, *sites: str, round: int) -> tuple[RunAction, ...]:
        actions: tuple[RunAction, ...] = ()
        for site in sites:
            accepted = UpdateAccepted(
                task=f"r{round}.{site}", attempt=1, site=site, round=round, weight=1, metrics={"loss": (1.0, 2.0)}
            )
            actions = self.tell(accepted)
        return actions

    def message(self, task: str) -> pb.Task:
        return task_message(RUN, self.state.tasks[task], self.state)

    def shares(self, task: str) -> dict[str, float]:
        return {share.site: share.weight for share in self.message(task).mixing.shares}


def sent(actions: tuple[RunAction, ...]) -> list[str]:
    return [action.task.task for action in actions if isinstance(action, SendTask)]


def test_a_run_goes_from_round_to_round_and_makes_versions() -> None:
    run = Run()
    assert sent(run.begun) == ["g1.a", "g1.b", "g1.c"]
    assert run.message("g1.a").kind == pb.EXCHANGE
    assert not run.message("g1.a").HasField("mixing")
    assert run.keep(*SITES)[-1] == Exchanging(round=1)
    assert sent(run.meet(*PAIRS)) == ["g2.a", "g2.b", "g2.c"]
    assert run.shares("g2.a") == {"a": pytest.approx(1 / 3), "b": 1 / 3, "c": 1 / 3}
    run.keep(*SITES, round=2)
    assert sent(run.meet(*PAIRS, round=2)) == ["r2.a", "r2.b", "r2.c"]
    collect = run.message("r2.a")
    assert (collect.kind, collect.mixing.round, collect.sum.max_weight) == (pb.COLLECT, 2, 1)
    actions = run.update(*SITES, round=2)
    assert any(isinstance(action, CommitRound) for action in actions)
    assert sent(run.tell(Committed(round=2, version=1))) == ["e1.a", "e1.b", "e1.c", "g3.a", "g3.b", "g3.c"]
    assert run.message("e1.a").mixing.round == 2, "the site's own model of that round, to be compared with the version"
    assert (run.message("g3.a").base_version, run.message("g3.a").mixing.round) == (1, 2)
    run.keep(*SITES, round=3)
    run.meet(*PAIRS, round=3)
    run.update(*SITES, round=3)
    run.tell(Committed(round=3, version=2))
    assert run.state.phase is Phase.FINISHING


def test_a_server_that_comes_back_asks_again_and_introduces_anew() -> None:
    run = Run()
    run.keep("a", "b")
    assert sent(outstanding(run.plan, run.state)) == ["g1.c"]
    assert Exchanging(round=1) in outstanding(run.plan, run.state)


def test_what_a_site_goes_on_from_is_kept_until_it_has_trained_again() -> None:
    run = Run()
    run.keep(*SITES)
    assert committed_message(RUN, run.state, "a").round == 0
    run.meet(*PAIRS)
    run.keep("a", round=2)
    assert committed_message(RUN, run.state, "a").round == 1
    assert committed_message(RUN, run.state, "b").round == 0


def test_a_lost_model_is_mixed_by_nobody_and_its_site_begins_with_the_version() -> None:
    run = Run()
    run.keep(*SITES)
    run.meet(("a", "b"), ("a", "c"))
    run.tell(TaskLost(task="g1.c", attempt=1, site="c", reason="its disk was wiped"))
    assert run.shares("g2.a") == {"a": 0.5, "b": 0.5}
    assert run.shares("g2.c") == {}
    assert "c" not in run.state.kept


def test_a_failed_training_leaves_the_others() -> None:
    run = Run()
    run.keep("a", "b")
    run.tell(TaskLost(task="g1.c", attempt=1, site="c", reason="out of memory"))
    assert isinstance(run.state.schedule, GossipState)
    assert [link.pair for link in run.state.schedule.links] == [("a", "b")]


def test_late_sites_are_called_back_at_the_deadline() -> None:
    run = Run()
    run.keep("a", "b")
    actions = run.tell(TimerFired(name="training/1"))
    assert [action.task.task for action in actions if isinstance(action, WithdrawTask)] == ["g1.c"]
    assert run.keep("c") == (), "too late"
    assert "c" not in run.state.kept


def test_a_member_that_leaves_and_comes_back_goes_on() -> None:
    run = Run(least=3)
    run.keep("a", "b")
    run.tell(Left(site="c", reason="silent"))
    assert run.state.tasks["g1.c"].site == "c"
    run.tell(Joined(site="c", max_weight=100, labels={"zone": "reef"}))
    run.keep("c")
    assert sent(run.meet(*PAIRS)) == ["g2.a", "g2.b", "g2.c"]


def test_reports_that_change_nothing_are_not_written_down() -> None:
    run = Run()
    run.keep(*SITES)
    run.meet(("a", "b"))
    count = len(run.events)
    run.tell(PeerMet(site="a", peer="b", round=1, received=True))
    run.tell(PeerMet(site="a", peer="z", round=1, received=True))
    run.tell(PeerMet(site="z", peer="a", round=1, received=True))
    run.tell(PeerMet(site="b", peer="a", round=7, received=True))
    run.tell(ModelKept(task="g1.a", attempt=1, site="a", round=1, crc32=1))
    assert len(run.events) == count
