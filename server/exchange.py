"""Rounds of gossip in the state of a run: tasks whose results stay at their sites, and what is known of those models."""

from __future__ import annotations

from dataclasses import replace

from atoll.aggregation.schedule import Introduce, Met, ModelLost, Trained, TrainOwn
from atoll.aggregation.schedules.gossip import GossipState, Start
from atoll.server.events import ModelKept, PeerMet, TaskLost
from atoll.server.run_state import Exchanging, KeptModel, Phase, RunAction, RunState, SendTask, Task


def do(state: RunState, action: TrainOwn | Introduce) -> tuple[RunState, tuple[RunAction, ...]]:
    """What the schedule wants of a round: a task for each of its sites, or that neighbours are introduced."""
    if isinstance(action, Introduce):
        return state, (Exchanging(round=action.round),)
    tasks = {
        f"g{action.round}.{site}": Task(
            task=f"g{action.round}.{site}",
            attempt=1,
            site=site,
            kind="exchange",
            round=action.round,
            base_version=action.base_version,
        )
        for site in sorted(action.sites)
    }
    state = replace(state, phase=Phase.RUNNING, tasks={**state.tasks, **tasks})
    return state, (Exchanging(round=action.round), *(SendTask(task=task) for task in tasks.values()))


def outstanding(state: RunState) -> tuple[RunAction, ...]:
    """What a server that comes back has to do beside the tasks; sites are introduced as they attach."""
    return (Exchanging(round=state.schedule.round),) if isinstance(state.schedule, GossipState) else ()


def kept(state: RunState, event: ModelKept) -> tuple[RunState, Trained] | None:
    """A site holds the model of an open task; None where nobody waits for it."""
    task = state.tasks.get(event.task)
    if task is None or task.kind != "exchange" or (task.site, task.attempt) != (event.site, event.attempt):
        return None
    model = KeptModel(task=event.task, attempt=event.attempt, round=task.round, crc32=event.crc32)
    tasks = {name: other for name, other in state.tasks.items() if name != event.task}
    state = replace(state, tasks=tasks, kept={**state.kept, event.site: model})
    return state, Trained(site=event.site, round=task.round)


def lost(state: RunState, event: TaskLost) -> tuple[RunState, ModelLost] | None:
    """A site does not hold its model any more; None where it was not known to."""
    model = state.kept.get(event.site)
    if model is None or (model.task, model.attempt) != (event.task, event.attempt):
        return None
    state = replace(state, kept={site: other for site, other in state.kept.items() if site != event.site})
    return state, ModelLost(site=event.site, round=model.round, reason=event.reason)


def met(event: PeerMet) -> Met:
    """The report as the schedule hears it."""
    return Met(
        site=event.site,
        peer=event.peer,
        round=event.round,
        received=event.received,
        reason=event.reason,
        tried=event.tried,
    )


def start_of(state: RunState, task: Task) -> Start | None:
    """The site's own model as its task begins with it, or is compared with the version of the task's round."""
    if not isinstance(state.schedule, GossipState):
        return None
    start = state.schedule.start_of(task.site)
    if start is None or start.round > task.round or (task.kind == "evaluate" and start.round != task.round):
        return None
    return start
