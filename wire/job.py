"""The job file: one strict TOML document that researcher, server, site and simulator read alike.

An unknown key is an error that names the line and the nearest known one. The parts of a strategy stay open here (`Part`: a kind
and its options), since plugins bring kinds; `atoll.aggregation.strategy.resolve` checks the options of each.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from atoll.wire.control_section import BestSection, ControlSection
from atoll.wire.duration import Seconds as Seconds  # noqa: PLC0414  named from here by all other tables
from atoll.wire.duration import parse_duration_s as parse_duration_s  # noqa: PLC0414
from atoll.wire.errors import ConfigError, Malformed
from atoll.wire.explain import explain
from atoll.wire.names import check_label, check_run_id, check_site_name
from atoll.wire.overrides import changed
from atoll.wire.parallel_section import ParallelSection
from atoll.wire.privacy_section import PrivacySection, SecureAggregationSection
from atoll.wire.script_terms import with_terms_of_scripts
from atoll.wire.statistics_section import StatisticsSection
from atoll.wire.strict import Strict as Strict  # noqa: PLC0414  named from here by all other tables
from atoll.wire.toml_file import TomlFile, read_toml

JOB_BYTES = 1 << 20  # a job is a page of text; 1 MiB leaves room for [app] tables
MAX_DEPTH = 32  # tables within tables; a job has three

Asks = Literal["train", "evaluate", "statistics"]


def _checked(check: Callable[[str], str], value: str) -> str:
    try:
        return check(value)
    except Malformed as error:
        raise ValueError(f"wanted {error.bound}") from None


Label = Annotated[str, AfterValidator(partial(_checked, partial(check_label, field="name")))]
SiteName = Annotated[str, AfterValidator(partial(_checked, check_site_name))]
RunId = Annotated[str, AfterValidator(partial(_checked, check_run_id))]


class Part(BaseModel):
    """One part of a strategy: which kind, and its options as written."""

    model_config = ConfigDict(extra="allow", frozen=True)
    kind: str = Field(min_length=1, max_length=64)

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class JobSection(Strict):
    """`[job]`: what is trained, where, how long."""

    name: Label
    app: Label | None = None  # either this
    script: Label | None = None  # or this: a script of the sites, with a loop of its own (docs/scripts.md)
    data: Label | None = None  # name of the data at the sites; the app's name where absent, none of a script
    rounds: int = Field(ge=1, le=1_000_000)
    seed: int = Field(default=0, ge=0, lt=2**63)
    sites: tuple[SiteName, ...] = ()  # only these; empty means every site of the federation
    wait_for_sites: Seconds = 600.0  # how long a run waits for its minimum of sites before it fails
    start: str | None = None  # model file that version 0 is read from, beside the job file; stays on this machine
    continues: RunId | None = None  # run that this one goes on from; `atoll run --resume` sets it

    @model_validator(mode="after")
    def _one_code(self) -> JobSection:
        if (self.app is None) == (self.script is None):
            raise ValueError("name an app or a script, and not both: app = ... or script = ...")
        return self

    @property
    def code(self) -> str:
        """Name of the app or of the script."""
        return self.app or self.script or ""


class WorkSection(Strict):
    """`work`: local training of one round, in epochs or in optimizer steps."""

    epochs: int | None = Field(default=None, ge=1, le=100_000)
    steps: int | None = Field(default=None, ge=1, le=100_000_000)
    batch_size: int = Field(default=32, ge=1, le=1_000_000)  # 0 is not "all": full_batch says that
    full_batch: bool = False

    @model_validator(mode="after")
    def _one_unit(self) -> WorkSection:
        if self.epochs is not None and self.steps is not None:
            raise ValueError("give epochs or steps, not both")
        return self

    @property
    def num_epochs(self) -> int | None:
        """Epochs a round; None where steps count. One where neither is given."""
        return None if self.steps is not None else (self.epochs or 1)


class SumSection(Strict):
    """`sum`: the public bound and the cohort size that fix the quantum of exact sums (docs/exact-sums.md)."""

    bound: float = Field(default=1024.0, gt=0, le=1e30)  # largest magnitude in a difference


class StrategySection(Strict):
    """`[strategy]`: a named composition; each part can be replaced."""

    kind: str = "fedavg"
    schedule: Part | None = None
    work: WorkSection = WorkSection()
    rule: Part | None = None
    codec: Part | None = None
    download: Part | None = None  # codec by which versions travel to the sites; they travel as they are where absent
    reducer: Part | None = None
    optimizer: Part | None = None
    buffers: Literal["mean", "local", "first"] = "mean"  # float buffers; integers: "first" or the maximum
    local: tuple[str, ...] | None = None  # patterns of names of tensors that stay at their site, such as "head.*"
    parameters: Literal["all", "trainable"] | None = None  # that travel: all, or only those that require gradients
    sum: SumSection = SumSection()
    personal: Part | None = None  # a model that a site keeps for itself, such as { kind = "ditto" }


class MetricSection(Strict):
    """`evaluation.metrics.NAME`: one more metric of a version, made of what each site reports of another one."""

    of: str = Field(min_length=1, max_length=256)  # name of the sites' metric
    by: str = Field(min_length=1, max_length=64)  # "mean", "sum", "min", "max", "site_mean", or a plugin's name


class EvaluationSection(Strict):
    """`[evaluation]`: how often, and where, a committed version is judged."""

    sites: bool = True
    server: bool = False
    every: int = Field(default=1, ge=1)
    metrics: dict[str, MetricSection] | None = Field(default=None, max_length=64)
    only: bool | None = None  # true: nothing is trained, version 0 is judged (docs/tasks.md)
    by_site: bool | None = None  # of a run that only evaluates: people see each site's metrics too


class TrainingSection(Strict):
    """`[training]`: how a worker computes; a site may override the device."""

    device: str = "auto"  # "auto", "cpu", "cuda", "cuda:1", "mps"
    threads: int | None = Field(default=None, ge=1, le=1024)
    deterministic: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The rounds of a run from `from_round` on, to the next stage, and the job as it is in them."""

    from_round: int
    job: Job


class Job(Strict):
    """A whole job file."""

    job: JobSection
    app: dict[str, Any] = Field(default={})
    strategy: StrategySection = StrategySection()
    evaluation: EvaluationSection = EvaluationSection()
    statistics: StatisticsSection | None = None
    training: TrainingSection = TrainingSection()
    parallel: ParallelSection | None = None
    control: ControlSection | None = None
    privacy: PrivacySection | None = None

    @model_validator(mode="before")
    @classmethod
    def _scripts_judge_nothing(cls, table: Any) -> Any:
        return with_terms_of_scripts(table)

    @model_validator(mode="after")
    def _judged_where_it_is_evaluated(self) -> Job:
        best = self.control.best if self.control is not None else None
        if best is not None and not getattr(self.evaluation, best.at):
            raise ValueError(
                f'control.best.at = "{best.at}" needs evaluation.{best.at} = true: nothing is evaluated there'
            )
        return self

    @model_validator(mode="after")
    def _one_question(self) -> Job:
        if self.asks == "train":
            return self
        if self.statistics is not None and self.evaluation.only:
            raise ValueError("[statistics] and evaluation.only = true are two jobs: submit each by itself")
        if self.job.rounds != 1:
            raise ValueError(f"job.rounds = {self.job.rounds}: a job that trains nothing has one round; set rounds = 1")
        if self.statistics is None and not self.evaluation.sites:
            raise ValueError("evaluation.only = true asks the sites: set evaluation.sites = true")
        if self.control is not None:
            raise ValueError("[control] is about training, and this job trains nothing: remove the table")
        if self.privacy is not None:
            raise ValueError("[privacy] is about updates, and this job trains nothing: remove the table")
        if self.job.continues is not None:
            raise ValueError(f"job.continues = {self.job.continues!r}: only a training goes on from another one")
        return self

    @property
    def asks(self) -> Asks:
        """What a round of this job asks of a site."""
        if self.statistics is not None:
            return "statistics"
        return "evaluate" if self.evaluation.only else "train"

    @property
    def by_site(self) -> bool:
        """Whether people see the answer of each site by itself, of a job that trains nothing."""
        return self.statistics.by_site if self.statistics is not None else bool(self.evaluation.by_site)

    @property
    def data_name(self) -> str | None:  # None of a script that names none
        return self.job.data or self.job.app

    @property
    def best(self) -> BestSection | None:
        """By what the best version is told; None where none is kept."""
        return self.control.best if self.control is not None else None

    @property
    def secure_aggregation(self) -> SecureAggregationSection | None:
        """The terms by which updates are masked; None where they are not."""
        return self.privacy.secure_aggregation if self.privacy is not None else None

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The job from the first round on, and with each override of `control` and those before it.

        Raises:
            ValidationError: a value that an override sets is out of bounds; `parse_job` has looked before.
        """
        stages = [Stage(from_round=1, job=self)]
        for override in self.control.override if self.control is not None else ():
            table = stages[-1].job.model_dump(exclude_none=True)
            table = changed(table, override.app, override.strategy, override.evaluation or {})
            stages.append(Stage(from_round=override.from_round, job=Job.model_validate(table)))
        return tuple(stages)

    def at(self, round_: int) -> Job:
        """The job as it is in a round (before the first: as in the first)."""
        return next((stage.job for stage in reversed(self.stages) if stage.from_round <= round_), self)

    def canonical(self) -> bytes:
        """The bytes that travel and are hashed: JSON, sorted keys, no blanks."""
        table = self.model_dump(mode="json", exclude_none=True, exclude={"job": {"start"}})
        return json.dumps(table, sort_keys=True, separators=(",", ":")).encode()


# Tables of later versions: refused by name, never ignored.
_NOT_YET = {
    "privacy.differential_privacy": "differential privacy is not in this version of Atoll",
}


def _refuse_later_tables(table: dict[str, Any], source: TomlFile | str) -> None:
    privacy = table.get("privacy")
    for key, reason in _NOT_YET.items():
        head, _, tail = key.partition(".")
        present = head in table and (not tail or (isinstance(privacy, dict) and tail in privacy))
        if present:
            raise ConfigError(f"{_place(source, key.split('.'))}: [{key}]: {reason}; remove the table", key=key)
    if "differential_privacy" in table:
        key, reason = "differential_privacy", _NOT_YET["privacy.differential_privacy"]
        raise ConfigError(f"{_place(source, [key])}: [{key}]: {reason}; remove the table", key=key)


def _place(source: TomlFile | str, keys: Sequence[str | int]) -> str:
    return source if isinstance(source, str) else source.place(keys)


def _refuse_unportable(value: object, source: TomlFile | str, keys: tuple[str, ...] = ()) -> None:
    """Raises ConfigError for what canonical JSON cannot carry: dates, NaN, infinities, tables without end."""
    key = ".".join(keys)
    if len(keys) > MAX_DEPTH:
        text = f"tables are nested more than {MAX_DEPTH} deep; put them side by side"
        raise ConfigError(f"{_place(source, keys[:1])}: {text}", key=key, bound=str(MAX_DEPTH))
    if isinstance(value, dict):
        for name, item in value.items():
            _refuse_unportable(item, source, (*keys, str(name)))
    elif isinstance(value, list):
        for position, item in enumerate(value):
            _refuse_unportable(item, source, (*keys, str(position)))
    elif not isinstance(value, str | int | float) and value is not None:
        text = f"{key} = {value}: write dates and times as text, in quotes"
        raise ConfigError(f"{_place(source, keys)}: {text}", key=key, value=str(value))
    elif isinstance(value, float) and not math.isfinite(value):
        text = f"{key} = {value}: wanted a finite number"
        raise ConfigError(f"{_place(source, keys)}: {text}", key=key, value=str(value))


def parse_job(table: dict[str, Any], source: TomlFile | str = "job") -> Job:
    """The job in a parsed TOML or JSON table; `source` is where it came from, for errors.

    Raises:
        ConfigError: a key is unknown, missing or out of bounds, or asks for something that this version has not.
    """
    _refuse_later_tables(table, source)
    _refuse_unportable(table, source)
    try:
        job = Job.model_validate(table)
    except ValidationError as error:
        raise explain(error, Job, source) from None
    try:
        _ = job.stages
    except ValidationError as error:
        place = _place(source, ["control", "override"])
        raise explain(error, Job, f"{place}: with control.override") from None
    return job


def evaluating(job: Job) -> Job:
    """The same job, but for its training: its sites judge version 0. Raises ConfigError where that cannot be."""
    table = job.model_dump(
        mode="json", exclude_none=True, exclude={"statistics": True, "control": True, "privacy": True}
    )
    table["job"] = {key: value for key, value in table["job"].items() if key not in ("start", "continues")} | {
        "rounds": 1
    }
    table["evaluation"]["only"] = True
    return parse_job(table)


def load_job(path: Path) -> Job:
    """The job in a TOML file; `job.start` is beside it. Raises ConfigError as `parse_job` and `read_toml` do."""
    file = _read(path)
    job = parse_job(file.table, file)
    return job if job.job.start is None else begun_from(job, start=path.parent / job.job.start)


def begun_from(job: Job, *, start: Path | None = None, continues: str | None = None) -> Job:
    """The job whose run begins with the values in a model file, or goes on from another run.

    Raises:
        ConfigError: it would be both.
    """
    given = {"start": str(start) if start is not None else None, "continues": continues}
    section = job.job.model_copy(update={key: value for key, value in given.items() if value is not None})
    if section.start is not None and section.continues is not None:
        raise ConfigError(
            f"job.start = {section.start!r}: run {section.continues} has a last version, and a run begins with one "
            "model: leave --from and job.start out, or --resume",
            key="job.start",
            value=section.start,
        )
    return job.model_copy(update={"job": section})


@contextmanager
def located(path: Path) -> Iterator[None]:
    """Has an error about a key of a job, which was read from `path`, name the file and the line too.

    The strategy's parts and the app's values are checked by those who know them, who do not know the file.
    """
    try:
        yield
    except ConfigError as error:
        keys = error.key.split(".")
        if keys[0] not in Job.model_fields or str(error).startswith(str(path)):
            raise
        file = _read(path)
        while len(keys) > 1 and file.line_of(keys) is None:
            del keys[-1]  # one that is missing is told of with its table
        message = str(error).removeprefix("job: ")
        raise ConfigError(
            f"{file.place(keys)}: {message}", key=error.key, value=error.value, bound=error.bound
        ) from error


def _read(path: Path) -> TomlFile:
    return read_toml(path, absent="give the path of a job file; the apps of examples/ have one each")


def decode_job(data: bytes) -> Job:
    """The job in canonical JSON from a peer. Raises ConfigError where it is none."""
    if len(data) > JOB_BYTES:
        raise ConfigError(
            f"job is {len(data)} bytes, at most {JOB_BYTES} are taken; shorten its [app] table",
            key="job",
            bound=str(JOB_BYTES),
        )
    try:
        table = json.loads(data)
    except (ValueError, RecursionError):
        raise ConfigError("job is not JSON; the sender's software is at fault: update it", key="job") from None
    if not isinstance(table, dict):
        raise ConfigError("job is not a JSON object; the sender's software is at fault: update it", key="job")
    return parse_job(table, "job")
