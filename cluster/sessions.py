"""What a worker keeps loaded of a run, by what the job asks: training, statistics, or payloads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from torch.utils.data import Dataset

from atoll.aggregation.reducers.append import Append, require_fits
from atoll.aggregation.strategy import resolve
from atoll.cluster.app import App, build_app
from atoll.cluster.describe import describe
from atoll.cluster.messages import Describe, Described, Evaluate, Evaluated, Prepare, Prepared, Train, Trained
from atoll.cluster.metric_sums import MetricSums
from atoll.cluster.opaque_app import OpaqueApp
from atoll.cluster.open_session import open_session as open_run_session
from atoll.cluster.parallel.section import section_of
from atoll.cluster.registry import AppEntry, load_app, load_opaque_app
from atoll.cluster.run_session import RunSession
from atoll.cluster.seeds import seeded, training_seed
from atoll.cluster.update_file import create_update
from atoll.wire.checksum import crc32_of
from atoll.wire.errors import AppFailed
from atoll.wire.job import Job, decode_job
from atoll.wire.model_file import map_file, open_model
from atoll.wire.payload_list import payloads_in
from atoll.wire.statistics_section import StatisticsSection

if TYPE_CHECKING:
    from atoll.cluster.parallel.spread_session import SpreadSession
    from atoll.cluster.parallel.world_session import WorldSession

OnStep = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StatisticsSession:
    """An app and its training data, without a model."""

    run: str
    site: str
    app: App
    dataset: Dataset[Any]
    section: StatisticsSection

    def prepared(self) -> Prepared:
        return Prepared(max_weight=0, update_bytes=0, device="cpu")

    def at(self, round_: int) -> StatisticsSession:
        """The session of a round: of the one that there is."""
        return self

    def describe(self, request: Describe, on_step: OnStep) -> Described:
        """Statistics of the training data. Raises AppFailed as `cluster.describe` does."""
        least = max(request.min_cell_count, self.section.min_cell_count)
        found = describe(self.app, self.dataset, self.section, least=least, on_batch=lambda: on_step(0, 0))
        return Described(key=request.key, features=found)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpaqueSession:
    """An app whose model is a list of payloads."""

    run: str
    site: str
    whole: Job
    job: Job  # as it is in the rounds of this session
    app: OpaqueApp
    bounds: Append.Options
    framed: bool  # versions come as model files: at the server, which has them

    def prepared(self) -> Prepared:
        most = self.bounds.max_version_bytes
        return Prepared(max_weight=1, update_bytes=self.bounds.max_bytes, device="cpu", most_version_bytes=most)

    def at(self, round_: int) -> OpaqueSession | None:
        """The session of a round; None where `[app]` has other values then, so that it is to be opened anew."""
        return self if self.whole.at(round_).app == self.job.app else None

    def train(self, request: Train, on_step: OnStep) -> Trained:
        """One round: the app's payload, written as the update.

        Raises:
            AppFailed: it is no bytes, or empty.
            TooLarge: it is over the job's bound.
        """
        seed = training_seed(self.job.job.seed, self.site, request.round)
        with self._open(Path(request.base_path)) as version, seeded(seed):
            payload = self.app.train(payloads_in(version), seed)
        on_step(0, 0)
        if not isinstance(payload, bytes) or not payload:
            text = f"{type(self.app).__name__}.train() returned {type(payload).__name__}, wanted bytes, at least one"
            raise AppFailed(text, field="train")
        require_fits(len(payload), self.bounds, site=self.site, round=request.round)
        with create_update(Path(request.out_path), len(payload)) as out:
            out[:] = payload
            crc32 = crc32_of(out)
        return Trained(key=request.key, weight=1, metrics={}, num_bytes=len(payload), crc32=crc32)

    def evaluate(self, request: Evaluate, on_step: OnStep) -> Evaluated:
        """Metric sums of a version. Raises BadUpdate where one is not finite."""
        with self._open(Path(request.base_path)) as version:
            metrics = self.app.evaluate(payloads_in(version))
        on_step(0, 0)
        sums = MetricSums()
        for name, (total, count) in metrics.items():
            sums.add(name, float(total), float(count))
        return Evaluated(key=request.key, metrics=sums.result())

    @contextmanager
    def _open(self, path: Path) -> Iterator[memoryview]:
        if self.framed:
            with open_model(path) as model:
                yield model.map
            return
        with map_file(path) as version:
            yield version


Session: TypeAlias = "RunSession | StatisticsSession | OpaqueSession | SpreadSession | WorldSession"


def open_session(request: Prepare, round_: int = 1) -> Session:
    """Load everything that the run needs in a round, and in those after it until `[app]` changes.

    Raises:
        NotAllowed, Unknown, AppFailed: the app is another than asked for, not here, fails, or does not fit the job.
        ConfigError: the job or its `[app]` table cannot be used.
        BadManifest, DeviceMissing: as `open_session` of cluster/open_session.py.
    """
    whole = decode_job(request.job.encode())
    job = whole.at(round_)
    reducer = resolve(job).reducer
    entry = AppEntry(name=request.app_name, distribution=request.distribution, entry_point=request.entry_point)
    if isinstance(reducer, Append):
        kind = load_opaque_app(entry, request.app_hash)
        for stage in whole.stages[1:]:
            build_app(kind, stage.job.app, request.data)  # values that the app does not take are told on joining
        return OpaqueSession(
            run=request.run,
            site=request.site,
            whole=whole,
            job=job,
            app=build_app(kind, job.app, request.data),
            bounds=reducer.options,
            framed=not request.training,
        )
    if job.statistics is None:
        trains = request.training and job.asks == "train"  # else it judges alone
        request = replace(request, training=trains)
        section = section_of(request, job) if request.encoded else None  # the server's own worker is one process
        if section is None:
            return open_run_session(request, round_)
        from atoll.cluster.parallel.world_session import open_parallel  # here: torch's layouts take a second to load

        return open_parallel(request, section, round_)
    app = build_app(load_app(entry, request.app_hash), job.app, request.data)
    dataset = app.data("train")
    if dataset is None:
        raise AppFailed('data("train") is None: this site has nothing to count', field="data.train")
    return StatisticsSession(run=request.run, site=request.site, app=app, dataset=dataset, section=job.statistics)
