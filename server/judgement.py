"""Which version is the best so far, and whether a run should end since none gets better: pure, from the run's journal.

A version is judged once: when the last evaluation that is asked for is in, or when a newer version is there to be
evaluated; then what has come in by that time counts, which is what people see of it too. Versions are judged in
their order. One of which nothing is known, since nobody answered, counts neither for nor against.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from atoll.aggregation.metrics import MetricRules, value_of
from atoll.server.run_state import Evaluation, Judgement, RunState
from atoll.wire.job import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """By what versions are told apart. `patience` None: the run is never ended early."""

    metric: str
    mode: Literal["max", "min"]
    at: Literal["sites", "server"]
    rules: MetricRules
    patience: int | None = None
    min_delta: float = 0.0

    def improves(self, value: float, than: float | None, by: float = 0.0) -> bool:
        """Whether `value` is better than the other one by more than `by`."""
        if than is None:
            return True
        return value > than + by if self.mode == "max" else value < than - by

    def stop_reason(self, state: Judgement, round_: int) -> str:
        """Why the run is over after the evaluation of a round; "" where it goes on."""
        if self.patience is None or state.without < self.patience:
            return ""
        by = f"by more than {self.min_delta:g} " if self.min_delta else ""
        return (
            f"early stop after round {round_}: {self.metric} at the {self.at} has not improved {by}in "
            f"{state.without} evaluations; best {state.value:.6g} in round {state.round}, version {state.version}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The run with its new versions judged. `stop`: why it should end; `fault`: why it cannot be judged."""

    state: RunState
    stop: str = ""
    fault: str = ""


def judge_of(job: Job) -> Judge | None:
    """What a job says. Raises ConfigError where an aggregation of `evaluation.metrics` is not known here."""
    if job.best is None:
        return None
    early = job.control.early_stop if job.control is not None else None
    return Judge(
        metric=job.best.metric,
        mode=job.best.mode,
        at=job.best.at,
        rules=MetricRules(job),
        patience=early.patience if early is not None else None,
        min_delta=early.min_delta if early is not None else 0.0,
    )


def judged(judge: Judge, state: RunState) -> Verdict:
    """Judges what can be judged now; where that is nothing, the verdict holds the same state."""
    verdict = Verdict(state=state)
    for version in sorted(state.evaluations):
        evaluation = state.evaluations[version]
        if not evaluation.judged and not _awaited(judge, state, version, evaluation):
            verdict = _judge_one(judge, verdict, version, evaluation)
    return verdict


def _awaited(judge: Judge, state: RunState, version: int, evaluation: Evaluation) -> bool:
    if judge.at == "server":
        return evaluation.server_pending
    return any(task.kind == "evaluate" and task.base_version == version for task in state.tasks.values())


def _judge_one(judge: Judge, before: Verdict, version: int, evaluation: Evaluation) -> Verdict:
    state = before.state
    evaluations = {**state.evaluations, version: replace(evaluation, judged=True)}
    metrics = judge.rules.combine(evaluation.by_site) if judge.at == "sites" else evaluation.at_server
    value = value_of(metrics, judge.metric)
    if value is None:
        fault = before.fault
        if metrics and not state.judgement.version:
            fault = (
                f"control.best.metric = {judge.metric!r}: the evaluation of version {version} at the {judge.at} has no "
                f"such metric; it has {', '.join(sorted(metrics))}: correct the job and submit it again"
            )
        return replace(before, state=replace(state, evaluations=evaluations), fault=fault)
    known = state.judgement
    better = judge.improves(value, known.reference, judge.min_delta)
    reference, without = (value, 0) if better else (known.reference, known.without + 1)
    if judge.improves(value, known.value if known.version else None):
        known = replace(known, version=version, round=evaluation.round, value=value)
    judgement = replace(known, reference=reference, without=without)
    state = replace(state, evaluations=evaluations, judgement=judgement)
    return replace(before, state=state, stop=judge.stop_reason(judgement, evaluation.round))
