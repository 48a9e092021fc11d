"""The part of a job that a run's state table works from, in a run of this server's own and in one from an upper server."""

from __future__ import annotations

from atoll.aggregation.schedules.relayed import Relayed
from atoll.aggregation.strategy import resolve
from atoll.server.events import Continued, Delegated
from atoll.server.judgement import judge_of
from atoll.server.run_state import Plan
from atoll.wire.job import Job

REGION_WAIT_SHARE = 0.8  # a region that has too few sites says so before the upper server's own wait is over


def plan_of(job: Job, continued: Continued | None = None) -> Plan:
    """The part of a job that a run's state table works from; `continued`: what it goes on from.

    Raises:
        ConfigError: a part of the strategy is unknown or its options are out of bounds.
    """
    return Plan(
        schedule=resolve(job).schedule,
        num_rounds=job.job.rounds,
        seed=job.job.seed,
        evaluate_every=job.evaluation.every,
        evaluate_at_sites=job.evaluation.sites,
        evaluate_at_server=job.evaluation.server,
        judge=judge_of(job),
        done_rounds=continued.round if continued is not None else 0,
        first_version=continued.version if continued is not None else 0,
    )


def delegated_plan(job: Job, delegated: Delegated) -> Plan:
    """The same of a run that an upper server has offered to this region."""
    options = Relayed.Options(min=delegated.min_sites, quorum=delegated.quorum, deadline=delegated.deadline_s)
    return Plan(
        schedule=Relayed(options),
        num_rounds=job.job.rounds,
        seed=job.job.seed,
        evaluate_every=1,
        evaluate_at_sites=True,  # when it is asked for
        evaluate_at_server=False,
        wait_share=REGION_WAIT_SHARE,
        delegated=True,
    )
