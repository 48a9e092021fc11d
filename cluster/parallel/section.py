"""Which `[parallel]` counts for a run at this machine."""

from __future__ import annotations

from pydantic import ValidationError

from atoll.cluster.messages import Prepare
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
