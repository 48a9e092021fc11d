"""What a simulation gives: its rounds, its last model, and files of both."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Self

from torch import Tensor

from atoll.simulations.figures import svg_of
from atoll.simulations.plots import curves, metrics_in
from atoll.simulations.waits import Waited
from atoll.wire.control_pb2 import MetricSum
from atoll.wire.errors import LocalError
from atoll.wire.manifest import Manifest
from atoll.wire.model_file import create
from atoll.wire.runs_pb2 import RoundRecord
from atoll.wire.secure_record import secure_values
from atoll.wire.tensors import views

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROUNDS_FILE, MODEL_FILE = "rounds.jsonl", "model.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundResult:
    """One committed round. Metrics are sum / count over sites; None where nothing was counted."""

    round: int
    version: int
    sites: int  # whose updates are in it
    weight: int  # examples
    train: Mapping[str, float | None]
    evaluate: Mapping[str, float | None]  # at the sites, of the version that it made
    server: Mapping[str, float | None]
    missing: Mapping[str, str]  # reason by site
    bytes_up: int
    bytes_down: int
    secure: Mapping[str, Any]  # of secure aggregation: how its sum was protected; empty without
    simulated_s: float  # since the run began, when it was committed
    waited: Waited
    spread: Mapping[str, Sequence[float]]  # of each metric at the sites: worst, quartiles, best
    wall_s: float  # the same on the machine that simulates; the rest of a round repeats with equal seeds

    @classmethod
    def of(
        cls,
        record: RoundRecord,
        *,
        simulated_s: float,
        wall_s: float,
        waited: Waited,
        spread: Mapping[str, Sequence[float]],
    ) -> RoundResult:
        """The result of a round's record."""
        return cls(
            round=record.round,
            version=record.version,
            sites=record.num_sites,
            weight=record.weight,
            train=_values(record.train_metrics),
            evaluate=_values(record.evaluate_metrics),
            server=_values(record.server_metrics),
            missing={site: record.reasons.get(site, "") for site in record.missing},
            bytes_up=record.bytes_up,
            bytes_down=record.bytes_down,
            secure=secure_values(record.secure) if record.HasField("secure") else {},
            simulated_s=simulated_s,
            waited=waited,
            spread=spread,
            wall_s=wall_s,
        )

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> RoundResult:
        """What `record` gave."""
        return cls(**{**values, "waited": Waited(**values["waited"])})

    def metric(self, name: str) -> float | None:
        """A metric of the version that this round made: at the server where it was judged there, else at the sites."""
        return self.server.get(name, self.evaluate.get(name))

    def record(self) -> dict[str, Any]:
        """The same as plain values."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A simulation that ended. `reason` says why where it has not finished."""

    name: str
    status: str  # "finished", "failed"
    reason: str
    sites: Sequence[str]
    rounds: Sequence[RoundResult]
    manifest: Manifest
    model_bytes: bytes  # of the last version, as the manifest lays them out
    simulated_s: float
    wall_s: float
    first_round_s: float | None  # on this machine, from the call to the first committed round
    engine: str  # that did the sites' work; it shows in no other field

    @property
    def model(self) -> Mapping[str, Tensor]:
        """Tensors of the last version, by name."""
        return views(self.manifest, bytearray(self.model_bytes), writable=True)

    def metrics(self, name: str = "accuracy") -> dict[int, float]:
        """A metric by round, where it is known."""
        known = {entry.round: entry.metric(name) for entry in self.rounds}
        return {number: value for number, value in known.items() if value is not None}

    def plot(self, metric: str = "accuracy") -> Figure:
        """A metric over rounds, bytes and simulated hours, and over the sites. Raises ConfigError without matplotlib."""
        return curves({self.name: [[entry.record() for entry in self.rounds]]}, metric)

    def _repr_html_(self) -> str:
        """What a notebook shows of it."""
        rounds = [entry.record() for entry in self.rounds]
        found = next(metrics_in(rounds), None)
        last = "" if found is None else f", {found} {self.rounds[-1].metric(found)}"
        head = f"<b>{html.escape(self.name)}</b>: {self.status}, {len(rounds)} rounds of {len(self.sites)} sites{last}"
        return head if found is None else f"{head}<br>{svg_of(self.plot(found))}"

    def record(self, *, rounds: bool = True) -> dict[str, Any]:
        """The same as plain values, without the model."""
        last = self.rounds[-1] if self.rounds else None
        return {
            "name": self.name,
            "status": self.status,
            "reason": self.reason,
            "sites": len(self.sites),
            "rounds": [entry.record() for entry in self.rounds] if rounds else len(self.rounds),
            "metrics": dict(last.server or last.evaluate) if last else {},
            "simulated_s": round(self.simulated_s, 6),
            "wall_s": round(self.wall_s, 3),
            "engine": self.engine,
            "first_round_s": None if self.first_round_s is None else round(self.first_round_s, 3),
        }

    def save_model(self, folder: Path) -> Path:
        """Writes the last version as safetensors. Raises LocalError, DiskFull."""
        path = folder / MODEL_FILE
        write_model(path, self.manifest, self.model_bytes)
        return path


class RoundsFile:
    """`rounds.jsonl`: one line a round, written when its metrics are in. Use with `with`."""

    def __init__(self, folder: Path, *, goes_on: bool = False) -> None:
        """A new file, or one that goes on after the lines that are there. Raises LocalError where it cannot be made."""
        self._path = folder / ROUNDS_FILE
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file: IO[str] = self._path.open("a" if goes_on else "w")
        except OSError as error:
            raise LocalError(f"{self._path}: cannot be written: {error.strerror}") from None

    def write(self, entry: RoundResult) -> None:
        """Adds a line; it is there also where the process is killed after this."""
        try:
            self._file.write(json.dumps(entry.record()) + "\n")
            self._file.flush()
        except OSError as error:
            raise LocalError(f"{self._path}: cannot be written: {error.strerror}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def write_model(path: Path, manifest: Manifest, data: bytes | memoryview) -> None:
    """Writes a version's bytes as a safetensors file. Raises LocalError, DiskFull."""
    with create(path, manifest, {"atoll.simulated": "true"}) as out:
        out[:] = data


def _values(sums: Mapping[str, MetricSum]) -> dict[str, float | None]:
    return {name: _quotient(sums[name]) for name in sorted(sums)}


def _quotient(metric: MetricSum) -> float | None:
    value = metric.sum / metric.count if metric.count > 0 else math.nan
    return value if math.isfinite(value) else None
