"""The state table of a run, and that a replayed journal gives the same state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from atoll.aggregation.schedule import Committed, Joined, Left, Ready, TimerFired
from atoll.aggregation.schedules.buffered import Buffered
from atoll.aggregation.schedules.rounds import Rounds
from atoll.server.events import (
    Broken,
    EvaluationEnded,
    RunEvent,
    ServerEvaluated,
    SiteEvaluated,
    StopAsked,
    TaskLost,
    UpdateAccepted,
    WaitEnded,
    decode_event,
    encode_event,
)
from atoll.server.messages import task_message
from atoll.server.run import advance, begin, outstanding, replay
from atoll.server.run_state import (
    AnnounceCommit,
    Change,
    CommitRound,
    EndRun,
    EvaluateHere,
    OpenRound,
    Outcome,
    Phase,
    Plan,
    RunAction,
    RunState,
    SendTask,
    WithdrawTask,
)


def make_plan(*, rounds: int = 2, sites: bool = True, server: bool = False, quorum: int | None = None) -> Plan:
    return Plan(
        schedule=Rounds(Rounds.Options(min=2, quorum=quorum)),
        num_rounds=rounds,
        seed=1,
        evaluate_every=1,
        evaluate_at_sites=sites,
        evaluate_at_server=server,
    )


class Run:
    """A run that is told events, with all that it wanted done."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.state: RunState = begin(plan)
        self.events: list[RunEvent] = []

    def is_in(self, phase: Phase) -> bool:
        return self.state.phase is phase

    def tell(self, event: RunEvent) -> tuple[RunAction, ...]:
        """One event; what is to be done. The journal then replays to the same state."""
        state, actions = advance(self.plan, self.state, event)
        if state is not self.state:
            self.events.append(decode_event(encode_event(event)))
        self.state = state
        assert replay(self.plan, self.events) == self.state
        return actions

    def start(self, *sites: str) -> tuple[RunAction, ...]:
        for site in sites:
            self.tell(Joined(site=site, max_weight=100, labels={}))
        return self.tell(Ready())

    def accept(self, site: str, number: int = 1, attempt: int = 1, weight: int = 10) -> tuple[RunAction, ...]:
        return self.tell(
            UpdateAccepted(
                task=f"r{number}.{site}",
                attempt=attempt,
                site=site,
                round=number,
                weight=weight,
                metrics={"loss": (1.5, 10.0)},
            )
        )

    def commit(self, number: int) -> tuple[RunAction, ...]:
        return self.tell(Committed(round=number, version=number))


def sent(actions: Sequence[RunAction]) -> list[tuple[str, str, int]]:
    """Kind, site and attempt of the tasks that are given out."""
    return [(a.task.kind, a.task.site, a.task.attempt) for a in actions if isinstance(a, SendTask)]


def kinds(actions: Sequence[RunAction]) -> list[type[RunAction]]:
    return [type(action) for action in actions]


def test_a_run_from_its_first_member_to_its_end() -> None:
    run = Run(make_plan(rounds=1))
    assert run.is_in(Phase.WAITING)
    actions = run.start("b", "a")
    assert sent(actions) == [("train", "a", 1), ("train", "b", 1)]
    assert OpenRound in kinds(actions)
    assert run.is_in(Phase.RUNNING)
    assert CommitRound not in kinds(run.accept("a"))
    assert CommitRound in kinds(run.accept("b"))
    assert run.state.rounds[1].closing == ("a", "b")
    actions = run.commit(1)
    assert AnnounceCommit in kinds(actions)
    assert sent(actions) == [("evaluate", "a", 1), ("evaluate", "b", 1)]
    assert run.is_in(Phase.FINISHING)
    run.tell(SiteEvaluated(task="e1.a", attempt=1, site="a", metrics={"accuracy": (9.0, 10.0)}))
    actions = run.tell(SiteEvaluated(task="e1.b", attempt=1, site="b", metrics={"accuracy": (8.0, 10.0)}))
    assert [a.outcome for a in actions if isinstance(a, EndRun)] == [Outcome.FINISHED]
    assert run.is_in(Phase.ENDED)
    assert run.tell(Joined(site="c", max_weight=1, labels={})) == ()


def test_events_that_change_nothing_give_back_the_same_state() -> None:
    run = Run(make_plan())
    run.start("a", "b")
    run.accept("a")
    for event in (
        Joined(site="a", max_weight=5, labels={}),
        Left(site="nobody", reason=""),
        TimerFired(name="never set"),
        UpdateAccepted(task="r1.a", attempt=1, site="a", round=1, weight=10, metrics={}),
        UpdateAccepted(task="r1.b", attempt=2, site="b", round=1, weight=10, metrics={}),
        UpdateAccepted(task="r9.b", attempt=1, site="b", round=9, weight=10, metrics={}),
        TaskLost(task="r1.c", attempt=1, site="c", reason=""),
        Committed(round=7, version=7),
        ServerEvaluated(version=3, metrics={}),
        WaitEnded(reason="too late to matter"),
    ):
        state, actions = advance(run.plan, run.state, event)
        assert state is run.state, event
        assert actions == (), event


def test_a_second_round_starts_from_the_committed_version() -> None:
    run = Run(make_plan(rounds=2, sites=False))
    run.start("a", "b")
    run.accept("a")
    run.accept("b")
    actions = run.commit(1)
    assert [(a.task.round, a.task.base_version) for a in actions if isinstance(a, SendTask)] == [(2, 1), (2, 1)]


def test_rounds_go_by_the_options_of_their_own_stage() -> None:
    """Deadline and quorum of round 3 are others, before and after a restart: `Run.tell` replays the journal each time."""
    later = Rounds(Rounds.Options(min=2, quorum=1, deadline=5.0))
    plan = make_plan(rounds=4, sites=True)
    run = Run(replace(plan, changes=(Change(from_round=3, schedule=later, evaluate_every=3),)))
    run.start("a", "b")
    assert run.state.timers == {"deadline/1": 600.0}
    for number in (1, 2):
        assert run.tell(TimerFired(name="none of a round")) == ()
        run.accept("a", number)
        run.accept("b", number)
        actions = run.commit(number)
        assert ("evaluate", "a", 1) in sent(actions)
        run.tell(EvaluationEnded(version=number))
    assert run.state.timers == {"deadline/3": 5.0}
    run.accept("a", 3)
    run.tell(TimerFired(name="deadline/3"))
    assert run.state.rounds[3].closing == ("a",), "the quorum of two would have ended the run"
    assert ("evaluate", "a", 1) in sent(run.commit(3))
    run.tell(EvaluationEnded(version=3))
    run.accept("b", 4)
    run.tell(Left(site="a", reason="gone"))
    assert run.state.rounds[4].closing == ("b",)
    assert plan.evaluates(4)
    assert [run.plan.evaluates(number) for number in (2, 3, 4)] == [True, True, True]
    assert not replace(run.plan, num_rounds=9).evaluates(4)
    assert run.plan.fewest_updates == 1


def test_a_lost_update_opens_the_round_again_with_the_next_attempt() -> None:
    """The server restarted, and the site has lost what it had sent: its task is given out anew."""
    run = Run(make_plan(rounds=1, sites=False))
    run.start("a", "b")
    run.accept("a")
    run.accept("b")
    assert run.state.rounds[1].closing
    actions = run.tell(TaskLost(task="r1.a", attempt=1, site="a", reason="disk replaced"))
    assert sent(actions) == [("train", "a", 2)]
    assert not run.state.rounds[1].closing
    run.accept("a", attempt=1)
    assert not run.state.rounds[1].closing, "an old attempt counts no more"
    run.accept("a", attempt=2)
    assert run.state.rounds[1].closing == ("a", "b")
    actions = run.tell(TaskLost(task="r1.a", attempt=2, site="a", reason="again"))
    assert sent(actions) == [("train", "a", 3)]


def test_a_site_that_is_gone_may_come_back_with_the_update_that_the_server_lost() -> None:
    """The server restarted, the lease ran out before the site was back, and its outbox still holds the update."""
    run = Run(make_plan(rounds=1, sites=False))
    run.start("a", "b")
    run.accept("a")
    run.accept("b")
    run.tell(Left(site="a", reason="not heard for 10 s"))
    assert sent(run.tell(TaskLost(task="r1.a", attempt=1, site="a", reason="not heard for 10 s"))) == []
    assert not run.state.rounds[1].closing
    assert run.state.tasks["r1.a"].attempt == 1, "the same attempt: nobody has to train again"
    run.tell(Joined(site="a", max_weight=100, labels={}))
    run.accept("a")
    assert run.state.rounds[1].closing == ("a", "b")


def counted(run: Run) -> dict[str, int]:
    """What the open training tasks say, by site."""
    messages = {task.site: task_message("R", task, run.state) for task in run.state.tasks.values()}
    return {site: message.counted_round for site, message in messages.items()}


def test_a_task_says_which_update_of_its_site_was_the_last_to_count() -> None:
    """A late update does not count. `Run.tell` replays the journal each time."""
    run = Run(make_plan(rounds=4, sites=False, quorum=2))
    run.start("a", "b", "c")
    assert counted(run) == {"a": 0, "b": 0, "c": 0}
    run.accept("a")
    run.accept("b")
    run.tell(TimerFired(name="deadline/1"))  # c is late
    run.commit(1)
    assert counted(run) == {"a": 1, "b": 1, "c": 0}
    run.accept("a", 2)
    run.accept("c", 2)
    run.tell(TimerFired(name="deadline/2"))
    run.commit(2)
    assert counted(run) == {"a": 2, "b": 1, "c": 2}


def test_an_update_that_was_lost_and_came_again_counts_once() -> None:
    run = Run(make_plan(sites=False))
    run.start("a", "b")
    run.accept("a")
    run.accept("b")
    run.tell(TaskLost(task="r1.b", attempt=1, site="b", reason="lost"))
    assert counted(run) == {"b": 0}
    run.accept("b", attempt=2)
    run.commit(1)
    assert counted(run) == {"a": 1, "b": 1}


def test_a_task_that_was_carried_over_counts_by_the_round_that_its_site_knows() -> None:
    plan = Plan(
        schedule=Buffered(Buffered.Options(k=1, min=2)),
        num_rounds=4,
        seed=1,
        evaluate_every=1,
        evaluate_at_sites=False,
        evaluate_at_server=False,
    )
    run = Run(plan)
    run.start("a", "b")
    run.accept("a")
    run.commit(1)
    assert counted(run) == {"a": 1, "b": 0}
    run.accept("b")  # its task is of round 1, its update counts in round 2
    run.commit(2)
    assert run.state.counted == {"a": 1, "b": 1}


def test_what_is_outstanding_after_a_restart() -> None:
    run = Run(make_plan(rounds=1, server=True))
    run.start("a", "b")
    run.accept("a")
    actions = outstanding(run.plan, run.state)
    assert sent(actions) == [("train", "b", 1)]
    assert OpenRound in kinds(actions)
    run.accept("b")
    assert CommitRound in kinds(outstanding(run.plan, run.state))
    run.commit(1)
    actions = outstanding(run.plan, run.state)
    assert [a.version for a in actions if isinstance(a, EvaluateHere)] == [1]
    assert sent(actions) == [("evaluate", "a", 1), ("evaluate", "b", 1)]
    run.tell(EvaluationEnded(version=1))
    assert outstanding(run.plan, run.state) == ()
    assert run.state.outcome is Outcome.FINISHED


def test_the_end_waits_for_the_evaluation_on_the_server_too() -> None:
    run = Run(make_plan(rounds=1, sites=False, server=True))
    run.start("a", "b")
    run.accept("a")
    run.accept("b")
    run.commit(1)
    assert run.is_in(Phase.FINISHING)
    run.tell(ServerEvaluated(version=1, metrics={"accuracy": (1.0, 1.0)}))
    assert run.is_in(Phase.ENDED)


def test_a_new_version_ends_the_evaluation_of_the_one_before() -> None:
    run = Run(make_plan(rounds=2))
    run.start("a", "b")
    run.accept("a")
    run.accept("b")
    run.commit(1)
    run.accept("a", 2)
    run.accept("b", 2)
    actions = run.commit(2)
    withdrawn = [a.task.task for a in actions if isinstance(a, WithdrawTask)]
    assert withdrawn == ["e1.a", "e1.b"]


def test_a_site_that_left_is_not_waited_for_by_its_evaluation() -> None:
    run = Run(make_plan(rounds=1))
    run.start("a", "b")
    run.accept("a")
    run.accept("b")
    run.commit(1)
    run.tell(SiteEvaluated(task="e1.a", attempt=1, site="a", metrics={}))
    run.tell(Left(site="b", reason="silent"))
    assert run.state.outcome is Outcome.FINISHED


def test_late_tasks_are_withdrawn_when_the_round_closes_at_its_quorum() -> None:
    run = Run(make_plan(rounds=1, quorum=1, sites=False))
    run.start("a", "b")
    run.accept("a")
    actions = run.tell(Left(site="b", reason="silent"))
    assert CommitRound in kinds(actions)
    assert [a.task.site for a in actions if isinstance(a, WithdrawTask)] == ["b"]
    run.commit(1)
    assert run.state.committed is not None
    assert run.state.committed.missing == ("b",)


@pytest.mark.parametrize(
    ("event", "outcome", "words"),
    [
        (StopAsked(by="ada"), Outcome.STOPPED, "ada"),
        (Broken(reason="database gone"), Outcome.FAILED, "database gone"),
    ],
)
def test_a_run_can_end_from_outside(event: RunEvent, outcome: Outcome, words: str) -> None:
    run = Run(make_plan())
    run.start("a", "b")
    actions = run.tell(event)
    assert [(a.outcome, words in a.reason) for a in actions if isinstance(a, EndRun)] == [(outcome, True)]
    assert outstanding(run.plan, run.state) == ()


def test_a_wait_that_ends_before_the_first_round_fails_the_run() -> None:
    run = Run(make_plan())
    run.tell(Joined(site="a", max_weight=1, labels={}))
    run.tell(WaitEnded(reason="b is not connected"))
    assert (run.state.outcome, run.state.reason) == (Outcome.FAILED, "b is not connected")


def test_a_failed_task_without_a_quorum_gives_up_and_names_it() -> None:
    run = Run(make_plan())
    run.start("a", "b")
    run.accept("a")
    run.tell(TaskLost(task="r1.b", attempt=1, site="b", reason="the app raised"))
    assert run.state.outcome is Outcome.FAILED
    assert "b" in run.state.reason
    assert "the app raised" in run.state.reason


def test_a_journal_entry_of_a_newer_version_is_refused() -> None:
    with pytest.raises(ValueError, match="newer version"):
        decode_event(b'{"event": "Teleported", "site": "a"}')
