"""Which version is the best and when a run ends early: from the journal alone, so that a killed server decides the same."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.aggregation.schedule import Committed, Joined, Left, Ready
from atoll.server.events import (
    EvaluationEnded,
    RunEvent,
    ServerEvaluated,
    SiteEvaluated,
    StopAsked,
    UpdateAccepted,
    decode_event,
    encode_event,
)
from atoll.server.judgement import Judge, judge_of
from atoll.server.plan import plan_of
from atoll.server.run import advance, begin, kept_for_good, replay
from atoll.server.run_state import EndRun, Outcome, Phase, RunAction, RunState
from atoll.wire.job import Job, parse_job


def job(*, rounds: int = 50, at: str = "sites", mode: str = "max", early: object = None, **more: object) -> Job:
    control: dict[str, object] = {"best": {"metric": "accuracy", "at": at, "mode": mode}}
    if early is not None:
        control["early_stop"] = early
    return parse_job(
        {
            "job": {"name": "trial", "app": "trial", "rounds": rounds},
            "strategy": {"schedule": {"kind": "rounds", "min": 2}},
            "evaluation": {"sites": at == "sites", "server": at == "server", **more},
            "control": control,
        }
    )


class Run:
    """Two sites that do round after round. After each event a second server replays the journal to the same state."""

    def __init__(self, of: Job) -> None:
        self.plan = plan_of(of)
        self.state: RunState = begin(self.plan)
        self.events: list[RunEvent] = []
        self.actions: list[RunAction] = []
        for site in ("a", "b"):
            self.tell(Joined(site=site, max_weight=100, labels={}))
        self.tell(Ready())

    def tell(self, event: RunEvent) -> None:
        state, actions = advance(self.plan, self.state, event)
        if state is not self.state:
            self.events.append(decode_event(encode_event(event)))
        self.state = state
        self.actions += actions
        assert replay(self.plan, self.events) == self.state

    def commit(self, number: int) -> None:
        for site in ("a", "b"):
            accepted = UpdateAccepted(
                task=f"r{number}.{site}", attempt=1, site=site, round=number, weight=1, metrics={}
            )
            self.tell(accepted)
        self.tell(Committed(round=number, version=number))

    def judge(self, version: int, *values: float, sites: str = "ab") -> None:
        for site, value in zip(sites, values, strict=True):
            metrics = {"accuracy": (10 * value, 10.0)}
            self.tell(SiteEvaluated(task=f"e{version}.{site}", attempt=1, site=site, metrics=metrics))

    @property
    def best(self) -> tuple[int, int]:
        return self.state.judgement.version, self.state.judgement.round

    @property
    def ends(self) -> list[EndRun]:
        return [action for action in self.actions if isinstance(action, EndRun)]


def rounds_with(run: Run, values: list[float]) -> None:
    for number, value in enumerate(values, start=1):
        if run.state.phase is Phase.ENDED:
            return
        run.commit(number)
        run.judge(number, *(value, value)[: len(run.state.members)])


@pytest.mark.parametrize(
    ("values", "last", "best"),
    [
        ([0.5, 0.6, 0.7, 0.7, 0.7, 0.7, 0.9], 6, 3),
        ([0.5, 0.4, 0.3, 0.2], 4, 1),
        ([0.5, 0.4, 0.6, 0.5, 0.4, 0.3], 6, 3),
    ],
    ids=["a plateau", "from the first on", "a rise starts the count anew"],
)
def test_a_run_ends_when_its_metric_has_not_improved_for_so_long(values: list[float], last: int, best: int) -> None:
    run = Run(job(early={"patience": 3}))
    rounds_with(run, values)
    assert run.state.outcome is Outcome.FINISHED
    assert run.state.version == last
    assert run.best == (best, best)
    reason = (
        f"early stop after round {last}: accuracy at the sites has not improved in 3 evaluations; best "
        f"{values[best - 1]:.6g} in round {best}, version {best}"
    )
    assert [end.reason for end in run.ends] == [reason]
    detail = run.ends[0].detail("run")
    assert detail is not None
    assert (detail.kind, detail.message) == ("", run.ends[0].reason)


def test_less_than_min_delta_is_no_improvement_but_is_the_best() -> None:
    run = Run(job(early={"patience": 3, "min_delta": 0.05}))
    rounds_with(run, [0.5, 0.52, 0.54, 0.53, 0.9])
    assert run.state.outcome is Outcome.FINISHED
    assert run.state.version == 4, "0.52, 0.54 and 0.53 are within 0.05 of 0.5"
    assert run.best == (3, 3)


def test_small_steps_that_add_up_are_an_improvement() -> None:
    run = Run(job(early={"patience": 3, "min_delta": 0.05}))
    rounds_with(run, [0.5, 0.53, 0.56, 0.59, 0.62, 0.65])
    assert run.state.phase is Phase.RUNNING
    assert run.best == (6, 6)


def test_the_lowest_is_the_best_where_the_job_says_so() -> None:
    run = Run(job(mode="min", early={"patience": 2}))
    rounds_with(run, [0.5, 0.3, 0.4, 0.35])
    assert run.best == (2, 2)
    assert run.state.outcome is Outcome.FINISHED


def test_examples_weigh_and_not_sites() -> None:
    run = Run(job())
    run.commit(1)
    run.tell(SiteEvaluated(task="e1.a", attempt=1, site="a", metrics={"accuracy": (90.0, 100.0)}))
    run.tell(SiteEvaluated(task="e1.b", attempt=1, site="b", metrics={"accuracy": (0.0, 10.0)}))
    assert run.state.judgement.value == pytest.approx(90 / 110)


def test_a_version_that_is_overtaken_counts_with_those_who_answered() -> None:
    run = Run(job())
    run.commit(1)
    run.judge(1, 0.9, sites="a")
    assert run.best == (0, 0), "b may still answer"
    run.commit(2)
    assert run.best == (1, 1)
    run.commit(3)
    assert run.best == (1, 1), "nobody judged version 2"
    assert run.state.judgement.without == 0


def test_a_site_that_leaves_is_not_waited_for() -> None:
    run = Run(job())
    run.commit(1)
    run.judge(1, 0.9, sites="a")
    run.tell(Left(site="b", reason="silent"))
    assert run.best == (1, 1)


def test_the_server_may_judge() -> None:
    run = Run(job(at="server", early={"patience": 1}))
    run.commit(1)
    run.tell(ServerEvaluated(version=1, metrics={"accuracy": (5.0, 10.0)}))
    run.commit(2)
    run.tell(ServerEvaluated(version=2, metrics={}, error="no room on the device"))
    assert run.state.judgement.without == 0, "an evaluation that failed is not one that got worse"
    run.commit(3)
    run.tell(ServerEvaluated(version=3, metrics={"accuracy": (4.0, 10.0)}))
    assert run.state.outcome is Outcome.FINISHED
    assert "at the server" in run.state.reason


def test_a_metric_that_no_evaluation_has_ends_the_run_and_names_those_there_are() -> None:
    run = Run(job())
    run.commit(1)
    for site in ("a", "b"):
        run.tell(SiteEvaluated(task=f"e1.{site}", attempt=1, site=site, metrics={"f1": (1.0, 1.0), "loss": (1.0, 1.0)}))
    assert run.state.outcome is Outcome.FAILED
    assert "control.best.metric = 'accuracy'" in run.state.reason
    assert "f1, loss" in run.state.reason


def test_so_it_does_where_the_run_would_have_finished_with_it() -> None:
    run = Run(job(rounds=1))
    run.commit(1)
    for site in ("a", "b"):
        run.tell(SiteEvaluated(task=f"e1.{site}", attempt=1, site=site, metrics={"f1": (1.0, 1.0)}))
    assert [end.outcome for end in run.ends] == [Outcome.FAILED]


def test_the_last_version_may_be_the_best() -> None:
    run = Run(job(rounds=2))
    rounds_with(run, [0.5, 0.6])
    assert (run.state.outcome, run.state.reason) == (Outcome.FINISHED, "")
    assert run.best == (2, 2)


def test_a_run_that_is_stopped_judges_nothing_by_half() -> None:
    run = Run(job())
    rounds_with(run, [0.5])
    run.commit(2)
    run.judge(2, 0.9, sites="a")
    run.tell(StopAsked(by="ada"))
    assert run.best == (1, 1)


def test_the_best_version_is_kept_on_disk() -> None:
    run = Run(job())
    rounds_with(run, [0.5, 0.9, 0.4, 0.3, 0.2])
    assert kept_for_good(run.plan, run.state) >= {0, 2, 5}


def test_the_best_by_a_metric_that_the_job_makes_itself() -> None:
    metrics = {"accuracy": {"of": "accuracy", "by": "min"}}
    run = Run(job(metrics=metrics))
    run.commit(1)
    run.judge(1, 0.9, 0.1)
    run.commit(2)
    run.judge(2, 0.4, 0.3)
    assert run.best == (2, 2), "its worst site is better, though the mean is not"


def test_nobody_waits_for_evaluations_for_ever() -> None:
    run = Run(job(rounds=1))
    run.commit(1)
    run.judge(1, 0.7, sites="a")
    run.tell(EvaluationEnded(version=1))
    assert run.state.outcome is Outcome.FINISHED
    assert run.best == (1, 1)


def test_equal_values_do_not_move_the_best() -> None:
    judge = judge_of(job())
    assert isinstance(judge, Judge)
    assert not judge.improves(0.5, 0.5)
    assert judge.improves(0.5, None)


def test_a_run_that_goes_on_numbers_its_rounds_on() -> None:
    plan = replace(plan_of(job(rounds=5)), done_rounds=3, first_version=3)
    state = begin(plan)
    events: list[RunEvent] = [*(Joined(site=site, max_weight=1, labels={}) for site in ("a", "b")), Ready()]
    for event in events:
        state, _ = advance(plan, state, event)
    assert {task.task: task.base_version for task in state.tasks.values()} == {"r4.a": 3, "r4.b": 3}
    for number in (4, 5):
        for site in ("a", "b"):
            accepted = UpdateAccepted(
                task=f"r{number}.{site}", attempt=1, site=site, round=number, weight=1, metrics={}
            )
            state, _ = advance(plan, state, accepted)
        state, _ = advance(plan, state, Committed(round=number, version=number))
    assert state.phase is Phase.FINISHING
    assert kept_for_good(plan, state) >= {3, 5}
