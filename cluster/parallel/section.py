"""Which `[parallel]` counts for a run at this machine, and which `[world]`."""

from __future__ import annotations

from pydantic import ValidationError

from atoll.cluster.messages import Prepare
from atoll.cluster.parallel.world_section import WorldSection
from atoll.wire.explain import explain
from atoll.wire.job import Job
from atoll.wire.parallel_section import ParallelSection


def section_of(request: Prepare, job: Job) -> ParallelSection | None:
    """What this machine's settings say, else the job; None where neither has the table.

    Raises:
        ConfigError: the machine's table cannot be used.
    """
    if request.parallel is None:
        return job.parallel
    try:
        return ParallelSection.model_validate(request.parallel)
    except ValidationError as error:
        raise explain(error, ParallelSection, "site", below=["parallel"]) from None


def world_of(request: Prepare) -> WorldSection:
    """What this machine's settings say; where they say nothing, all processes are on it.

    Raises:
        ConfigError: the machine's table cannot be used.
    """
    try:
        return WorldSection.model_validate(request.world or {})
    except ValidationError as error:
        raise explain(error, WorldSection, "site", below=["world"]) from None
