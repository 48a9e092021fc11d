"""The job file: one strict TOML document that researcher, server, site and simulator read alike.

An unknown key is an error that names the nearest known one. The parts of a strategy stay open here (`Part`: a kind
and its options), since plugins bring kinds; `atoll.aggregation.strategy.resolve` checks the options of each.
"""

from __future__ import annotations

import difflib
import json
import math
import re
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from atoll.wire.errors import ConfigError, Malformed
from atoll.wire.names import check_label, check_site_name

JOB_BYTES = 1 << 20  # a job is a page of text; 1 MiB leaves room for [app] tables
MAX_DEPTH = 32  # tables within tables; a job has three

_DURATION = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)\s*$")
_UNIT_S = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_duration_s(value: object) -> float:
    """Seconds from a number or a text such as "90s", "10m", "1.5h".

    Raises:
        ValueError: it is neither, or not positive.
    """
    if isinstance(value, str) and (match := _DURATION.match(value)):
        seconds = float(match[1]) * _UNIT_S[match[2]]
    elif isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value)
    else:
        raise ValueError('wanted a duration such as "90s", "10m" or "1.5h"')
    if not 0 < seconds < 10 * 365 * 86400:
        raise ValueError("a duration is longer than nothing and shorter than ten years")
    return seconds


def _checked(check: Callable[[str], str], value: str) -> str:
    try:
        return check(value)
    except Malformed as error:
        raise ValueError(f"wanted {error.bound}") from None


Seconds = Annotated[float, BeforeValidator(parse_duration_s)]
Label = Annotated[str, AfterValidator(partial(_checked, partial(check_label, field="name")))]
SiteName = Annotated[str, AfterValidator(partial(_checked, check_site_name))]


class Strict(BaseModel):
    """A frozen table of settings in which an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


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
    app: Label
    data: Label | None = None  # name of the data at the sites; the app's name where absent
    rounds: int = Field(ge=1, le=1_000_000)
    seed: int = Field(default=0, ge=0, lt=2**63)
    sites: tuple[SiteName, ...] = ()  # only these; empty means every site of the federation
    wait_for_sites: Seconds = 600.0  # how long a run waits for its minimum of sites before it fails


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
    local: tuple[str, ...] = ()  # patterns of names of tensors that stay at their site, such as "head.*"
    sum: SumSection = SumSection()


class EvaluationSection(Strict):
    """`[evaluation]`: how often, and where, a committed version is judged."""

    sites: bool = True
    server: bool = False
    every: int = Field(default=1, ge=1)


class TrainingSection(Strict):
    """`[training]`: how a worker computes; a site may override the device."""

    device: str = "auto"  # "auto", "cpu", "cuda", "cuda:1", "mps"
    threads: int | None = Field(default=None, ge=1, le=1024)
    deterministic: bool = True


class Job(Strict):
    """A whole job file."""

    job: JobSection
    app: dict[str, Any] = {}
    strategy: StrategySection = StrategySection()
    evaluation: EvaluationSection = EvaluationSection()
    training: TrainingSection = TrainingSection()

    @property
    def data_name(self) -> str:
        return self.job.data or self.job.app

    def canonical(self) -> bytes:
        """The bytes that travel and are hashed: JSON, sorted keys, no blanks."""
        return json.dumps(
            self.model_dump(mode="json", exclude_none=True), sort_keys=True, separators=(",", ":")
        ).encode()


# Tables of later versions: refused by name, never ignored.
_NOT_YET = {
    "privacy.differential_privacy": "differential privacy is not in this version of Atoll",
    "privacy": "secure aggregation and differential privacy are not in this version of Atoll",
    "parallel": "parallel layouts inside a site are not in this version of Atoll",
}


def _refuse_later_tables(table: dict[str, Any], path: str) -> None:
    privacy = table.get("privacy")
    for key, reason in _NOT_YET.items():
        head, _, tail = key.partition(".")
        present = head in table and (not tail or (isinstance(privacy, dict) and tail in privacy))
        if present:
            raise ConfigError(f"{path}: [{key}]: {reason}; remove the table", key=key)
    if "differential_privacy" in table:
        raise ConfigError(
            f"{path}: [differential_privacy]: {_NOT_YET['privacy.differential_privacy']}; remove the table",
            key="differential_privacy",
        )


def _refuse_unportable(value: object, path: str, keys: tuple[str, ...] = ()) -> None:
    """Raises ConfigError for what canonical JSON cannot carry: dates, NaN, infinities, tables without end."""
    key = ".".join(keys)
    if len(keys) > MAX_DEPTH:
        raise ConfigError(f"{path}: tables are nested more than {MAX_DEPTH} deep", key=key, bound=str(MAX_DEPTH))
    if isinstance(value, dict):
        for name, item in value.items():
            _refuse_unportable(item, path, (*keys, str(name)))
    elif isinstance(value, list):
        for position, item in enumerate(value):
            _refuse_unportable(item, path, (*keys, str(position)))
    elif not isinstance(value, str | int | float) and value is not None:
        raise ConfigError(f"{path}: {key} = {value}: write dates and times as text", key=key, value=str(value))
    elif isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{path}: {key} = {value}: wanted a finite number", key=key, value=str(value))


def _known_keys(model: type[BaseModel], location: tuple[Any, ...]) -> list[str]:
    """Keys that the table at `location` (without its last element, the unknown key) takes."""
    steps = iter(location[:-1])
    for step in steps:
        field = model.model_fields.get(str(step))
        annotation = field.annotation if field else None
        if get_origin(annotation) is dict:
            next(steps, None)  # a name of the user's choice, as in [apps.NAME]
        candidates = [a for a in getattr(annotation, "__args__", (annotation,)) if isinstance(a, type)]
        nested = next((a for a in candidates if issubclass(a, BaseModel)), None)
        if nested is None:
            return []
        model = nested
    return list(model.model_fields)


def explain(error: ValidationError, model: type[BaseModel], path: str) -> ConfigError:
    """One ConfigError for the fault that says most: key, value, what is wanted, the nearest known key."""
    # An unknown key comes first: it is often the misspelt form of the one that is missing, and carries the hint.
    faults = sorted(error.errors(include_url=False), key=lambda fault: fault["type"] != "extra_forbidden")
    fault = faults[0]
    key = ".".join(str(step) for step in fault["loc"]) or "(whole file)"
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    if fault["type"] == "extra_forbidden":
        known = _known_keys(model, fault["loc"])
        near = difflib.get_close_matches(str(fault["loc"][-1]), known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(sorted(known))}"
        return ConfigError(f"{path}: unknown key {key!r}; {hint}{more}", key=key)
    if fault["type"] == "missing":
        return ConfigError(f"{path}: {key} is missing{more}", key=key)
    wanted = fault["msg"].removeprefix("Value error, ")
    if isinstance(fault["input"], dict):  # a rule over several keys: the message names them
        return ConfigError(f"{path}: {key}: {wanted}{more}" if fault["loc"] else f"{path}: {wanted}{more}", key=key)
    value = repr(fault["input"])[:80]
    return ConfigError(f"{path}: {key} = {value}: {wanted}{more}", key=key, value=value, bound=wanted)


def parse_job(table: dict[str, Any], path: str = "job") -> Job:
    """The job in a parsed TOML or JSON table; `path` names the source in errors.

    Raises:
        ConfigError: a key is unknown, missing or out of bounds, or asks for something that this version has not.
    """
    _refuse_later_tables(table, path)
    _refuse_unportable(table, path)
    try:
        return Job.model_validate(table)
    except ValidationError as error:
        raise explain(error, Job, path) from None


def read_toml(path: Path) -> dict[str, Any]:
    """The table in a TOML file.

    Raises:
        ConfigError: the file is missing, unreadable, or not TOML (with line and column).
    """
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8 text") from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from None


def load_job(path: Path) -> Job:
    """The job in a TOML file. Raises ConfigError as `parse_job` and `read_toml` do."""
    return parse_job(read_toml(path), str(path))


def decode_job(data: bytes) -> Job:
    """The job in canonical JSON from a peer. Raises ConfigError where it is none."""
    if len(data) > JOB_BYTES:
        raise ConfigError(f"job is {len(data)} bytes, at most {JOB_BYTES} are taken", key="job", bound=str(JOB_BYTES))
    try:
        table = json.loads(data)
    except (ValueError, RecursionError):
        raise ConfigError("job is not JSON") from None
    if not isinstance(table, dict):
        raise ConfigError("job is not a JSON object")
    return parse_job(table, "job")
