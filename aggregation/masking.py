"""What does not go together with masked updates, of which the server learns the sum and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from atoll.aggregation.combined import Combined, Refusal
from atoll.aggregation.reducers.mean import Mean
from atoll.aggregation.rules.rule import lanes_of
from atoll.aggregation.schedule import Branching, Stepped
from atoll.aggregation.schedules.cyclic import Cyclic
from atoll.aggregation.schedules.gossip import Gossip

MASKING: Final = "privacy.secure_aggregation"
_CODECS: Final = frozenset({"native", "float32"})


def _trains_on(combined: Combined) -> bool:
    schedule = combined.schedule
    return isinstance(schedule, Stepped) and (schedule.exchange.num_fragments > 1 or schedule.exchange.alpha < 1)


def _masked(combined: Combined) -> bool:
    return combined.masked is not None


def _refusal(key: str, applies: Callable[[Combined], bool], reason: str) -> Refusal:
    return Refusal(keys=(MASKING, key), applies=applies, reason=reason)


MASKED: Final = (
    _refusal(
        "strategy.reducer",
        lambda combined: _masked(combined) and not isinstance(combined.reducer, Mean),
        "this reducer looks at each update by itself, which masks hide from the server; take the reducer mean",
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
        "strategy.schedule",
        lambda combined: _masked(combined) and isinstance(combined.schedule, Branching),
        "sessions of the groups of one round are not in this version of Atoll; take the schedule rounds or buffered",
    ),
    _refusal(
        "strategy.schedule",
        lambda combined: _masked(combined) and _trains_on(combined),
        (
            "masked sums of fragments, and of models that sites train on, are not in this version of Atoll; set "
            "fragments = 1 and alpha = 1"
        ),
    ),
    _refusal(
        "strategy.rule",
        lambda combined: (
            _masked(combined)
            and combined.rule is not None
            and any(lane.kind == "factor" for lane in lanes_of(combined.rule))
        ),
        (
            "the factor that this rule sends needs more digits than a masked value has; take the rule none, fedprox or "
            "scaffold"
        ),
    ),
    _refusal(
        "strategy.buffers",
        lambda combined: _masked(combined) and combined.buffers == "first",
        "the server would take the buffers of one site, which masks hide; take mean or local",
    ),
    _refusal(
        "strategy.schedule",
        lambda combined: (
            combined.masked is not None and combined.schedule.fewest_updates < combined.masked.fewest_survivors
        ),
        (
            "a round may close with fewer sites than secure aggregation publishes a sum of; raise min and quorum in the "
            "schedule to fewest_survivors, or lower that"
        ),
    ),
    _refusal(
        "regions",
        lambda combined: _masked(combined) and combined.regions,
        (
            "a region's sum is known to the region; sessions below a region are not in this version of Atoll: name sites of "
            "this federation alone in job.sites"
        ),
    ),
)
