"""Which parts go together. Each cell of the table either runs in a test or is refused here, at planning, with a reason.

The table is the product of all built-in kinds; `refusal` decides a cell by what its parts declare (is the codec
additive, does the reducer need a sum), so it holds for plugins too. `tests/aggregation/test_combinations.py` runs
every cell that is not refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from atoll.aggregation.codecs.encoding import Codec
from atoll.aggregation.reducers.central import FLTrust
from atoll.aggregation.reducers.reduction import Reducer
from atoll.aggregation.schedule import Asynchronous, Schedule
from atoll.aggregation.schedules.gossip import Gossip
from atoll.aggregation.server_optimizers import ServerOptimizer, Sgd
from atoll.wire.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Combined:
    """What a refusal may depend on."""

    schedule: Schedule[Any]
    codec: Codec
    reducer: Reducer
    buffers: str
    server_evaluation: bool
    regions: bool = False  # a member of the cohort is a region, which sends the sum of its sites' updates
    download: Codec | None = None
    local: tuple[str, ...] = ()
    optimizer: ServerOptimizer | None = None  # None: not looked at


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Parts that do not go together: which keys of the job, when, and why."""

    keys: tuple[str, str]
    applies: Callable[[Combined], bool]
    reason: str


REFUSALS: Final[tuple[Refusal, ...]] = (
    Refusal(
        keys=("strategy.schedule", "strategy.reducer"),
        applies=lambda combined: combined.schedule.fewest_updates < combined.reducer.fewest_updates,
        reason="with so few updates this reducer promises nothing; raise min and quorum in the schedule, or let the "
        "reducer bear fewer faulty sites",
    ),
    Refusal(
        keys=("strategy.schedule", "strategy.reducer"),
        applies=lambda combined: isinstance(combined.schedule, Asynchronous) and combined.reducer.needs != "sum",
        reason="this schedule discounts stale updates in a sum, and this reducer compares updates, which no discount "
        "makes comparable; take the reducer mean or norm_bound",
    ),
    Refusal(
        keys=("strategy.schedule", "strategy.reducer"),
        applies=lambda combined: isinstance(combined.reducer, FLTrust) and _samples(combined.schedule),
        reason="the trusted site has to be in every round, and this schedule draws some of the sites; set fraction = 1",
    ),
    Refusal(
        keys=("strategy.codec", "strategy.reducer"),
        applies=lambda combined: combined.reducer.needs == "sum" and not combined.codec.additive,
        reason="this reducer sums updates as they come, and sums of this codec's values mean nothing; "
        "take an additive codec (native, float32, bfloat16, int8, int4)",
    ),
    Refusal(
        keys=("strategy.buffers", "evaluation.server"),
        applies=lambda combined: combined.buffers == "local" and combined.server_evaluation,
        reason="with local buffers the server's model keeps those it began with, so the server would judge a model "
        "that no site uses; set evaluation.server = false, or buffers = mean",
    ),
    Refusal(
        keys=("strategy.local", "evaluation.server"),
        applies=lambda combined: bool(combined.local) and combined.server_evaluation,
        reason="the server's model keeps the values that these tensors began with, so the server would judge a model "
        "that no site uses; set evaluation.server = false",
    ),
    Refusal(
        keys=("strategy.reducer", "regions"),
        applies=lambda combined: combined.regions and combined.reducer.needs != "sum",
        reason="a region sends the sum of its sites' updates, and this reducer needs each update by itself; take the "
        "reducer mean, or name sites of this federation alone in job.sites",
    ),
    Refusal(
        keys=("strategy.schedule", "regions"),
        applies=lambda combined: combined.regions and isinstance(combined.schedule, Asynchronous),
        reason="a region sends one sum for a round, so that its sites cannot be of several rounds; take the schedule "
        "rounds, or name sites of this federation alone in job.sites",
    ),
    Refusal(
        keys=("strategy.download", "regions"),
        applies=lambda combined: combined.regions and combined.download is not None,
        reason="a region hands versions on to its sites as it gets them, in full; remove download, or name sites of "
        "this federation alone in job.sites",
    ),
    Refusal(
        keys=("strategy.schedule", "strategy.reducer"),
        applies=lambda combined: isinstance(combined.schedule, Gossip) and combined.reducer.name != "mean",
        reason="a version of gossip is the mean of the sites' models, which have mixed without a reducer; take the "
        "reducer mean",
    ),
    Refusal(
        keys=("strategy.schedule", "strategy.optimizer"),
        applies=lambda combined: isinstance(combined.schedule, Gossip) and not _adds(combined.optimizer),
        reason="versions of gossip are not sent back to the sites, so an optimizer on the server would move a model "
        "that no site has; take sgd with lr = 1 and no momentum",
    ),
    Refusal(
        keys=("strategy.schedule", "strategy.buffers"),
        applies=lambda combined: isinstance(combined.schedule, Gossip) and combined.buffers == "local",
        reason="sites give their neighbours whole models, and local buffers would leave with them; take mean or first",
    ),
    Refusal(
        keys=("strategy.schedule", "strategy.local"),
        applies=lambda combined: isinstance(combined.schedule, Gossip) and bool(combined.local),
        reason="sites give their neighbours whole models, and what is to stay would leave with them; remove local",
    ),
    Refusal(
        keys=("strategy.schedule", "strategy.download"),
        applies=lambda combined: isinstance(combined.schedule, Gossip) and combined.download is not None,
        reason="a version would be the mean of models less what the codec left out of the version before; remove download",
    ),
    Refusal(
        keys=("strategy.schedule", "regions"),
        applies=lambda combined: isinstance(combined.schedule, Gossip) and combined.regions,
        reason="a region has no model of its own that it could mix; name sites of this federation alone in job.sites",
    ),
)


def _samples(schedule: Schedule[Any]) -> bool:
    return float(getattr(getattr(schedule, "options", None), "fraction", 1.0)) < 1


def _adds(optimizer: ServerOptimizer | None) -> bool:
    """Whether a version is the one before and the mean difference."""
    return optimizer is None or (isinstance(optimizer, Sgd) and optimizer.adds)


def refusal(combined: Combined) -> Refusal | None:
    """Why these parts do not go together; None where they do."""
    return next((refusal for refusal in REFUSALS if refusal.applies(combined)), None)


def require_allowed(combined: Combined, values: Mapping[str, Any]) -> None:
    """Returns where the parts go together; `values` are the job's, by key, for the message.

    Raises:
        ConfigError: names both keys, their values and the reason.
    """
    found = refusal(combined)
    if found is None:
        return
    pair = " with ".join(f"{key} = {values[key]!r}" for key in found.keys)
    raise ConfigError(
        f"{pair}: {found.reason}", key=found.keys[0], value=str(values[found.keys[0]]), bound=found.reason
    )
