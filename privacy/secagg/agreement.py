"""The plan of a session as both ends work it out: the server's few decisions, and what each of them has by itself.

What the server alone decides travels as an `Opening`. Job, app, model and member list each end takes from what it has
(`Own`), so the hashes of both plans are the same only where all of it is.

**Lanes.** A masked input holds two, one after the other, all little endian:

* lane 0, 64 bits, exact: the weight, the number of clipped values, then of each metric that the job names, in sorted
  order, its sum and its count in units of 2^-20 (`counters`), then each factor of the job's rule times the weight, in
  units of 2^-40 (`counted_factor`), for which 32 bits are too few.
* lane 1, 32 or 16 bits: the values of the update's flat vector (`UpdateLayout.means`, in their order), each times
  w / w_max (not where the job's reducer counts each update the same) and, of a stale update, times its discount, in
  units of `Terms.quantum`, rounded at random. A factor's place holds 0.

No sum overflows. In lane 1 by the roster's size (`fixed_point.py`); in lane 0 since each site's numbers are at most
(2^63 - 1) / n in magnitude, which `counters` refuses to exceed.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Final

from pydantic import Field, ValidationError, model_validator

from atoll.privacy.secagg.levels import Bits, largest_level
from atoll.privacy.secagg.parameters import parameters
from atoll.privacy.secagg.plan import Lane, Member, SessionPlan
from atoll.wire.errors import BadUpdate, ConfigError, Malformed, NotAllowed, Stale
from atoll.wire.job import Job, RunId, SiteName
from atoll.wire.members_pb2 import ACTIVE, MemberList
from atoll.wire.privacy_section import SecureAggregationSection
from atoll.wire.strict import Strict

PAYLOAD: Final = "masked"
MAX_OPENING_BYTES: Final = 1 << 20
MAX_WEIGHT: Final = 1 << 53
METRIC_UNIT: Final = 2.0**-20
FACTOR_UNIT: Final = 2.0**-40
_FIXED: Final = 2  # counters before those of metrics: weight, clipped values

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


def payload_name(session: int) -> str:
    """Name of the payload with the masked input of a session."""
    return f"{PAYLOAD}-{session}"


class Opening(Strict):
    """What the server decides of a session; as canonical JSON it travels, and is part of the plan."""

    run: RunId
    round: int = Field(ge=1, lt=2**32)
    session: int = Field(ge=1, lt=2**16)  # attempt in the round
    sites: tuple[SiteName, ...]  # the roster, by name
    member_list_version: int = Field(ge=1)
    max_weight: int = Field(ge=1, le=MAX_WEIGHT)  # w_max: largest that the round's sites had declared
    base_version: int = Field(ge=0)  # that the round's difference is added to
    bases: dict[SiteName, int] = Field(default={})  # base versions of sites that began with an older one
    digests: dict[
        int, Digest
    ]  # of each base version in use: SHA-256 of the data of the model, as its manifest lays it out

    @model_validator(mode="after")
    def _fits_together(self) -> Opening:
        if list(self.sites) != sorted(set(self.sites)):
            raise ValueError("sites are not sorted, or one is there twice")
        if not self.bases.keys() <= set(self.sites) or any(
            not 0 <= base < self.base_version for base in self.bases.values()
        ):
            raise ValueError("bases are of sites of the roster, and older than base_version")
        if self.digests.keys() != {self.base_of(site) for site in self.sites}:
            raise ValueError("digests are not those of the base versions in use")
        return self

    def base_of(self, site: str) -> int:
        """The version that a site's update is the difference to."""
        return self.bases.get(site, self.base_version)

    def staleness(self, site: str) -> int:
        """By how many versions a site's base is older than the round's; its discount is the job's schedule's."""
        return self.base_version - self.base_of(site)

    def canonical(self) -> bytes:
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, data: bytes) -> Opening:
        """The opening in a SecurePlan. Raises Malformed, also for another encoding of the same."""
        try:
            opening = cls.model_validate_json(data) if len(data) <= MAX_OPENING_BYTES else None
        except ValidationError as error:
            raise Malformed(
                f"the opening of a session does not hold together: {error.errors()[0]['msg']}", field="opening"
            ) from None
        if opening is None or opening.canonical() != data:
            raise Malformed("the opening of a session is too long, or not as it is written", field="opening")
        return opening


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """What each end takes from what it has."""

    job: Job
    app_hash: str  # SHA-256 in hex
    schema_hash: str  # of the run's manifest, in hex
    num_values: int  # length of the round's flat vector (`UpdateLayout.num_values`)
    num_factors: int = 0  # values among them that are factors of the job's rule
    members: MemberList  # signed by the federation's key


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """A session's plan, and how values become levels. Made by `agree`."""

    plan: SessionPlan
    opening: Opening
    section: SecureAggregationSection
    num_values: int
    num_factors: int = 0

    @property
    def bits(self) -> Bits:
        return self.section.bits

    @property
    def num_sites(self) -> int:
        return len(self.opening.sites)

    @property
    def max_weight(self) -> int:
        return self.opening.max_weight

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names, sorted."""
        return self.section.metrics

    @property
    def scale(self) -> float:
        """Levels of a value of 1 at the largest weight, L / bound: what the quantiser multiplies by, times w / w_max."""
        return largest_level(self.num_sites, self.bits) / self.section.bound

    @property
    def quantum(self) -> float:
        """What a level of the sum stands for, at the largest weight."""
        return self.section.bound / largest_level(self.num_sites, self.bits)

    @property
    def max_clipped(self) -> int:
        """Values that a site may cut to the bound."""
        return int(self.section.clipped * self.num_values)

    def index(self, site: str) -> int:
        """A site's place in the roster."""
        return self.opening.sites.index(site)


def agree(opening: Opening, own: Own) -> Terms:
    """The plan of a session.

    Raises:
        ConfigError: the job asks for no secure aggregation, or its terms hold for no cohort of this size.
        Stale: the member list is another one than the server's.
        NotAllowed: a site of the roster is no active member.
    """
    section = own.job.secure_aggregation
    if section is None:
        raise ConfigError("the job has no [privacy] secure_aggregation", key="privacy.secure_aggregation")
    num_sites = len(opening.sites)
    params = parameters(num_sites, corrupt=section.corrupt, dropped=section.dropped, threat=section.threat)
    try:
        largest_level(num_sites, section.bits)
    except ValueError as error:
        key = "privacy.secure_aggregation.bits"
        raise ConfigError(f"{key} = {section.bits}: {error}", key=key, value=str(section.bits)) from None
    if section.fewest_survivors > num_sites or opening.max_weight * num_sites >= 2**63:
        key = "privacy.secure_aggregation.fewest_survivors"
        raise ConfigError(
            f"{num_sites} sites of weights up to {opening.max_weight}: wanted at least {section.fewest_survivors} sites, "
            "and a sum of weights below 2^63",
            key=key,
            value=str(num_sites),
            bound=str(section.fewest_survivors),
        )
    plan = SessionPlan(
        run_id=hashlib.sha256(b"atoll/run/1\0" + opening.run.encode()).digest()[:16],
        round=opening.round,
        attempt=opening.session,
        parameters=params,
        fewest_survivors=section.fewest_survivors,
        roster=roster(own.members, opening),
        member_list_version=opening.member_list_version,
        lanes=lanes(section, own.num_values, own.num_factors),
        bound_to={
            "app": own.app_hash,
            "job": hashlib.sha256(own.job.canonical()).hexdigest(),
            "model": own.schema_hash,
            "opening": hashlib.sha256(opening.canonical()).hexdigest(),
        },
    )
    return Terms(plan=plan, opening=opening, section=section, num_values=own.num_values, num_factors=own.num_factors)


def lanes(section: SecureAggregationSection, num_values: int, num_factors: int = 0) -> tuple[Lane, Lane]:
    """Counters, then values."""
    return (
        Lane(bits=64, num_values=_FIXED + 2 * len(section.metrics) + num_factors),
        Lane(bits=section.bits, num_values=num_values),
    )


def roster(members: MemberList, opening: Opening) -> tuple[Member, ...]:
    """The sites of a session, as the signed member list has them. Raises Stale, NotAllowed."""
    if members.version != opening.member_list_version:
        raise Stale(
            f"the session is of member list {opening.member_list_version}, here is {members.version}",
            field="member_list_version",
            value=opening.member_list_version,
            bound=members.version,
        )
    active = {member.site: member for member in members.members if member.status == ACTIVE}
    for site in opening.sites:
        if site not in active:
            raise NotAllowed(f"{site} is no active member on list {members.version}", site=site, field="sites")
    return tuple(
        Member(site=site, organisation=active[site].organisation, signing_key=active[site].signing_key)
        for site in opening.sites
    )


# --- lane 0 ----------------------------------------------------------------------------------------------------------


def counters(
    terms: Terms, weight: int, metrics: Mapping[str, tuple[float, float]], *, clipped: int = 0, site: str = ""
) -> list[int]:
    """Lane 0 of a site's input, as unsigned 64-bit numbers; that of factors is 0, as only its worker knows them.

    Args:
        metrics: sum and count by name; those that the job does not name are left out, and one that is absent is 0.

    Raises:
        BadUpdate: weight, number of clipped values or a metric is out of bounds; names value and bound.
    """
    if not 1 <= weight <= terms.max_weight:
        raise _beyond(site, "weight", weight, f"1 to {terms.max_weight}")
    if not 0 <= clipped <= terms.max_clipped:
        raise _beyond(site, "clipped", clipped, f"at most {terms.max_clipped} values beyond {terms.section.bound}")
    values = [weight, clipped]
    most = (2**63 - 1) // terms.num_sites
    for name in terms.metrics:
        for number in metrics.get(name, (0.0, 0.0)):
            if not abs(number) <= most * METRIC_UNIT:  # NaN compares false
                raise _beyond(site, name, number, most * METRIC_UNIT)
            values.append(min(most, max(-most, round(number / METRIC_UNIT))))
    return [value % 2**64 for value in values] + [0] * terms.num_factors


def counted_factor(factor: float, weight: int, num_sites: int, *, name: str) -> int:
    """What stands in lane 0 for a factor of an update: times its weight, exactly, as an unsigned 64-bit number.

    Raises:
        BadUpdate: it is not finite, or so large that the sum of so many sites could overflow.
    """
    most = (2**63 - 1) // num_sites
    level = round(Fraction(factor) * weight / Fraction(FACTOR_UNIT)) if math.isfinite(factor) else most + 1
    if abs(level) > most:
        raise _beyond("", name, factor, f"at most {most * FACTOR_UNIT / weight:g} at weight {weight}")
    return level % 2**64


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """Lane 0 of a sum."""

    weight: int
    clipped: int
    metrics: Mapping[str, tuple[float, float]]
    factors: tuple[float, ...] = ()  # each times the weight


def read_counters(terms: Terms, values: Sequence[int]) -> Counted:
    """What the sum of lane 0 stands for; metrics that nobody counted are left out.

    Raises:
        BadUpdate: no sum of inputs that keep their bounds: a site sent another one than it should.
    """
    signed = [value - 2**64 if value >= 2**63 else value for value in values]
    num_metrics = 2 * len(terms.metrics)
    weight, clipped, *rest = signed[: _FIXED + num_metrics]
    factors = tuple(value * FACTOR_UNIT for value in signed[_FIXED + num_metrics :])
    if not terms.plan.parameters.threshold <= weight <= terms.num_sites * terms.max_weight:
        raise _beyond("", "weight", weight, f"at most {terms.num_sites * terms.max_weight}")
    if not 0 <= clipped <= terms.num_sites * terms.max_clipped:
        raise _beyond("", "clipped", clipped, terms.num_sites * terms.max_clipped)
    pairs = zip(rest[::2], rest[1::2], strict=True)
    metrics = {
        name: (total * METRIC_UNIT, count * METRIC_UNIT)
        for name, (total, count) in zip(terms.metrics, pairs, strict=True)
        if count > 0
    }
    return Counted(weight=weight, clipped=clipped, metrics=metrics, factors=factors)


def _beyond(site: str, field: str, value: float, bound: object) -> BadUpdate:
    who = f"update of {site}" if site else "sum of the updates"
    return BadUpdate(f"{who}: {field} is {value}, wanted {bound}", site=site, field=field, value=value, bound=bound)
