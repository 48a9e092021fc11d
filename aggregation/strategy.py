"""A strategy: who syncs and when, what changes in the local loop, how updates travel, combine and move the model.

A composition of parts and never a subclass: `resolve` makes one from a job, on the server, at the sites and in the
simulator alike. Events and actions of schedules are named here too, for those who drive one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atoll.aggregation import combinations, compositions, parts, plugins
from atoll.aggregation.codecs.encoding import Codec
from atoll.aggregation.compositions import Composition
from atoll.aggregation.layout import Buffers
from atoll.aggregation.lr_schedules import LearningRate
from atoll.aggregation.reducers.central import FLTrust
from atoll.aggregation.reducers.reduction import Reducer
from atoll.aggregation.round_sum import LARGEST_BOUND, SMALLEST_BOUND
from atoll.aggregation.rules import LocalRule
from atoll.aggregation.schedule import (
    Accepted,
    Action,
    Cancel,
    Close,
    Committed,
    Dispatch,
    Event,
    Failed,
    GiveUp,
    Joined,
    Left,
    Ready,
    Schedule,
    SetTimer,
    Stop,
    TimerFired,
)
from atoll.aggregation.server_optimizers import ServerOptimizer
from atoll.wire.errors import ConfigError
from atoll.wire.job import Job, Part, StrategySection, WorkSection

__all__ = [
    "Accepted",
    "Action",
    "Cancel",
    "Close",
    "Committed",
    "Dispatch",
    "Event",
    "Failed",
    "GiveUp",
    "Joined",
    "Left",
    "Ready",
    "Schedule",
    "SetTimer",
    "Stop",
    "Strategy",
    "TimerFired",
    "require_regions_allowed",
    "resolve",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """Every part, ready to use. `bound` is the largest magnitude that a difference may have."""

    name: str
    schedule: Schedule[Any]
    work: WorkSection
    rule: LocalRule
    codec: Codec
    download: Codec | None  # of model versions on their way to the sites; None: as they are
    reducer: Reducer
    optimizer: ServerOptimizer
    buffers: Buffers
    local: tuple[str, ...]  # patterns of names of tensors that stay at their site
    bound: float


def resolve(job: Job) -> Strategy:
    """The strategy that a job asks for.

    Raises:
        ConfigError: a kind or option is unknown or out of bounds, or parts do not go together; names key and value.
    """
    section = job.strategy
    composition = _composition(section.kind)
    wanted = {part: _wanted(composition.part(part), getattr(section, part)) for part in compositions.PARTS}
    made = {part: _made(part, options) for part, options in wanted.items()}
    if not SMALLEST_BOUND <= section.sum.bound <= LARGEST_BOUND:
        limits = f"{SMALLEST_BOUND:g} to {LARGEST_BOUND:g}"
        raise ConfigError(
            f"strategy.sum.bound = {section.sum.bound:g}: wanted {limits}",
            key="strategy.sum.bound",
            value=str(section.sum.bound),
            bound=limits,
        )
    _require_rates(made["optimizer"], job.job.rounds)
    _require_trusted(made["reducer"], job)
    download = _download(section)
    combinations.require_allowed(
        combinations.Combined(
            schedule=made["schedule"],
            codec=made["codec"],
            reducer=made["reducer"],
            buffers=section.buffers,
            local=section.local or (),
            server_evaluation=job.evaluation.server,
            download=download,
            optimizer=made["optimizer"],
        ),
        _values(section, wanted, made, job),
    )
    return Strategy(
        name=section.kind,
        work=section.work,
        download=download,
        buffers=section.buffers,
        local=section.local or (),
        bound=section.sum.bound,
        **made,
    )


def _require_rates(optimizer: ServerOptimizer, num_rounds: int) -> None:
    rate = getattr(optimizer, "lr", None)
    if not isinstance(rate, LearningRate):  # a plugin's own
        return
    try:
        rate.require_usable(num_rounds)
    except ValueError as error:
        key = "strategy.optimizer.lr_schedule"
        raise ConfigError(f"{key}: {error}", key=key, bound="0 or more at every version") from None


def _require_trusted(reducer: Reducer, job: Job) -> None:
    if isinstance(reducer, FLTrust) and job.job.sites and reducer.trusted not in job.job.sites:
        key = "strategy.reducer.trusted"
        raise ConfigError(
            f"{key} = {reducer.trusted!r} is not one of job.sites: {', '.join(job.job.sites)}; add it there",
            key=key,
            value=reducer.trusted,
        )


def _download(section: StrategySection) -> Codec | None:
    if section.download is None:
        return None
    made: Codec = parts.build("codec", section.download.kind, section.download.options, "strategy.download")
    return made


def require_regions_allowed(job: Job, regions: Sequence[str]) -> None:
    """Returns where these regions, which send sums in place of updates, may be in the cohort of a job.

    Raises:
        ConfigError: the reducer cannot work on sums; names it, the regions and why.
    """
    if not regions:
        return
    strategy = resolve(job)
    combined = combinations.Combined(
        schedule=strategy.schedule,
        codec=strategy.codec,
        reducer=strategy.reducer,
        buffers=strategy.buffers,
        server_evaluation=False,
        regions=True,
        download=strategy.download,
    )
    values = {
        "strategy.schedule": job.strategy.schedule.kind if job.strategy.schedule else strategy.name,
        "strategy.reducer": strategy.reducer.name,
        "strategy.download": strategy.download.name if strategy.download else "",
        "regions": ", ".join(regions),
    }
    combinations.require_allowed(combined, values)


def _composition(kind: str) -> Composition:
    key = "strategy.kind"
    if kind in compositions.BUILT_IN:
        return compositions.BUILT_IN[kind]
    plugin = plugins.find("strategy", kind, key)
    if plugin is None:
        known = [*compositions.BUILT_IN, *(point.name for point in plugins.installed("strategy"))]
        raise parts.unknown_kind(key, kind, known)
    if not isinstance(plugin.value, Composition):
        raise ConfigError(
            f"{key} = {kind!r}: {plugin.source} gives no Composition", key=key, value=kind, bound="a Composition"
        )
    return plugin.value


def _wanted(composed: dict[str, Any], replaced: Part | None) -> dict[str, Any]:
    """Kind and options of a part: the composition's, with what the job says.

    The same kind keeps the composition's options that the job leaves out; another kind starts from its own defaults.
    """
    if replaced is None:
        return composed
    given = {"kind": replaced.kind, **replaced.options}
    return {**composed, **given} if replaced.kind == composed["kind"] else given


def _made(part: str, wanted: Mapping[str, Any]) -> Any:
    return parts.build(part, wanted["kind"], {name: value for name, value in wanted.items() if name != "kind"})


def _values(
    section: StrategySection, wanted: Mapping[str, Mapping[str, Any]], made: Mapping[str, Any], job: Job
) -> dict[str, Any]:
    kinds = {f"strategy.{part}": options["kind"] for part, options in wanted.items()}
    kinds["strategy.schedule"] += f" of at least {made['schedule'].fewest_updates} updates"
    kinds["strategy.reducer"] += f" of at least {made['reducer'].fewest_updates} updates"
    return {
        **kinds,
        "strategy.buffers": section.buffers,
        "strategy.local": section.local,
        "strategy.download": section.download.kind if section.download else "",
        "evaluation.server": job.evaluation.server,
    }
