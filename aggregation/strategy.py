"""A strategy: who syncs and when, what changes in the local loop, how updates travel, combine and move the model.

A composition of parts and never a subclass: `resolve` makes one from a job, on the server, at the sites and in the
simulator alike. Events and actions of schedules are named here too, for those who drive one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atoll.aggregation import combinations, compositions, parts, plugins
from atoll.aggregation.codecs.encoding import Codec, feedback_of, is_sparse
from atoll.aggregation.compositions import Composition
from atoll.aggregation.fragments import Fragments
from atoll.aggregation.lanes import Lane
from atoll.aggregation.layout import Buffers
from atoll.aggregation.lr_schedules import LearningRate
from atoll.aggregation.masking import MASKING
from atoll.aggregation.metrics import require_sums
from atoll.aggregation.reducers.append import Append, require_alone
from atoll.aggregation.reducers.central import FLTrust
from atoll.aggregation.reducers.reduction import Reducer
from atoll.aggregation.round_sum import LARGEST_BOUND, SMALLEST_BOUND
from atoll.aggregation.rules.personal import Personal
from atoll.aggregation.rules.rule import LocalRule, lanes_of
from atoll.aggregation.schedule import (
    Accepted,
    Action,
    Branching,
    Cancel,
    Close,
    Committed,
    Dispatch,
    Event,
    Exchange,
    Failed,
    GiveUp,
    Joined,
    Left,
    Ready,
    Schedule,
    SetTimer,
    Stepped,
    Stop,
    TimerFired,
)
from atoll.aggregation.schedules.rounds import Rounds
from atoll.aggregation.script_terms import require_scriptable
from atoll.aggregation.server_optimizers import ServerOptimizer
from atoll.wire.errors import ConfigError
from atoll.wire.job import Job, Part, StrategySection, WorkSection
from atoll.wire.manifest import Manifest

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
    personal: Personal  # what a site keeps for itself
    exchange: Exchange  # how much of the model a round moves, and the steps that it counts

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """What travels beside the model."""
        return lanes_of(self.rule)

    def fragments(self, manifest: Manifest) -> Fragments:
        """The parts of a model that rounds exchange in turns. Raises ConfigError as `Fragments` does."""
        count = self.exchange.num_fragments
        return Fragments(manifest, self.codec, self.buffers, self.local, count=count)


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
    if job.asks != "train" and (not isinstance(made["schedule"], Rounds) or isinstance(made["schedule"], Stepped)):
        key = "strategy.schedule.kind"
        text = f"{key} = {wanted['schedule']['kind']!r}: a job that trains nothing asks in one round; take rounds"
        raise ConfigError(text, key=key, value=wanted["schedule"]["kind"], bound="rounds")
    _require_rates(made["optimizer"], job.job.rounds)
    _require_trusted(made["reducer"], job)
    if isinstance(made["reducer"], Append):
        require_alone(section, wanted)
    schedule: Any = made["schedule"]
    if isinstance(schedule, Branching):
        _require_rates(schedule.inner_optimizer, job.job.rounds)
        _require_combined(schedule, job)
    download = _download(section)
    combinations.require_allowed(
        combinations.Combined(
            schedule=made["schedule"],
            codec=made["codec"],
            reducer=made["reducer"],
            buffers=section.buffers,
            local=section.local or (),
            server_evaluation=job.evaluation.server,
            site_evaluation=job.evaluation.sites,
            rule=made["rule"],
            optimizer=made["optimizer"],
            personal=made["personal"],
            num_named=len(job.job.sites),
            download=download,
            masked=job.secure_aggregation,
            settled=False,
        ),
        _values(section, wanted, made, job),
    )
    exchange = made["schedule"].exchange if isinstance(made["schedule"], Stepped) else Exchange()
    strategy = Strategy(
        name=section.kind,
        work=_work(section.work, exchange, wanted["schedule"]["kind"]),
        exchange=exchange,
        download=download,
        buffers=section.buffers,
        local=section.local or (),
        bound=section.sum.bound,
        **made,
    )
    if job.job.script is not None:
        require_scriptable(job, strategy)  # pyright: ignore[reportArgumentType]  # it finds this module by two paths
    return strategy


def _work(section: WorkSection, exchange: Exchange, schedule: str) -> WorkSection:
    """The work of a round: the job's, but for steps that the schedule counts."""
    if exchange.steps is None:
        return section
    for key in ("epochs", "steps"):
        if (value := getattr(section, key)) is not None:
            raise ConfigError(
                f"strategy.work.{key} = {value} with strategy.schedule = {schedule!r}: the schedule says how many steps "
                "a round has; remove it here",
                key=f"strategy.work.{key}",
                value=str(value),
                bound="absent",
            )
    return section.model_copy(update={"steps": exchange.steps})


def _require_rates(optimizer: ServerOptimizer, num_rounds: int) -> None:
    rate = getattr(optimizer, "lr", None)
    if not isinstance(rate, LearningRate):  # a plugin's own
        return
    try:
        rate.require_usable(num_rounds)
    except ValueError as error:
        key = "strategy.optimizer.lr_schedule"
        raise ConfigError(f"{key}: {error}", key=key, bound="0 or more at every version") from None


def _require_combined(schedule: Branching, job: Job) -> None:
    every = schedule.combines_every
    if job.job.rounds % every:
        raise ConfigError(
            f"job.rounds = {job.job.rounds} with strategy.schedule.rounds = {every}: the groups are combined every {every} "
            "rounds, and the last ones would be in no version of all",
            key="job.rounds",
            value=str(job.job.rounds),
            bound=f"a multiple of {every}",
        )


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
    key = "strategy.download"
    made: Codec = parts.build("codec", section.download.kind, section.download.options, key)
    reason = ""
    if is_sparse(made):
        reason = (
            "a model most of whose values are left out is no model; take a codec that sends all of them, such as int8"
        )
    elif feedback_of(made) != "none":
        reason = (
            "the server keeps each version in full and codes it anew, so that it has no error to carry over; leave "
        )
        reason += "error_feedback and difference out"
    if reason:
        raise ConfigError(f"{key} = {made.name!r}: {reason}", key=key, value=made.name, bound=reason)
    return made


def require_regions_allowed(job: Job, regions: Sequence[str]) -> None:
    """Returns where these regions, which send sums in place of updates, may be in the cohort of a job; or none of them.

    Raises:
        ConfigError: the reducer cannot work on sums; names it, the regions and why.
    """
    if not regions and job.secure_aggregation is None:
        return
    if regions and job.asks != "train":
        raise ConfigError(
            f"regions = {', '.join(regions)!r}: a region has no data of its own and hands on updates alone, not "
            f"{job.asks}; name sites of this federation alone in job.sites",
            key="job.sites",
        )
    if regions:
        require_sums(job)
    strategy = resolve(job)
    combined = combinations.Combined(
        schedule=strategy.schedule,
        codec=strategy.codec,
        reducer=strategy.reducer,
        buffers=strategy.buffers,
        server_evaluation=False,
        regions=bool(regions),
        download=strategy.download,
        rule=strategy.rule,
        optimizer=strategy.optimizer,
        num_named=len(job.job.sites),
        masked=job.secure_aggregation,
    )
    values = {
        "strategy.schedule": job.strategy.schedule.kind if job.strategy.schedule else strategy.name,
        "strategy.codec": f"{strategy.codec.name}, feedback: {feedback_of(strategy.codec)}",
        "strategy.reducer": strategy.reducer.name,
        "strategy.download": strategy.download.name if strategy.download else "",
        "regions": ", ".join(regions),
        MASKING: _terms(job),
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
        "evaluation.sites": job.evaluation.sites,
        MASKING: _terms(job),
    }


def _terms(job: Job) -> str:
    section = job.secure_aggregation
    return f"{section.threat}, of at least {section.fewest_survivors} sites" if section is not None else "absent"
