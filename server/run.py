"""A run as a state table without I/O: an event and a state give the next state and what is to be done.

::

    WAITING --(first dispatch)--> RUNNING --(schedule stops)--> FINISHING --(evaluations in)--> ENDED
       |                             |                              |
       `--------- gives up, stopped, broken: straight to ENDED -----'

`advance` is deterministic, so replaying a journal gives the state that was lost with the process, and `outstanding`
gives what was still to be done. An event that changes nothing returns the state that it was given, the same object.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from atoll.aggregation.schedule import (
    Abandon,
    Accepted,
    Action,
    Asked,
    Cancel,
    Close,
    Committed,
    Dispatch,
    Failed,
    GiveUp,
    GossipEvent,
    Introduce,
    Joined,
    Left,
    Ready,
    SetTimer,
    Stop,
    TimerFired,
    TrainOwn,
    Withdrawn,
    initial,
)
from atoll.aggregation.schedule import Event as ScheduleEvent
from atoll.server import counted, exchange, secured
from atoll.server.dispatch import abandon, asked_for, dispatch, without
from atoll.server.evaluations import open_evaluation
from atoll.server.events import (
    Broken,
    Continued,
    Delegated,
    EndedAbove,
    EvaluationAsked,
    EvaluationEnded,
    ModelKept,
    PeerMet,
    RunEvent,
    ServerEvaluated,
    SiteEvaluated,
    StopAsked,
    TaskLost,
    UpdateAccepted,
    WaitEnded,
)
from atoll.server.judgement import Judge, judged
from atoll.server.round import Round, Update
from atoll.server.run_state import (
    AnnounceCommit,
    ArmTimer,
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
from atoll.server.secure_events import GivenUp, SecureEvent

Step = tuple[RunState, tuple[RunAction, ...]]


def begin(plan: Plan) -> RunState:
    """The state of a run that nobody has joined yet."""
    schedule = initial(plan.schedule, plan.num_rounds, plan.seed, plan.done_rounds, plan.first_version)
    return RunState(phase=Phase.WAITING, schedule=schedule, version=plan.first_version)


def advance(plan: Plan, state: RunState, event: RunEvent) -> Step:
    """The state after `event`, and what is to be done, in order."""
    if state.phase is Phase.ENDED:
        return state, ()
    state, actions = _TABLE[type(event)](plan, state, event)
    return (state, actions) if plan.judge is None else _judged(plan, plan.judge, state, actions)


def replay(plan: Plan, events: Sequence[RunEvent]) -> RunState:
    """The state that these events lead to."""
    state = begin(plan)
    for event in events:
        state, _ = advance(plan, state, event)
    return state


def end_of(state: RunState) -> EndRun:
    """What is to be done about a run that is over."""
    return EndRun(outcome=state.outcome, reason=state.reason, our_fault=state.our_fault, bad_updates=state.bad_updates)


def kept_for_good(plan: Plan, state: RunState) -> set[int]:
    """Versions that stay on disk as long as the run does."""
    return {plan.first_version, state.judgement.version, state.version}


def outstanding(plan: Plan, state: RunState) -> tuple[RunAction, ...]:
    """What a server that comes back has still to do. All of it may be done twice without harm."""
    if state.phase is Phase.ENDED:
        return ()
    actions: list[RunAction] = [OpenRound(round=round_) for round_ in state.rounds.values()]
    actions += exchange.outstanding(state)
    actions += [ArmTimer(name=name, after_s=after_s) for name, after_s in state.timers.items()]
    actions += [SendTask(task=task) for task in state.tasks.values()]
    actions += [CommitRound(round=round_) for round_ in state.rounds.values() if round_.closing]
    actions += [EvaluateHere(version=version) for version, e in state.evaluations.items() if e.server_pending]
    return tuple(actions)


# --- the table: one function per event ------------------------------------------------------------------------------


def _joined(plan: Plan, state: RunState, event: Joined) -> Step:
    if event.site in state.members:
        return state, ()
    former = {site: member for site, member in state.former.items() if site != event.site}
    state = replace(state, members={**state.members, event.site: event}, former=former)
    return _tell_schedule(plan, state, event)


def _left(plan: Plan, state: RunState, event: Left) -> Step:
    member = state.members.get(event.site)
    if member is None:
        return state, ()
    members = {site: other for site, other in state.members.items() if site != event.site}
    evaluations = [task for task in state.tasks.values() if task.site == event.site and task.kind == "evaluate"]
    state = replace(
        state,
        members=members,
        former={**state.former, event.site: member},
        tasks=without(state.tasks, evaluations),
    )
    state, actions = _tell_schedule(plan, state, event)
    state, more = _finish_if_done(plan, state)
    return state, actions + more


def _to_schedule(plan: Plan, state: RunState, event: Ready | Asked | Withdrawn) -> Step:
    return _tell_schedule(plan, counted.asked(state, event) if isinstance(event, Asked) else state, event)


def _timer(plan: Plan, state: RunState, event: TimerFired) -> Step:
    if event.name not in state.timers:
        return state, ()
    timers = {name: after_s for name, after_s in state.timers.items() if name != event.name}
    return _tell_schedule(plan, replace(state, timers=timers), event)


def _accepted(plan: Plan, state: RunState, event: UpdateAccepted) -> Step:
    task = state.tasks.get(event.task)
    round_ = state.rounds.get(task.round) if task is not None else None
    if task is None or round_ is None or task.attempt != event.attempt or event.site in round_.updates:
        return state, ()
    update = Update(
        task=event.task,
        attempt=event.attempt,
        weight=event.weight,
        metrics=event.metrics,
        dispatched=task.dispatched,
        statistics=event.statistics,
    )
    state = replace(
        state,
        tasks=without(state.tasks, [task]),
        rounds={**state.rounds, round_.number: round_.accepted(event.site, update)},
    )
    accepted = Accepted(site=event.site, round=round_.number, base_version=task.base_version, weight=event.weight)
    return _tell_schedule(plan, state, accepted)


def _lost(plan: Plan, state: RunState, event: TaskLost) -> Step:
    task = state.tasks.get(event.task)
    if task is not None and task.attempt == event.attempt:
        state = replace(state, tasks=without(state.tasks, [task]))
        if task.kind == "evaluate":
            return _finish_if_done(plan, state)
        failed = Failed(site=event.site, round=task.round, reason=event.reason)
        return _tell_schedule(plan, state, failed)
    for round_ in state.rounds.values():
        update = round_.updates.get(event.site)
        if update is not None and (update.task, update.attempt) == (event.task, event.attempt):
            state = replace(state, rounds={**state.rounds, round_.number: round_.lost(event.site)})
            if event.site not in state.members:  # it may come back, with its update still in its outbox
                state = replace(state, tasks={**state.tasks, event.task: asked_for(round_, event)})
            failed = Failed(site=event.site, round=round_.number, reason=event.reason)
            return _tell_schedule(plan, state, failed)
    return _heard(plan, state, exchange.lost(state, event))


def _heard(plan: Plan, state: RunState, found: tuple[RunState, GossipEvent] | None) -> Step:
    """What follows from a report that may change nothing."""
    return (state, ()) if found is None else _tell_schedule(plan, *found)


def _committed(plan: Plan, state: RunState, event: Committed) -> Step:
    round_ = state.rounds.get(event.round)
    if round_ is None:
        if not plan.delegated or event.version <= state.version:
            return state, ()
        # Committed by the upper server without this region.
        round_ = Round(number=event.round, base_version=state.version, asked={}, max_weight=1)
    late = [task for task in state.tasks.values() if task.kind == "train" and task.round == event.round]
    state = replace(
        counted.committed(state, round_, delegated=plan.delegated),
        version=event.version,
        committed=round_,
        rounds={number: other for number, other in state.rounds.items() if number != event.round},
        tasks=without(state.tasks, late),
    )
    actions: list[RunAction] = [AnnounceCommit(round=event.round, version=event.version)]
    actions += [WithdrawTask(task=task, reason=f"round {event.round} is closed") for task in late]
    state, evaluations = (state, ()) if plan.delegated else _evaluate(plan, state, event)
    state, more = _tell_schedule(plan, state, event)
    return state, (*actions, *evaluations, *more)


def _evaluate(plan: Plan, state: RunState, event: Committed) -> Step:
    """Ask for the evaluation of a new version, where the plan wants one of it."""
    return open_evaluation(plan, state, event) if plan.evaluates(event.round) else (state, ())


def _evaluation_asked(plan: Plan, state: RunState, event: EvaluationAsked) -> Step:
    return (state, ()) if event.version in state.evaluations else open_evaluation(plan, state, event)


def _site_evaluated(plan: Plan, state: RunState, event: SiteEvaluated) -> Step:
    task = state.tasks.get(event.task)
    if task is None or task.attempt != event.attempt:
        return state, ()
    evaluation = state.evaluations[task.base_version]
    evaluation = replace(evaluation, by_site={**evaluation.by_site, event.site: event.metrics})
    state = replace(
        state,
        tasks=without(state.tasks, [task]),
        evaluations={**state.evaluations, task.base_version: evaluation},
    )
    return _finish_if_done(plan, state)


def _server_evaluated(plan: Plan, state: RunState, event: ServerEvaluated) -> Step:
    evaluation = state.evaluations.get(event.version)
    if evaluation is None or not evaluation.server_pending:
        return state, ()
    evaluation = replace(evaluation, at_server=event.metrics, server_pending=False)
    return _finish_if_done(plan, replace(state, evaluations={**state.evaluations, event.version: evaluation}))


def _evaluation_ended(plan: Plan, state: RunState, event: EvaluationEnded) -> Step:
    late = [task for task in state.tasks.values() if task.kind == "evaluate" and task.base_version <= event.version]
    evaluations = {
        version: replace(e, server_pending=False) if version <= event.version else e
        for version, e in state.evaluations.items()
    }
    state = replace(state, tasks=without(state.tasks, late), evaluations=evaluations)
    state, actions = _finish_if_done(plan, state)
    return state, (*(WithdrawTask(task=task, reason="the run is over") for task in late), *actions)


def _wait_ended(plan: Plan, state: RunState, event: WaitEnded) -> Step:
    if state.phase is not Phase.WAITING:
        return state, ()
    return _end(state, Outcome.FAILED, event.reason)


def _stop_asked(plan: Plan, state: RunState, event: StopAsked) -> Step:
    return _end(state, Outcome.STOPPED, f"stopped by {event.by}")


def _given_up(plan: Plan, state: RunState, event: GivenUp) -> Step:
    if plan.delegated:  # the upper server's round may go on without this region
        return _tell_schedule(plan, state, Withdrawn(round=event.round, reason=event.reason))
    return _end(state, Outcome.FAILED, event.reason)


def _broken(plan: Plan, state: RunState, event: Broken) -> Step:
    state = replace(state, our_fault=event.ours, bad_updates=not event.ours)
    return _end(state, Outcome.FAILED, event.reason)


_TABLE: Mapping[type, Callable[[Plan, RunState, Any], Step]] = {
    Joined: _joined,
    Left: _left,
    Ready: _to_schedule,
    TimerFired: _timer,
    Committed: _committed,
    UpdateAccepted: _accepted,
    TaskLost: _lost,
    ModelKept: lambda plan, state, event: _heard(plan, state, exchange.kept(state, event)),
    PeerMet: lambda plan, state, event: _heard(plan, state, (state, exchange.met(event))),
    SiteEvaluated: _site_evaluated,
    ServerEvaluated: _server_evaluated,
    EvaluationEnded: _evaluation_ended,
    WaitEnded: _wait_ended,
    StopAsked: _stop_asked,
    Broken: _broken,
    Delegated: lambda plan, state, event: (state, ()),  # the plan was made from it
    Continued: lambda plan, state, event: (state, ()),  # so it was from this
    Asked: _to_schedule,
    Withdrawn: _to_schedule,
    EvaluationAsked: _evaluation_asked,
    EndedAbove: lambda plan, state, event: _end(state, Outcome(event.outcome), event.reason),
    **dict.fromkeys(SecureEvent.__args__, lambda plan, state, event: (secured.heard(state, event), ())),
    GivenUp: _given_up,
}


# --- what the schedule wants ----------------------------------------------------------------------------------------


def _tell_schedule(plan: Plan, state: RunState, event: ScheduleEvent | GossipEvent) -> Step:
    told: Any = event  # those of gossip go to no other schedule: only its actions bring them about
    inner, wanted = plan.schedule_of(state.concerns(plan, event)).on(state.schedule, told)
    if inner != state.schedule:
        state = replace(state, schedule=inner)
    done: list[RunAction] = []
    for action in wanted:
        state, more = _do(plan, state, action)
        done += more
    return state, tuple(done)


def _do(plan: Plan, state: RunState, action: Action) -> Step:
    match action:
        case Dispatch():
            return dispatch(state, action)
        case Close(round=number, sites=sites):
            round_ = counted.closed(state, state.rounds[number], sites)
            return replace(state, rounds={**state.rounds, number: round_}), (CommitRound(round=round_),)
        case Cancel(round=number, sites=sites, reason=reason):
            gone = [t for t in state.tasks.values() if t.kind != "evaluate" and t.round == number and t.site in sites]
            state = replace(state, tasks=without(state.tasks, gone))
            return state, tuple(WithdrawTask(task=task, reason=reason) for task in gone)
        case SetTimer(name=name, after_s=after_s):
            timers = {other: s for other, s in state.timers.items() if other != name}
            if after_s > 0:
                timers[name] = after_s
            return replace(state, timers=timers), (ArmTimer(name=name, after_s=after_s),)
        case TrainOwn() | Introduce():
            return exchange.do(state, action)
        case Abandon(round=number, reason=reason):
            return abandon(state, number, reason)
        case GiveUp(reason=reason):
            return _end(state, Outcome.FAILED, reason)
        case Stop():
            return _finish_if_done(plan, replace(state, phase=Phase.FINISHING))


def _finish_if_done(plan: Plan, state: RunState) -> Step:
    waiting = any(task.kind == "evaluate" for task in state.tasks.values())
    waiting = waiting or any(e.server_pending for e in state.evaluations.values())
    if state.phase is not Phase.FINISHING or waiting:
        return state, ()
    return _end(state, Outcome.FINISHED, "")


def _judged(plan: Plan, judge: Judge, state: RunState, actions: tuple[RunAction, ...]) -> Step:
    """What an event led to, with what it told of versions: a run may be over by it."""
    if state.phase is Phase.ENDED and state.outcome is not Outcome.FINISHED:
        return state, actions
    verdict = judged(judge, state)
    if verdict.fault:
        state, ends = _end(replace(verdict.state, bad_updates=True), Outcome.FAILED, verdict.fault)
        return state, (*(action for action in actions if not isinstance(action, EndRun)), *ends)
    if verdict.stop and state.phase is Phase.RUNNING:
        state, ends = _end(verdict.state, Outcome.FINISHED, verdict.stop)
        return state, (*actions, *ends)
    return verdict.state, actions


def _end(state: RunState, outcome: Outcome, reason: str) -> Step:
    state = replace(state, phase=Phase.ENDED, outcome=outcome, reason=reason, tasks={}, rounds={}, timers={})
    return state, (end_of(state),)
