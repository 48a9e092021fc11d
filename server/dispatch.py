"""A round's tasks in the state of a run: given out, and taken back where a region has no part in the round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from atoll.aggregation.schedule import Dispatch
from atoll.server.events import TaskLost
from atoll.server.round import Round, Secured
from atoll.server.run_state import OpenRound, Phase, RunAction, RunState, SendTask, Task, WithdrawTask


def dispatch(state: RunState, action: Dispatch) -> tuple[RunState, tuple[RunAction, ...]]:
    """New tasks for `action.sites`; a site that was asked before in this round gets the next attempt.

    Tasks of `action.carried` go on: their updates count in this round.
    """
    before = state.abandoned if state.abandoned and state.abandoned.number == action.round else None
    round_ = state.rounds.get(action.round) or Round(
        number=action.round,
        base_version=action.base_version,
        asked=before.asked if before else {},
        max_weight=action.max_weight,
        room=action.num_sites,
        secured={part: Secured(session=one.session, revealed=one.revealed) for part, one in before.secured.items()}
        if before
        else {},
    )
    below = {site: state.members[site].num_sites for site in action.sites if site in state.members}
    regions = {site: num_sites for site, num_sites in below.items() if num_sites}
    round_ = round_.extended(action.sites, action.max_weight, regions, action.num_sites)
    if action.branch is not None:
        round_ = round_.grouped(action.sites, action.branch, action.max_weight)
    tasks, rounds = dict(state.tasks), dict(state.rounds)
    for task in [task for task in tasks.values() if task.kind == "train" and task.site in action.carried]:
        tasks[task.task] = replace(task, round=action.round, dispatched=task.given_in)
        round_ = round_.carrying(task.site, task.attempt, task.base_version)
        if (earlier := rounds.get(task.round)) is not None:
            rounds[task.round] = earlier.without(frozenset((task.site,)))
    sends: list[RunAction] = []
    for site in sorted(action.sites):
        task = Task(
            task=f"r{action.round}.{site}",
            attempt=round_.asked[site],
            site=site,
            kind="train",
            round=action.round,
            base_version=action.base_version,
        )
        tasks[task.task] = task
        sends.append(SendTask(task=task))
    state = replace(state, phase=Phase.RUNNING, tasks=tasks, rounds={**rounds, action.round: round_})
    return state, (OpenRound(round=round_), *sends)


def abandon(state: RunState, number: int, reason: str) -> tuple[RunState, tuple[RunAction, ...]]:
    """The round without its tasks; should it be asked for again, its sites get higher attempts."""
    round_ = state.rounds.get(number)
    gone = [task for task in state.tasks.values() if task.kind == "train" and task.round == number]
    none = Round(number=number, base_version=state.version, asked={}, max_weight=1)
    state = replace(
        state,
        rounds={other: open_ for other, open_ in state.rounds.items() if other != number},
        tasks=without(state.tasks, gone),
        abandoned=round_ or none,
        abandoned_reason=reason,
    )
    return state, tuple(WithdrawTask(task=task, reason=reason) for task in gone)


def asked_for(round_: Round, event: TaskLost) -> Task:
    """The training that a lost update came from, as it was asked for."""
    return Task(
        task=event.task,
        attempt=event.attempt,
        site=event.site,
        kind="train",
        round=round_.number,
        base_version=round_.bases.get(event.site, round_.base_version),
        dispatched=round_.updates[event.site].dispatched,
    )


def without(tasks: Mapping[str, Task], gone: Sequence[Task]) -> dict[str, Task]:
    """The open tasks but for those that are `gone`."""
    names = {task.task for task in gone}
    return {name: task for name, task in tasks.items() if name not in names}
