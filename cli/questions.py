"""`atoll evaluate`, `atoll statistics`: runs that train nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli import options

if TYPE_CHECKING:
    from atoll.wire.job import Job

Watch = Annotated[bool, typer.Option("--watch/--detach", help="Follow the run to its end, or print its id and return.")]
JobFile = Annotated[Path, typer.Argument(metavar="JOB", help="Job file (TOML).")]


def evaluate(
    job: JobFile,
    model: Annotated[
        Path, typer.Option("--model", metavar="FILE", help="Model file (safetensors), as `atoll model` writes it.")
    ],
    watch: Watch = True,
    home: options.PersonHome = None,
    as_json: options.AsJson = False,
) -> None:
    """Have the sites judge a model, and train nothing.

    Takes a job of training as it is: its app, data, sites and schedule count, its rounds do not. With `evaluation.server = true` the server judges the model too; with `evaluation.by_site = true` each site's metrics are shown.

    \b
    Examples:
      atoll evaluate job.toml --model model.safetensors
      atoll evaluate job.toml --model model.safetensors --json | jq '.rounds[0].evaluate'
    """
    from atoll.wire.job import begun_from, evaluating, load_job, located

    with located(job):
        _ask(begun_from(evaluating(load_job(job)), start=model), watch=watch, home=home, as_json=as_json)


def statistics(
    job: JobFile,
    watch: Watch = True,
    home: options.PersonHome = None,
    as_json: options.AsJson = False,
) -> None:
    """Count at the sites: means, variances, histograms and quantiles of their data, as [statistics] of the job says.

    No number is about fewer examples than each site's `min_cell_count`, nor about fewer sites than the job's schedule asks for.

    \b
    Examples:
      atoll statistics job.toml
      atoll statistics job.toml --json | jq '.rounds[0].features.age.mean'
    """
    from atoll.wire.errors import ConfigError
    from atoll.wire.job import load_job, located

    with located(job):
        wanted = load_job(job)
        if wanted.statistics is None:
            raise ConfigError(f"{job}: there is no table [statistics]; add one, even an empty one", key="statistics")
        _ask(wanted, watch=watch, home=home, as_json=as_json)


def _ask(wanted: Job, *, watch: bool, home: Path | None, as_json: bool) -> None:
    import asyncio

    from atoll.cli.output import note
    from atoll.cli.runs import submitted
    from atoll.client.people import load_person
    from atoll.client.researcher import submit

    person = load_person(home)
    submitted(person, asyncio.run(submit(person, wanted, notice=note)), watch=watch, as_json=as_json)
