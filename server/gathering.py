"""Many sites that join a run at once, before it is ready."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from atoll.aggregation.schedule import Joined
from atoll.aggregation.schedules.members import Membership
from atoll.server.run import advance
from atoll.server.run_state import Plan, RunState


def gathered(plan: Plan, state: RunState, events: Sequence[Joined]) -> RunState:
    """The state when all of these have joined a run that is not ready yet: as one after the other, in one pass.

    Joining copies the members each time, which thousands of simulated sites would wait for.
    """
    if not isinstance(plan.schedule, Membership):
        for event in events:
            state, _ = advance(plan, state, event)
        return state
    members = {**state.members, **{event.site: event for event in events if event.site not in state.members}}
    return replace(state, members=members, schedule=plan.schedule.gathered(state.schedule, events))
