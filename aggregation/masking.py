"""What does not go together with masked updates, of which the server learns the sum and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from atoll.aggregation.combined import Combined, Refusal
from atoll.aggregation.contribution import contribution_of
from atoll.aggregation.reducers.bucketing import Bucketing
from atoll.aggregation.reducers.central import CenteredClipping, GeometricMedian, QFedAvg
from atoll.aggregation.schedule import Branching
from atoll.aggregation.schedules.cyclic import Cyclic
from atoll.aggregation.schedules.gossip import Gossip

MASKING: Final = "privacy.secure_aggregation"
_CODECS: Final = frozenset({"native", "float32"})


def _masked(combined: Combined) -> bool:
    return combined.masked is not None


def _refusal(key: str, applies: Callable[[Combined], bool], reason: str) -> Refusal:
    return Refusal(keys=(MASKING, key), applies=applies, reason=reason)


def _bucketing(combined: Combined) -> Bucketing | None:
    return combined.reducer if combined.masked is not None and isinstance(combined.reducer, Bucketing) else None


def _is_small(combined: Combined) -> bool:
    reducer = _bucketing(combined)
    return reducer is not None and combined.masked is not None and reducer.size < combined.masked.fewest_survivors


def _has_few_buckets(combined: Combined) -> bool:
    """Every bucket has `size` sites at least, so that their number is rounded down."""
    reducer = _bucketing(combined)
    return reducer is not None and combined.schedule.fewest_updates // reducer.size < max(
        1, reducer.inner.fewest_updates
    )


MASKED: Final = (
    _refusal(
        "strategy.reducer",
        lambda combined: (
            _masked(combined)
            and isinstance(combined.reducer, GeometricMedian | CenteredClipping)
            and contribution_of(combined.reducer) is None
        ),
        "its steps are several sums over one version in which each site counts otherwise, and two of those can show "
        "the update of one site (docs/decisions/0017); take bucketing with it inside, or norm_bound",
    ),
    _refusal(
        "strategy.reducer",
        lambda combined: _masked(combined) and contribution_of(combined.reducer) is None,
        "this reducer looks at each update by itself, which masks hide from the server; take the reducer mean, or "
        "bucketing with this one inside",
    ),
    _refusal(
        "strategy.reducer",
        _is_small,
        "the sum of each bucket is published, so a bucket is a cohort; raise size to fewest_survivors, and above it so "
        "that a site may drop out",
    ),
    _refusal(
        "strategy.reducer",
        _has_few_buckets,
        "with masks every bucket has size sites at least, and so few of them are too few for the reducer inside; raise "
        "min and quorum in the schedule to size times as many, or let it bear fewer faulty buckets",
    ),
    _refusal(
        "strategy.reducer",
        lambda combined: (found := _bucketing(combined)) is not None and isinstance(found.inner, QFedAvg),
        "qfedavg weighs by the loss of each site, and of a bucket the server learns the sum; take another reducer inside",
    ),
    _refusal(
        "strategy.schedule",
        lambda combined: _bucketing(combined) is not None and isinstance(combined.schedule, Branching),
        "a group is a cohort already, and buckets of groups have no sessions; take the schedule rounds, or the reducer "
        "mean or norm_bound",
    ),
    _refusal(
        "strategy.codec",
        lambda combined: _masked(combined) and combined.codec.name not in _CODECS,
        (
            "masked values travel as levels of a ring, and what this codec writes cannot be added there; take native or "
            "float32, and bits = 16 for half the traffic"
        ),
    ),
    _refusal(
        "strategy.download",
        lambda combined: _masked(combined) and combined.download is not None,
        (
            "sites compare the base version that they have with the one that the session is bound to, and a coded version "
            "is another one; remove download"
        ),
    ),
    _refusal(
        "strategy.schedule",
        lambda combined: _masked(combined) and isinstance(combined.schedule, Gossip),
        "sites of gossip hand whole models to their neighbours; take the schedule rounds or buffered",
    ),
    _refusal(
        "strategy.schedule",
        lambda combined: _masked(combined) and isinstance(combined.schedule, Cyclic),
        "a turn is of one site, whose update would be the sum; take the schedule rounds or buffered",
    ),
    _refusal(
        "strategy.buffers",
        lambda combined: _masked(combined) and combined.buffers == "first",
        "the server would take the buffers of one site, which masks hide; take mean or local",
    ),
    _refusal(
        "strategy.schedule",
        lambda combined: (
            combined.masked is not None
            and combined.settled
            and not combined.regions  # each has sessions of its own
            and combined.schedule.fewest_updates < combined.masked.fewest_survivors
        ),
        (
            "a round may close with fewer sites than secure aggregation publishes a sum of; raise min and quorum in the "
            "schedule to fewest_survivors, or lower that; a cohort of regions may be smaller, once one is connected"
        ),
    ),
)
