"""What a run works from, made of its job: the plan of its state table, and what its rounds make of updates.

The run is one of this server's own, or one from an upper server.
"""

from __future__ import annotations

from atoll.aggregation.reducers.append import Append
from atoll.aggregation.schedules.relayed import Relayed
from atoll.aggregation.stages import Strategies
from atoll.server.events import Continued, Delegated
from atoll.server.judgement import judge_of
from atoll.server.models import RunModels
from atoll.server.payload_rounds import PayloadRounds
from atoll.server.pipeline import Pipeline
from atoll.server.records import RunRow
from atoll.server.round_work import RoundWork
from atoll.server.run_state import Change, Plan
from atoll.server.secure_pipeline import SecurePipeline
from atoll.server.surveys import Survey
from atoll.wire.job import Job
from atoll.wire.manifest import Manifest

REGION_WAIT_SHARE = 0.8  # a region that has too few sites says so before the upper server's own wait is over


def work_of(row: RunRow, job: Job, stages: Strategies, manifest: Manifest, models: RunModels) -> RoundWork:
    """What the rounds of a run make of updates, by what its job asks."""
    strategy = stages.first
    if job.asks != "train":
        fewest = strategy.schedule.fewest_updates
        return Survey(job=job, fewest=fewest, crc32=row.crc32, num_bytes=manifest.num_bytes)
    reducer = strategy.reducer
    if isinstance(reducer, Append):
        return PayloadRounds(run=row.run, strategy=strategy, reducer=reducer, manifest=manifest, models=models)
    if job.secure_aggregation is not None:
        secure = job.secure_aggregation
        return SecurePipeline(
            secure, run=row.run, strategy=strategy, seed=job.job.seed, manifest=manifest, models=models, stages=stages
        )
    return Pipeline(run=row.run, strategy=strategy, seed=job.job.seed, manifest=manifest, models=models, stages=stages)


def plan_of(job: Job, continued: Continued | None = None) -> Plan:
    """The part of a job that a run's state table works from; `continued`: what it goes on from.

    Raises:
        ConfigError: a part of the strategy is unknown or its options are out of bounds.
    """
    stages = Strategies(job)
    done_rounds = continued.round if continued is not None else 0
    first, later = job.at(done_rounds + 1), [stage for stage in job.stages if stage.from_round > done_rounds + 1]
    return Plan(
        schedule=stages.at(done_rounds + 1).schedule,
        num_rounds=job.job.rounds,
        seed=job.job.seed,
        evaluate_every=first.evaluation.every,
        changes=tuple(
            Change(
                from_round=stage.from_round,
                schedule=stages.at(stage.from_round).schedule,
                evaluate_every=stage.job.evaluation.every,
            )
            for stage in later
        ),
        evaluate_at_sites=job.evaluation.sites and job.asks == "train",
        evaluate_at_server=job.evaluation.server and job.asks != "statistics",
        asks=job.asks,
        judge=judge_of(job),
        masked=job.secure_aggregation is not None,
        done_rounds=done_rounds,
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
        masked=job.secure_aggregation is not None,
        wait_share=REGION_WAIT_SHARE,
        delegated=True,
    )
