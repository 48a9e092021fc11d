"""What agent and worker say to each other over a unix socket inside one site. JSON, one message a line; no tensors.

Tensors pass through files that both map: the base model (read only) and the update (written by the worker).
The worker handles one request at a time, in order, and answers each with its own kind or with `Failed`; `Cancel` is
read at once and ends a training or an evaluation at its next step. Answers carry the `key` of what they answer, so
that the agent can tell the answer of a task that it gave up from the one it waits for.
Loads no torch: the agent imports this.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from atoll.aggregation.statistics import FeatureStatistics
from atoll.wire import errors
from atoll.wire.errors import AtollError, LocalError, Malformed, RemoteError

LINE_BYTES = 8 << 20  # a job (at most 1 MiB) escaped inside JSON, or the cells of 256 features, with room

_STRICT = ConfigDict(extra="forbid", strict=True)
_Finite = Annotated[float, Field(allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=0)]
MetricSums = dict[str, tuple[_Finite, _Finite]]
"""Sum and count by metric name; the metric is sum / count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepare:
    """Load app, model and data of a run. The first request to a worker; answered by `Prepared`."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    kind: Literal["prepare"] = "prepare"
    run: str
    site: str  # name of the site, or of the server for evaluation on the server's side
    app_name: str  # as registered here and named in the job
    distribution: str
    entry_point: str  # name in the group atoll.apps
    app_hash: str  # hex SHA-256 that the installed app must have
    data: dict[str, Any]  # the table [data.NAME] of this machine's settings
    job: str  # canonical JSON (Job.canonical)
    manifest_path: str  # serialised Manifest of the run's model
    state_folder: str  # what the site keeps over the rounds of this run
    device: str | None = None  # this machine's wish; None leaves it to the job
    rounding_seed_hex: str = ""  # 32 bytes: the secret from which the randomness of rounding derives
    training: bool = True  # False: evaluation only, training data is not opened
    encoded: bool = True  # versions come by the job's codec of downloads, where it names one
    submitted_by: str = ""  # name of the researcher; regions ask their sites in that name
    parallel: dict[str, Any] | None = None  # the table [parallel] of this machine's settings; None leaves it to the job


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One model of those that a site mixes into its own (gossip), as the run's manifest lays it out."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    site: str
    weight: Annotated[float, Field(gt=0, le=1)]
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Train:
    """Train from a base model and write the update. Answered by `Trained`, with `Progress` before."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    kind: Literal["train"] = "train"
    key: str  # names the task and attempt, comes back in answers; never used twice
    round: Annotated[int, Field(ge=1)]
    base_version: _Count
    base_path: str  # model file of the base version, or its bytes as the codec of downloads made them
    out_path: str  # file that the worker creates, with the update's bytes
    config: dict[str, Any] = field(default_factory=dict)  # keys of [strategy.work] that differ from the job's
    num_sites: _Count = 0  # terms of the round's exact sum, which a region folds with; 0 where not told
    max_weight: _Count = 0
    counted_round: _Count = 0  # last round whose version holds this site's update; 0: none
    mix: list[Part] = field(
        default_factory=list
    )  # training begins with their mixture; with the base version where empty
    gives: Literal["update", "model", "mixed"] = "update"  # "model": whole; "mixed": nothing is trained


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluate:
    """Judge a model version on the test split. Answered by `Evaluated`."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    kind: Literal["evaluate"] = "evaluate"
    key: str
    round: _Count  # round that made the version; 0 for the first model
    base_version: _Count
    base_path: str
    config: dict[str, Any] = field(default_factory=dict)
    mix: list[Part] = field(default_factory=list)  # the site's own model, whose distance to the version is told too


@dataclass(frozen=True, slots=True, kw_only=True)
class Describe:
    """Make statistics of the training data, as the job's table says. Answered by `Described`."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    kind: Literal["describe"] = "describe"
    key: str
    round: Annotated[int, Field(ge=1)]
    min_cell_count: Annotated[int, Field(ge=1)]  # the larger of the site's and the job's


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskKey:
    """A key stream over one lane of a masked input, and whether it is taken away."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    key_hex: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] = field(repr=False)
    negative: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Mask:
    """Write the masked input of a session from an update that stays here. Answered by `Masked`.

    Asked again with the same values, the worker writes the same bytes.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    kind: Literal["mask"] = "mask"
    key: str  # names task, attempt and session
    round: Annotated[int, Field(ge=1)]  # of the training
    private_path: str  # the update as `Train` had it written
    out_path: str  # file that the worker creates
    exact: list[Annotated[int, Field(ge=0, lt=2**64)]] = field(
        repr=False
    )  # lane 0; its second, and factors at its end, are put in by the worker
    exact_masks: list[MaskKey]
    masks: list[MaskKey]  # of lane 1
    bits: Literal[16, 32]  # of lane 1
    scale: Annotated[float, Field(gt=0, allow_inf_nan=False)] = field(
        repr=False
    )  # levels of a value of 1, of an update of the largest weight that is not stale
    share: Annotated[float, Field(gt=0, le=1)] = field(
        default=1.0, repr=False
    )  # of this update's weight in the largest, by which values count where the job's reducer weighs
    num_sites: Annotated[int, Field(ge=1)] = 1  # of the session, whose sums must not overflow
    bound: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    max_clipped: _Count = 0  # values that may be cut to the bound
    staleness: _Count = 0  # versions by which the update's base is older than the round's


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """Nobody wants this task any more. No answer of its own: the task fails as Stale, or had ended before."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    kind: Literal["cancel"] = "cancel"
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Close:
    """End the worker in order. Answered by the end of the stream."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    kind: Literal["close"] = "close"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    kind: Literal["prepared"] = "prepared"
    key: str = "prepare"
    max_weight: _Count  # largest weight of an update of this site in this run; 0 where it only evaluates
    update_bytes: _Count  # length of its longest update, and at most that of a payload; 0 where it only evaluates
    device: str  # as torch names it: "cpu", "cuda:0"
    # From which version on versions come in which length, where a codec makes them smaller; 0: as model files.
    download_bytes: list[tuple[_Count, _Count]] = field(default_factory=list)
    fragments: list[tuple[_Count, _Count]] = field(default_factory=list)  # start and stop in a version's data, of each
    # that is exchanged by itself: round r, from 1, moves number (r - 1) modulo their number; none where all moves
    num_sites: _Count = 0  # below a region; 0 of a worker
    sum_weights: _Count = 0  # of a region: largest weight of its sums
    most_version_bytes: _Count = 0  # of a list of payloads, which grows and comes as it is; 0 of tensors
    sums_stale: bool = False  # updates to several base versions are summed (FedBuff)

    def encoded_bytes(self, version: int) -> int:
        """Length in which a version comes; 0 where it comes as a model file."""
        return next((size for begin, size in reversed(self.download_bytes) if begin <= version), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    kind: Literal["progress"] = "progress"
    key: str
    done: _Count  # optimizer steps
    total: _Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """The update lies at `out_path`, whole; the agent makes it durable."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    kind: Literal["trained"] = "trained"
    key: str
    weight: Annotated[int, Field(ge=1)]  # examples
    metrics: MetricSums
    num_bytes: _Count
    crc32: _Count  # of the file's bytes, zlib polynomial
    num_values: _Count = 0  # length of its flat vector (`UpdateLayout.num_values`)
    num_factors: _Count = 0  # values of it that are factors of the job's rule


@dataclass(frozen=True, slots=True, kw_only=True)
class Masked:
    """The masked input lies at `out_path`, whole; the agent makes it durable."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    kind: Literal["masked"] = "masked"
    key: str
    num_bytes: _Count
    crc32: _Count
    sha256_hex: str
    num_clipped: _Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    kind: Literal["evaluated"] = "evaluated"
    key: str
    metrics: MetricSums  # empty where the app has no test data here


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    kind: Literal["described"] = "described"
    key: str
    features: dict[str, FeatureStatistics]  # without those that are withheld


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A request came to nothing. The worker lives on and takes the next one."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    kind: Literal["failed"] = "failed"
    key: str
    error: dict[str, str | int]  # the fields of ErrorDetail; `kind` may also be a LocalError

    @classmethod
    def of(cls, key: str, error: AtollError) -> Failed:
        """The message that carries `error`."""
        if isinstance(error, RemoteError):
            places: dict[str, str | int] = {"site": error.site, "run": error.run, "round": error.round}
            fault: dict[str, str | int] = {"field": error.field, "value": error.value, "bound": error.bound}
            return cls(key=key, error={"kind": type(error).__name__, "message": error.message, **places, **fault})
        return cls(key=key, error={"kind": type(error).__name__, "message": str(error)})

    def to_error(self) -> AtollError:
        """The error that the worker met: a RemoteError as it may travel on, or a LocalError or ConfigError."""
        fields = dict(self.error)
        kind, message = str(fields.pop("kind", "")), str(fields.pop("message", ""))
        if own := _OWN_KINDS.get(kind):
            return own(message)
        places = {name: str(fields.get(name, "")) for name in ("site", "run", "field", "value", "bound")}
        return errors.KINDS.get(kind, RemoteError)(message, round=int(fields.get("round", 0)), **places)


_OWN_KINDS: Mapping[str, type[AtollError]] = {
    kind.__name__: kind for kind in (errors.ConfigError, LocalError, *LocalError.__subclasses__())
}

Request = Prepare | Train | Mask | Evaluate | Describe | Cancel | Close
Answer = Prepared | Progress | Trained | Masked | Evaluated | Described | Failed
Message = Request | Answer

_ADAPTER: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="kind")])


def encode(message: Message) -> bytes:
    """One line of JSON, newline included. Raises Malformed where a field breaks its bound."""
    line = _ADAPTER.dump_json(message)
    decode(line)  # a sender learns of its own mistake, such as a metric that is not finite
    return line + b"\n"


def decode(line: bytes) -> Message:
    """The message in one line. Raises Malformed where it is none."""
    try:
        return _ADAPTER.validate_json(line)
    except ValidationError as error:
        raise _explain(error) from None


def _explain(error: ValidationError) -> Malformed:
    fault = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = ".".join(str(step) for step in fault["loc"]) or "message"
    return Malformed(f"message between agent and worker: {place}: {fault['msg']}", field=place)
