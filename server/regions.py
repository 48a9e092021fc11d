"""Sites that are servers themselves: what they declare of the sites below them, checked (docs/trees.md)."""

from __future__ import annotations

from atoll.aggregation.round_sum import MAX_SITES, MAX_WEIGHT
from atoll.aggregation.schedule import Joined
from atoll.aggregation.stages import Strategies
from atoll.server.masked_sum import require_maskable
from atoll.server.sessions import Session
from atoll.transport.hello import REGION
from atoll.wire import control_pb2 as pb
from atoll.wire.errors import ConfigError, Malformed
from atoll.wire.job import Job
from atoll.wire.manifest import Manifest


def is_region(session: Session) -> bool:
    """Whether the site on this stream sends sums over sites of its own."""
    return REGION in session.hello.features


def joined_event(session: Session, accept: pb.Accept) -> Joined:
    """The event of a site that takes part.

    Raises:
        Malformed: its weights are impossible, or it is a region and declares no sites, or is none and declares some.
    """
    site, region = session.site, accept.region
    labels = dict(session.hello.capacity.labels)
    if is_region(session) != accept.HasField("region"):
        raise Malformed(f"{site} says that it is a region in only one of hello and accept", site=site, field="region")
    _require(site, "max_weight", accept.max_weight, 1, MAX_WEIGHT)
    if not accept.HasField("region"):
        return Joined(site=site, max_weight=accept.max_weight, labels=labels)
    _require(site, "num_sites", region.num_sites, 1, MAX_SITES)
    most = min(region.num_sites * accept.max_weight, MAX_WEIGHT)
    _require(site, "sum_weights", region.sum_weights, max(region.num_sites, accept.max_weight), most)
    return Joined(
        site=site,
        max_weight=accept.max_weight,
        labels=labels,
        num_sites=region.num_sites,
        sum_weights=region.sum_weights,
    )


def _require(site: str, field: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise Malformed(
            f"{site} declares {field} = {value}, wanted {low} to {high}; its data or its software is not as it should be: "
            "run `atoll doctor` there",
            site=site,
            field=field,
            value=value,
            bound=f"{low} to {high}",
        )


def require_sessions(job: Job, manifest: Manifest, *, fewest: int) -> None:
    """Returns where a region whose rounds close with `fewest` updates at least can hold a job's sessions, if it has any.

    Raises:
        ConfigError: a session could have too few sites; names the region's key and the bound.
    """
    section = job.secure_aggregation
    if section is None:
        return
    if fewest < section.fewest_survivors:
        raise ConfigError(
            f"upstream.min_sites and upstream.quorum let a round of this region close with {fewest} updates, and the job's "
            f"secure aggregation publishes no sum of fewer than {section.fewest_survivors}; raise them in server.toml",
            key="upstream.min_sites",
            value=str(fewest),
            bound=f"at least {section.fewest_survivors}",
        )
    for fragments in Strategies(job).fragments(manifest):
        require_maskable(section, fewest, fragments.whole)
