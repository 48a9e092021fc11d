"""What a site looks at before it takes part in a run, in this order: the policy, the app's code, the data's name.

Invariant: nothing of the run is imported and no data is opened here. Whoever needs a worker comes through `admit`
first, for an offer, and after a restart of agent or worker too, so that a policy which was tightened meanwhile counts.
"""

from __future__ import annotations

import hmac
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.client.home import SiteHome
from atoll.client.left_state import app_folder, take_up
from atoll.client.policy import Request, check_request, tasks_of, zones_of
from atoll.client.settings import AppSection, SiteSettings
from atoll.cluster.messages import Prepare
from atoll.cluster.registry import hash_distribution, hash_script
from atoll.cluster.rounding_secret import reproducible_secret
from atoll.transport.durable import disk_errors, private_folder
from atoll.wire import control_pb2 as pb
from atoll.wire.errors import ConfigError, Malformed, NotAllowed, Unknown
from atoll.wire.job import Job, decode_job
from atoll.wire.manifest import Manifest
from atoll.wire.names import check_run_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """A run that this site takes part in."""

    run: str
    job: Job
    manifest: Manifest
    app: AppSection | None  # None of a region: its sites have it; and of a script
    script: Path | None  # of a job that names one; None of a region
    app_hash: str  # SHA-256, hex: as offered, and as installed here
    data: dict[str, Any]  # the table [data.NAME]
    submitted_by: str


def admit(offer: pb.RunOffer, *, settings: SiteSettings, home: SiteHome) -> Admission:
    """The run as this site may do it. Reads the policy and hashes the app's files, or the script: blocks.

    Raises:
        Malformed: the offer is none.
        PolicyRefused: the policy says no.
        Unknown: no such app, script or data here.
        NotAllowed: the app or script that is here is another one; both hashes are in it.
    """
    site = settings.site.name
    job = _consented(offer, settings, home)
    app = script = None
    if job.job.script is None:
        app = _app(job.job.code, settings, offer.run)
        _check_hash(job.job.code, app, offer, site)
    else:
        script = _script(job.job.script, settings, offer)
    if job.data_name is None:
        return _admission(offer, job, app, {}, script)
    if job.data_name not in settings.data:
        raise Unknown(
            f"site {site} has no data {job.data_name!r}: its administrator has to add [data.{job.data_name}]",
            site=site,
            run=offer.run,
            field="data",
            value=job.data_name,
            bound=", ".join(settings.data),
        )
    return _admission(offer, job, app, settings.data[job.data_name], script)


def admit_region(offer: pb.RunOffer, *, settings: SiteSettings, home: SiteHome) -> Admission:
    """The run as this region may do it: its policy says yes. App and data are looked at by its own sites. Blocks.

    Raises:
        Malformed: the offer is none.
        PolicyRefused: the policy says no.
    """
    return _admission(offer, _consented(offer, settings, home), None, {})


def _consented(offer: pb.RunOffer, settings: SiteSettings, home: SiteHome) -> Job:
    """The job, where the policy lets this site take part. Raises Malformed, PolicyRefused."""
    site = settings.site.name
    job = _job(offer, site)
    request = Request(
        run=offer.run,
        app=job.job.code,
        app_hash=offer.app_hash,
        num_rounds=job.job.rounds,
        fewest_sites=offer.fewest_sites,
        submitted_by=offer.submitted_by,
        zones=zones_of(job),
        tasks=tasks_of(job),
        secure=job.secure_aggregation,
    )
    check_request(home.policy, request, site=site)
    return job


def _admission(
    offer: pb.RunOffer, job: Job, app: AppSection | None, data: dict[str, Any], script: Path | None = None
) -> Admission:
    return Admission(
        script=script,
        run=offer.run,
        job=job,
        manifest=Manifest.decode(offer.manifest),
        app=app,
        app_hash=offer.app_hash,
        data=data,
        submitted_by=offer.submitted_by,
    )


def _job(offer: pb.RunOffer, site: str) -> Job:
    check_run_id(offer.run)
    try:
        return decode_job(offer.job)
    except ConfigError as error:
        raise Malformed(
            f"site {site} cannot read the job: {error}", site=site, run=offer.run, field=error.key, value=error.value
        ) from None


def _app(name: str, settings: SiteSettings, run: str) -> AppSection:
    site = settings.site.name
    if name in settings.apps:
        return settings.apps[name]
    what = "it is a script here: the job says script = ..." if name in settings.scripts else "add [apps] for it"
    raise Unknown(
        f"site {site} knows no app {name!r}: {what}",
        site=site,
        run=run,
        field="app",
        value=name,
        bound=", ".join(settings.apps),
    )


def _script(name: str, settings: SiteSettings, offer: pb.RunOffer) -> Path:
    """The file of a script that is the run's. Raises Unknown, NotAllowed."""
    site = settings.site.name
    if name not in settings.scripts:
        what = "it is an app here: the job says app = ..." if name in settings.apps else f"add [scripts.{name}] for it"
        raise Unknown(
            f"site {site} knows no script {name!r}: {what}",
            site=site,
            run=offer.run,
            field="script",
            value=name,
            bound=", ".join(settings.scripts),
        )
    path = settings.scripts[name].path
    try:
        found = hash_script(path)
    except Unknown:  # whose text has the path, which stays here
        raise Unknown(
            f"site {site} cannot read its script {name!r}: correct its path under [scripts.{name}] of site.toml",
            site=site,
            run=offer.run,
            field="script",
            value=name,
        ) from None
    if found != offer.app_hash:
        raise NotAllowed(
            f"script {name!r} at site {site} has hash {found}, the run wants {offer.app_hash}: put the same file at the site "
            "and at the researcher",
            site=site,
            run=offer.run,
            field="script_hash",
            value=found,
            bound=offer.app_hash,
        )
    return path


def _check_hash(name: str, app: AppSection, offer: pb.RunOffer, site: str) -> None:
    found = hash_distribution(app.distribution)
    if found != offer.app_hash:
        raise NotAllowed(
            f"app {name!r} at site {site} has hash {found}, the run wants {offer.app_hash}: install the same version of "
            f"{app.distribution!r} at the site and at the researcher",
            site=site,
            run=offer.run,
            field="app_hash",
            value=found,
            bound=offer.app_hash,
        )


def preparation(admission: Admission, *, settings: SiteSettings, home: SiteHome, secret: bytes) -> Prepare:
    """What the worker of a run is told first; writes the run's manifest where the worker reads it. Blocks.

    Args:
        secret: 32 bytes that only this site has.

    Raises:
        DiskFull, LocalError: the manifest cannot be written.
    """
    folder = private_folder(home.run_state(admission.run))
    manifest_path = folder / "manifest"
    _write_whole(manifest_path, admission.manifest.encode())
    if (continues := admission.job.job.continues) is not None:
        take_up(home, admission.run, continues)
    device = settings.devices.device
    return Prepare(
        run=admission.run,
        site=settings.site.name,
        app_name=admission.job.job.code,
        distribution=admission.app.distribution if admission.app else "",
        entry_point=admission.app.entry_point if admission.app else "",
        app_hash=admission.app_hash,
        data=admission.data,
        job=admission.job.canonical().decode(),
        manifest_path=str(manifest_path),
        state_folder=str(private_folder(app_folder(home, admission.run))),
        device=None if device == "auto" else device,
        submitted_by=admission.submitted_by,
        parallel=None if settings.parallel is None else settings.parallel.model_dump(mode="json", exclude_none=True),
        rounding_seed_hex=_rounding_seed(admission, settings, secret).hex(),
    )


def _rounding_seed(admission: Admission, settings: SiteSettings, secret: bytes) -> bytes:
    """32 bytes for the run's worker, from which the site's secret cannot be computed."""
    if settings.reproducible is not None:
        return reproducible_secret(settings.reproducible.seed, admission.job.job.seed, settings.site.name)
    return hmac.digest(secret, b"atoll/rounding/1\0" + admission.run.encode(), "sha256")


def _write_whole(path: Path, data: bytes) -> None:
    draft = path.with_suffix(".draft")
    with disk_errors(path):
        draft.write_bytes(data)
        os.replace(draft, path)
