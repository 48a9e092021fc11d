"""What this site consents to: `policy.toml`, a file of the site's administrator that the server cannot overrule.

Invariant: a run is refused unless the file says yes on every count, and the file is read before anything of the run
is imported or opened. No file means no to everything; so does a key that is absent, wherever a key grants something.
The file is read again for each offer, so a change holds from the next one on, without a restart.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import AfterValidator, Field, ValidationError

from atoll.client.secagg_policy import Asked, RequireSecagg, Unmet, unmet_by_job, unmet_by_session
from atoll.privacy.secagg.plan import SessionPlan
from atoll.wire.errors import ConfigError, PolicyRefused
from atoll.wire.explain import explain
from atoll.wire.job import Asks, Job, Strict
from atoll.wire.privacy_section import SecureAggregationSection
from atoll.wire.toml_file import read_toml

ANYBODY = "*"
ANY_INSTALLED = "any-installed"  # whatever version the administrator installs


def _checked_hash(text: str) -> str:
    if text != ANY_INSTALLED and not re.fullmatch(r"[0-9a-f]{64}", text):
        raise ValueError(f'wanted the 64 hex digits that `atoll site status` prints, or "{ANY_INSTALLED}"')
    return text


Hash = Annotated[str, AfterValidator(_checked_hash)]


class AllowedApp(Strict):
    """One app that may see this site's data."""

    name: str = Field(min_length=1, max_length=63)
    hash: Hash


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a server asks for, as far as a policy judges it."""

    run: str
    app: str
    app_hash: str  # SHA-256, hex
    num_rounds: int
    fewest_sites: int  # that an aggregate of the run combines
    submitted_by: str
    zones: tuple[str, ...]  # trust zones in which the job would connect sites directly
    tasks: tuple[Asks, ...] = ("train", "evaluate")  # what the run asks of a site
    secure: SecureAggregationSection | None = None  # by which terms the server sees sums alone; None: it sees updates


class Policy(Strict):
    """A whole `policy.toml`. The defaults of what grants are nothing; of what limits, the careful side."""

    allowed_apps: tuple[AllowedApp, ...] = ()
    researchers: tuple[str, ...] = ()  # names, or "*" for whoever the federation has enrolled
    min_cohort: int = Field(default=3, ge=1)  # sites: below three, one can compute what another sent
    max_rounds: int = Field(default=100, ge=1)
    zones: tuple[str, ...] = ()
    tasks: tuple[Asks, ...] = ("train", "evaluate")  # statistics are granted by name
    min_cell_count: int = Field(default=10, ge=1)  # examples behind every number of statistics; a job may ask for more
    require_secagg: RequireSecagg | None = None  # the server never sees this site's update by itself

    def check(self, request: Request, *, site: str) -> None:
        """Return if this site takes part in `request`.

        Raises:
            PolicyRefused: it does not; `field` is the key of the policy that decided.
        """
        for reason in (
            self._app(request),
            self._researcher(request),
            self._cohort(request),
            self._rounds(request),
            self._zones(request),
            self._tasks(request),
            self._secagg(request),
        ):
            if reason is not None:
                raise PolicyRefused(
                    f"policy of site {site}: {reason.text}",
                    site=site,
                    run=request.run,
                    field=reason.key,
                    value=reason.value,
                    bound=reason.bound,
                )

    def _app(self, request: Request) -> _Reason | None:
        named = [app for app in self.allowed_apps if app.name == request.app]
        if not named:
            text = f"app {request.app!r} is not in allowed_apps; the site's administrator has to add it there"
            return _Reason("allowed_apps", text, request.app, ", ".join(app.name for app in self.allowed_apps))
        if any(app.hash in (ANY_INSTALLED, request.app_hash) for app in named):
            return None
        hashes = ", ".join(app.hash for app in named)
        text = (
            f"app {request.app!r} is allowed with hash {hashes}, the run wants {request.app_hash}; "
            "the site's administrator has to look at that version and add its hash to allowed_apps"
        )
        return _Reason("allowed_apps", text, request.app_hash, hashes)

    def _researcher(self, request: Request) -> _Reason | None:
        if ANYBODY in self.researchers or request.submitted_by in self.researchers:
            return None
        text = f"runs of {request.submitted_by!r} are not allowed; the site's administrator has to add the name to researchers"
        return _Reason("researchers", text, request.submitted_by, ", ".join(self.researchers))

    def _cohort(self, request: Request) -> _Reason | None:
        if request.fewest_sites >= self.min_cohort:
            return None
        text = (
            f"a round of the run may combine as few as {request.fewest_sites} sites, min_cohort is {self.min_cohort}; raise "
            f"min (and quorum, where it is set) of the job's schedule to {self.min_cohort}, and take a reducer that "
            "mixes as many, such as mean; leave out by_site, which shows each site's answer by itself"
        )
        return _Reason("min_cohort", text, request.fewest_sites, self.min_cohort)

    def _rounds(self, request: Request) -> _Reason | None:
        if request.num_rounds <= self.max_rounds:
            return None
        text = (
            f"the run has {request.num_rounds} rounds, max_rounds is {self.max_rounds}; submit it with fewer, or ask the "
            "site's administrator to raise max_rounds"
        )
        return _Reason("max_rounds", text, request.num_rounds, self.max_rounds)

    def _zones(self, request: Request) -> _Reason | None:
        for zone in request.zones:
            if zone not in self.zones:
                text = (
                    f"the run would connect sites directly in zone {zone!r}, which is not in zones; take it out of the "
                    "job's schedule, or ask the site's administrator to add it"
                )
                return _Reason("zones", text, zone, ", ".join(self.zones))
        return None

    def _tasks(self, request: Request) -> _Reason | None:
        for task in request.tasks:
            if task not in self.tasks:
                text = f"the run asks for {task!r}, which is not in tasks; ask the site's administrator to add it"
                if task == "evaluate":
                    text += ", or set evaluation.sites = false in the job"
                return _Reason("tasks", text, task, ", ".join(self.tasks))
        return None

    def _secagg(self, request: Request) -> _Reason | None:
        if self.require_secagg is None:
            return None
        asked = Asked(secure=request.secure, zones=request.zones, evaluates="evaluate" in request.tasks)
        return _reason(unmet_by_job(self.require_secagg, asked))


def _reason(unmet: Unmet | None) -> _Reason | None:
    return None if unmet is None else _Reason(unmet.key, unmet.text, unmet.value, unmet.bound)


@dataclass(frozen=True, slots=True)
class _Reason:
    key: str
    text: str
    value: object
    bound: object


def tasks_of(job: Job) -> tuple[Asks, ...]:
    """Kinds of task that a job has for its sites."""
    judged = job.asks == "train" and job.evaluation.sites
    return tuple(kind for kind in get_args(Asks) if kind == job.asks or (judged and kind == "evaluate"))


def zones_of(job: Job) -> tuple[str, ...]:
    """Trust zones that a job names, at any depth of its schedule's options."""
    schedule = job.strategy.schedule
    return tuple(sorted(set(_zones_in(schedule.options)))) if schedule is not None else ()


def _zones_in(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key in ("zone", "zones"):
                yield from (str(name) for name in (inner if isinstance(inner, list) else [inner]))
            elif key != "where":  # labels that sites must have, whatever their names: nobody is connected by them
                yield from _zones_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _zones_in(inner)


def load_policy(path: Path) -> Policy:
    """The policy in `path`; one that allows nothing where there is no such file.

    Raises:
        ConfigError: the file is there and cannot be understood. Nothing may be allowed then either.
    """
    if not path.exists():
        return Policy()
    file = read_toml(path)
    try:
        return Policy.model_validate(file.table)
    except ValidationError as error:
        raise explain(error, Policy, file) from None


def check_request(path: Path, request: Request, *, site: str) -> None:
    """Return if the policy in `path` lets `site` take part in `request`.

    Raises:
        PolicyRefused: it does not, or there is no policy, or it cannot be understood.
    """
    _read(path, site=site, run=request.run).check(request, site=site)


def least_cell(path: Path, *, site: str, run: str) -> int:
    """Examples behind every number of statistics, as the policy in `path` has it now.

    Raises:
        PolicyRefused: it does not allow statistics (any more), is gone, or cannot be understood.
    """
    policy = _read(path, site=site, run=run)
    if "statistics" not in policy.tasks:
        text = f"policy of site {site}: 'statistics' is not in tasks; ask the site's administrator to add it"
        raise PolicyRefused(text, site=site, run=run, field="tasks", bound=", ".join(policy.tasks))
    return policy.min_cell_count


def consent_to_session(path: Path, plan: SessionPlan, *, site: str, run: str) -> bool:
    """Return if the policy in `path` lets `site` take part in a session now; whether sums of other runs count too.

    Raises:
        PolicyRefused: it does not.
    """
    policy = _read(path, site=site, run=run)
    unmet = unmet_by_session(policy.require_secagg, policy.min_cohort, plan)
    if unmet is not None:
        raise PolicyRefused(
            f"policy of site {site}: {unmet.text}",
            site=site,
            run=run,
            round=plan.round,
            field=unmet.key,
            value=unmet.value,
            bound=unmet.bound,
        )
    return policy.require_secagg is not None and policy.require_secagg.across_runs


def _read(path: Path, *, site: str, run: str) -> Policy:
    if not path.exists():
        raise PolicyRefused(
            f"site {site} has no policy, so it takes part in nothing; its administrator has to write policy.toml and "
            "name there what it allows",
            site=site,
            run=run,
            field="policy.toml",
            value="absent",
        )
    try:
        return load_policy(path)
    except ConfigError as error:
        # The text of the file is the site's own business: only the key leaves.
        raise PolicyRefused(
            f"the policy of site {site} has a fault, so everything is refused until its administrator has mended it: "
            "`atoll doctor` there names the line",
            site=site,
            run=run,
            field=error.key or "policy.toml",
        ) from error


def require_zones(path: Path, zones: Sequence[str], *, site: str, run: str) -> None:
    """Return if the policy in `path` accepts these zones now; it may have changed since the run was joined. Blocks.

    Raises:
        PolicyRefused: it does not.
        ConfigError: it cannot be understood, so it accepts nothing.
    """
    allowed = load_policy(path).zones
    for zone in zones:
        if zone not in allowed:
            raise PolicyRefused(
                f"policy of site {site}: zone {zone!r} is not in zones; it meets nobody there",
                site=site,
                run=run,
                field="zones",
                value=zone,
                bound=", ".join(allowed),
            )


STARTER_POLICY = """\
# What this site consents to. The agent reads this file before it opens data or imports an app, for each run anew;
# the server cannot overrule it. As written here, it allows nothing: every run is refused.

# Apps that may see this site's data. One entry for each:
#   name  as in [apps.NAME] of site.toml
#   hash  SHA-256 of the version that you have looked at, as `atoll site status` prints it; another version is refused.
#         "any-installed" takes whatever version is installed on this machine.
# allowed_apps = [{ name = "digits", hash = "any-installed" }]
allowed_apps = []

# Researchers whose runs are taken, by name. ["*"] takes everybody whom the federation has enrolled.
researchers = []

# Fewest sites that each round must combine. Below three, one site can compute what another has sent.
min_cohort = 3

# Most rounds that a run may have: each round tells a little more about the data.
max_rounds = 100

# Trust zones in which this site may exchange models with other sites directly, without the server between (gossip).
# A neighbour sees the model that this site alone has trained, whatever min_cohort says. Empty: never.
zones = []

# What a run may ask of this site: "train", "evaluate" (metrics on its test data), "statistics" (counts, means and
# histograms of its training data, which no model hides).
tasks = ["train", "evaluate"]

# Secure aggregation: with this table the server never sees the update of this site by itself, only sums over many, and
# every run that would show it is refused. What stands here is the least that is taken; what is absent is as shown.
#   threat            "active": also a server that lies; "semi-honest": one that keeps to the protocol and looks
#   corrupt           share of the sites that may work with the server
#   fewest_survivors  sites, of as many organisations, in every sum; 3 is the least there is
#   organisations     that stand behind the sites of a session
#   across_runs       a sum over one model with other sites than in an earlier run is refused too
# require_secagg = { threat = "active", corrupt = 0.1, fewest_survivors = 5, organisations = 5, across_runs = false }

# Fewest examples behind every number of statistics. Smaller groups are counted with their neighbours, or left out,
# before anything leaves; a job may ask for more.
min_cell_count = 10
"""
