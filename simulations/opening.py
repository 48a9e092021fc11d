"""What a simulation is opened from: a job, its app, and sites with their data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from atoll.client.first_version import app_entry
from atoll.client.people import PersonSettings, Place, default_home, load_settings
from atoll.cluster.app import App, build_app
from atoll.cluster.registry import hash_distribution, load_app
from atoll.simulations.sites import OwnDataSites, Partition, PartitionedSites, Sites
from atoll.wire.errors import ConfigError
from atoll.wire.job import Job, begun_from, load_job, located, parse_job
from atoll.wire.toml_file import read_toml

DEFAULT_SITES = 10
SITE = "{site}"


@contextmanager
def located_job(job: Job | Mapping[str, Any] | Path | str) -> Iterator[Job]:
    """The job; an error in one that was read from a file names the line."""
    if isinstance(job, Path | str):
        with located(Path(job)):
            yield load_job(Path(job))
    else:
        yield job if isinstance(job, Job) else parse_job(dict(job))


def job_with(path: Path, values: Mapping[str, Any]) -> Job:
    """The job of a file with other values, by keys such as "strategy.optimizer.lr".

    Raises:
        ConfigError: the job cannot be used with them; a key passes through something that is no table.
    """
    file = read_toml(path)
    for key, value in values.items():
        table: Any = file.table
        *above, last = key.split(".")
        for step in above:
            table = table.setdefault(step, {}) if isinstance(table, dict) else None
        if not isinstance(table, dict):
            raise ConfigError(f"--set {key}: {path} has a value, and no table, above it", key=key, value=str(value))
        table[last] = value
    job = parse_job(file.table, file)
    return job if job.job.start is None else begun_from(job, start=path.parent / job.job.start)


def app_of(job: Job, app: type[App] | None, home: Path | None) -> tuple[type[App], PersonSettings]:
    """The app's class, and the settings of whoever runs it. Raises ConfigError, Unknown where it is not installed."""
    root = home or default_home()
    place = Place(home=root, settings=load_settings(root))
    if app is not None:
        return app, place.settings
    if job.job.app is None:
        text = "a script has a loop of its own, and a simulation plays the sites in one process; give the job an app"
        raise ConfigError(f"job.script = {job.job.script!r}: {text}", key="job.script", value=str(job.job.script))
    entry = app_entry(place, job.job.app)
    return load_app(entry, hash_distribution(entry.distribution)), place.settings


def sites_of(
    job: Job,
    kind: type[App],
    wanted: int | Mapping[str, Mapping[str, Any]] | None,
    source: Mapping[str, Any],
    server_source: Mapping[str, Any] | None,
    partition: Partition,
) -> Sites:
    """The sites that are wanted: of one source by a partition, or with a source each.

    Raises:
        ConfigError: there are none, they have other names in the job, or the data cannot be spread so.
        AppFailed: there is no training data.
    """
    if not isinstance(wanted, Mapping):
        if wanted is not None and wanted < 1:
            raise ConfigError(f"sites = {wanted}: wanted 1 or more", key="sites", value=str(wanted), bound="1 or more")
        if not any(isinstance(value, str) and SITE in value for value in source.values()):
            made = build_app(kind, job.app, source)
            whole = made.data("train")
            names = site_names(job, wanted if wanted is not None or job.job.sites else partition.num_sites(whole))
            return PartitionedSites(made, whole, names, partition)
        wanted = {name: _source_of(name, source) for name in site_names(job, wanted)}
    if not wanted:
        raise ConfigError("sites = {}: a simulation needs one site or more", key="sites", bound="1 or more")
    return OwnDataSites(kind, job.app, wanted, server_source)


def _source_of(site: str, source: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.replace(SITE, site) if isinstance(value, str) else value for key, value in source.items()}


def site_names(job: Job, num_sites: int | None) -> list[str]:
    """So many names: those that the job has, or site-1, site-2, ...

    Raises:
        ConfigError: the job names another number of sites.
    """
    named = list(job.job.sites)
    if named and num_sites not in (None, len(named)):
        raise ConfigError(
            f"sites = {num_sites}, and job.sites names {len(named)}: leave one of them out",
            key="sites",
            value=str(num_sites),
            bound=str(len(named)),
        )
    return named or [f"site-{number}" for number in range(1, (num_sites or DEFAULT_SITES) + 1)]
