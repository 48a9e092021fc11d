"""`require_secagg` of a site's policy: the least that secure aggregation has to hold for this site to take part.

A server cannot lower any of it: the terms are part of the job that the site agreed to and of the plan that it works out
itself, and they are looked at for each offer and again for each session.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from pydantic import Field

from atoll.privacy.secagg.plan import SessionPlan
from atoll.wire.privacy_section import SecureAggregationSection
from atoll.wire.strict import Strict

_TABLE = "require_secagg"


class RequireSecagg(Strict):
    """The table; each default is the careful side, and holds where a key is absent."""

    threat: Literal["active", "semi-honest"] = "active"
    corrupt: float = Field(default=0.1, ge=0, lt=1)  # share of the sites that may work with the server
    fewest_survivors: int = Field(default=5, ge=3)  # sites, of as many organisations, in every sum
    organisations: int = Field(default=5, ge=3)  # behind the roster of a session
    across_runs: bool = False  # sums of other runs over the same model count too


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a run asks, as far as this table judges it."""

    secure: SecureAggregationSection | None
    zones: tuple[str, ...]
    evaluates: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Unmet:
    """The first key that a run or a session does not meet."""

    key: str
    text: str
    value: object
    bound: object


def unmet_by_job(policy: RequireSecagg, asked: Asked) -> Unmet | None:
    """What of the policy a job does not meet; None where it meets all."""
    secure, job_key = asked.secure, "privacy.secure_aggregation"
    if secure is None:
        text = f"the run would show this site's update to the server; add [privacy] secure_aggregation to the job ({_TABLE})"
        return Unmet(key=_TABLE, text=text, value="none", bound="secure_aggregation")
    if asked.zones:
        text = f"the run would show this site's model to neighbours in zone {asked.zones[0]!r}, whatever zones says ({_TABLE})"
        return Unmet(key=_TABLE, text=text, value=asked.zones[0], bound="no zone")
    if asked.evaluates:
        text = "the run would show this site's metrics by themselves; set evaluation.sites = false in the job"
        return Unmet(key=_TABLE, text=text, value="evaluate", bound="train")
    if policy.threat == "active" and secure.threat != "active":
        return _below("threat", f"{job_key}.threat", secure.threat, policy.threat)
    if secure.corrupt < policy.corrupt:
        return _below("corrupt", f"{job_key}.corrupt", secure.corrupt, policy.corrupt)
    if secure.fewest_survivors < policy.fewest_survivors:
        return _below(
            "fewest_survivors", f"{job_key}.fewest_survivors", secure.fewest_survivors, policy.fewest_survivors
        )
    return None


def unmet_by_session(policy: RequireSecagg | None, min_cohort: int, plan: SessionPlan) -> Unmet | None:
    """What of the policy a session does not meet; None where it meets all. Without the table, `min_cohort` stands."""
    if plan.fewest_survivors < min_cohort:
        return _below("min_cohort", "the session's fewest survivors", plan.fewest_survivors, min_cohort, table="")
    if policy is None:
        return None
    terms = plan.parameters
    if policy.threat == "active" and terms.threat != "active":
        return _below("threat", "the session's threat", terms.threat, policy.threat)
    if terms.num_corrupt < math.floor(Fraction(str(policy.corrupt)) * terms.num_sites):
        corrupt = f"{policy.corrupt} of {terms.num_sites} sites"
        return _below("corrupt", "the number of sites that may be corrupt", terms.num_corrupt, corrupt)
    if plan.fewest_survivors < policy.fewest_survivors:
        return _below(
            "fewest_survivors", "the session's fewest survivors", plan.fewest_survivors, policy.fewest_survivors
        )
    organisations = plan.organisations(frozenset(range(len(plan.roster))))
    if organisations < policy.organisations:
        return _below(
            "organisations", "the number of organisations in the session", organisations, policy.organisations
        )
    return None


def _below(key: str, what: str, value: object, bound: object, *, table: str = f"{_TABLE}.") -> Unmet:
    return Unmet(key=f"{table}{key}", text=f"{what} is {value}, {table}{key} is {bound}", value=value, bound=bound)
