"""The beginning of an evaluation in the state of a run: who is asked to judge a version, and who is not waited for."""

from __future__ import annotations

from dataclasses import replace

from atoll.aggregation.schedule import Committed
from atoll.server.dispatch import without
from atoll.server.events import EvaluationAsked
from atoll.server.run_state import EvaluateHere, Evaluation, Plan, RunAction, RunState, SendTask, Task, WithdrawTask


def open_evaluation(
    plan: Plan, state: RunState, event: Committed | EvaluationAsked
) -> tuple[RunState, tuple[RunAction, ...]]:
    """Tasks for all members, and for the server; give up on the evaluation before the last."""
    stale = [task for task in state.tasks.values() if task.kind == "evaluate"]
    tasks = without(state.tasks, stale)
    actions: list[RunAction] = [
        WithdrawTask(task=task, reason=f"version {event.version} is there to be evaluated") for task in stale
    ]
    if plan.evaluate_at_sites:
        for site in sorted(state.members):
            task = Task(
                task=f"e{event.version}.{site}",
                attempt=1,
                site=site,
                kind="evaluate",
                round=event.round,
                base_version=event.version,
            )
            tasks[task.task] = task
            actions.append(SendTask(task=task))
    if plan.evaluate_at_server:
        actions.append(EvaluateHere(version=event.version))
    wanted = {
        version: e for version, e in state.evaluations.items() if e.server_pending or version == max(state.evaluations)
    }
    evaluation = Evaluation(round=event.round, server_pending=plan.evaluate_at_server)
    return replace(state, tasks=tasks, evaluations={**wanted, event.version: evaluation}), tuple(actions)
