"""`atoll.simulate`: a job with all its sites on this machine, by the same code as a deployment."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn

from atoll.aggregation.lanes import run_manifest
from atoll.aggregation.reducers.append import Append
from atoll.aggregation.schedules.gossip import Gossip
from atoll.aggregation.stages import Strategies
from atoll.aggregation.strategy import Strategy, resolve
from atoll.cluster.app import App, build_model
from atoll.cluster.device import choose_device, set_up_torch
from atoll.cluster.seeds import seeded
from atoll.server.models import RunModels
from atoll.server.pipeline import Pipeline
from atoll.server.plan import plan_of
from atoll.server.records import RunRow
from atoll.server.run_state import RunState
from atoll.simulations import engine_choice
from atoll.simulations.clock import Speeds
from atoll.simulations.conditions import Conditions, Updates
from atoll.simulations.devices import Availability, Network, devices
from atoll.simulations.dropouts import Dropouts
from atoll.simulations.engine import Kind
from atoll.simulations.faults import Fault, Faults, load_faults
from atoll.simulations.keeping import Keeper, Kept, digest, hindrance, options_of
from atoll.simulations.lies import LyingSites
from atoll.simulations.masked import MaskedWork
from atoll.simulations.opening import app_of, located_job, sites_of
from atoll.simulations.results import MODEL_FILE, Result, RoundResult, RoundsFile, write_model
from atoll.simulations.run import Labels, SimulatedRun, Spread
from atoll.simulations.sequential import SequentialEngine
from atoll.simulations.sites import Partition, Sites
from atoll.simulations.versions import Versions
from atoll.simulations.waits import Waited
from atoll.wire.errors import ConfigError
from atoll.wire.job import Job
from atoll.wire.model_file import ModelFile
from atoll.wire.runs_pb2 import RoundRecord, RunSnapshot
from atoll.wire.tensors import frozen_of, manifest_of, write_state

MEMORY_FOLDER = Path("/dev/shm")  # Linux: files in it are memory, and syncing them costs nothing
ROOM_FACTOR = 8  # models a site: two rounds of a few states each


def simulate(
    job: Job | Mapping[str, Any] | Path | str,
    *,
    sites: int | Mapping[str, Mapping[str, Any]] | None = None,
    app: type[App] | None = None,
    source: Mapping[str, Any] | None = None,
    server_source: Mapping[str, Any] | None = None,
    partition: Partition | None = None,
    speeds: Speeds | None = None,
    network: Network | None = None,
    availability: Availability | None = None,
    trace: Path | str | Sequence[Mapping[str, Any]] | None = None,
    labels: Labels | Callable[[Sequence[str]], Labels] | None = None,
    dropouts: Dropouts | None = None,
    faults: Sequence[Fault | Mapping[str, Any]] | Path | str = (),
    session_dropouts: Dropouts | None = None,
    rounding_seed: int = 0,
    engine: Kind = "auto",
    processes: int | None = None,
    out: Path | str | None = None,
    resumable: bool = True,
    resume: Path | str | None = None,
    on_round: Callable[[RoundResult], None] | None = None,
    show: Callable[[RunSnapshot], None] | None = None,
    home: Path | None = None,
) -> Result:
    """Does a job's run with every site on this machine.

    The model has the bytes of a deployment with the same job, site names, data per site, survivors and `rounding_seed`
    (`[reproducible]` of site.toml), on the same kind of machine.

    Args:
        job: a job, its table, or the path of its file.
        sites: how many sites the training data of `source` is spread over (those that the job names, or ten, where
            None); or each site's own source by name, which no partition touches.
        app: the class; where None, the installed app that the job names.
        source: the table `[data.NAME]` with which the app finds all the data; where None, that of user.toml in `home`.
            With "{site}" in one of its texts each site has a source of its own, with its name in that place.
        server_source: the same for what the server judges by, where sites have sources of their own.
        partition: how the training data is spread; evenly at random where None.
        speeds, network, availability: how long steps and transfers take, and when sites are there; no simulated time
            passes where None.
        trace: the same of single sites, as rows or the path of a CSV or JSON file (`simulations/devices.py`).
        labels: of each site, for schedules that go by them; or what makes them of the names of the sites.
        dropouts: how likely a site brings nothing when it is asked; never where None.
        faults: which sites fail, are slow or lie, and when; or the path of a file of them (`simulations/faults.py`).
        engine: "sequential", "processes", or "auto" for the faster one, as the run finds out. The result is the same.
        processes: how many there are; one for each core where None.
        session_dropouts: how likely a site drops out of a session of secure aggregation, in a phase drawn by lot.
        out: folder for rounds.jsonl and model.safetensors; nothing is written where None.
        resumable: whether `out` gets what a run that is interrupted can go on from, at each committed round, where its
            job allows (`docs/simulations.md`).
        resume: the `out` of a run that was interrupted, which goes on with the same options; in place of `out`.
        on_round: called with each round when its metrics are in.
        show: called with the run as it stands, a few times a second.
        home: folder of user.toml, as of the other commands.

    Raises:
        ConfigError: the job, the app's values, the partition, speeds, dropouts or faults cannot be used; names key, value and bound.
        AppFailed: a site has no examples, or the app cannot be built; names the site.
        TooFewSites: the schedule waits for something that cannot happen.
        LocalError: a file cannot be written, what a run goes on from is damaged, or a device is missing.
    """
    if resume is not None and out is not None:
        text = f"resume = {resume}, out = {out}: a run goes on in its own folder; leave one of them out"
        raise ConfigError(text, key="resume", value=str(resume))
    began_s = time.monotonic()
    with located_job(job) as parsed:
        kind, settings = app_of(parsed, app, home)
        source = settings.source(parsed.data_name) if source is None else source
        _require_simulated(parsed, resolve(parsed))
        hindered = hindrance(parsed)
        if resume is not None and hindered is not None:
            raise hindered
        with _torch_set_up_for(parsed) as device:
            found = sites_of(parsed, kind, sites, source, server_source, partition or Partition())
            struck = Faults(load_faults(Path(faults)) if isinstance(faults, Path | str) else faults, found.names)
            if struck.all:
                found = LyingSites(found, struck, parsed.job.seed, parsed.job.rounds)
            given_labels = labels(found.names) if callable(labels) else labels or {}
            measured = devices(
                found.names,
                speeds=speeds or Speeds(),
                network=network or Network(),
                availability=availability or Availability(),
                trace=Path(trace) if isinstance(trace, str) else trace,
            )
            target = Path(out) if out is not None else None if resume is None else Path(resume)
            keeper: Keeper | None = None
            if target is not None and hindered is None and (resumable or resume is not None):
                options = options_of(
                    parsed,
                    {
                        "app (class)": f"{kind.__module__}.{kind.__qualname__}",
                        "sites": sites if isinstance(sites, Mapping) else list(found.names),
                        "data (source)": dict(source),
                        "server-data (server_source)": server_source or {},
                        "partition": partition or Partition(),
                        "speeds (step-seconds, spread, stragglers, slowdown)": speeds or Speeds(),
                        "network": network or Network(),
                        "available (availability)": availability or Availability(),
                        "trace": digest(repr(sorted(measured.items()))),
                        "label (labels)": given_labels,
                        "dropout (dropouts)": dropouts or Dropouts(),
                        "faults": struck.all,
                        "rounding_seed": rounding_seed,
                    },
                )
                keeper = Keeper(target, options)
            kept = None if keeper is None or resume is None else keeper.go_on()
            own = found.app(found.names[0])
            model = build_model(own, parsed.job.seed).to(device)
            with _scratch(len(found.names) * manifest_of(model).num_bytes) as folder:
                wish = engine_choice.wished(engine, processes, parsed, device)
                world = _World(parsed, found, own, model, folder, keeper, rounding_seed, session_dropouts or Dropouts())
                conditions = Conditions(
                    measured,
                    dropouts=dropouts or Dropouts(),
                    faults=struck,
                    updates=world.updates,
                )
                return world.play(
                    wish,
                    began_s=began_s,
                    conditions=conditions,
                    labels=given_labels,
                    out=target,
                    kept=kept,
                    on_round=on_round,
                    show=show,
                )


def _require_simulated(job: Job, strategy: Strategy) -> None:
    """Simulated sites train tensors, from versions of a server, and do nothing else."""
    for key, wrong in (
        ("statistics", job.asks == "statistics"),
        ("evaluation.only", job.asks == "evaluate"),
        ("strategy.reducer", isinstance(strategy.reducer, Append)),
    ):
        if wrong:
            raise ConfigError(f"{key}: a simulation trains tensors alone; run the job in a federation", key=key)
    if job.parallel is not None:
        text = "simulated sites have one process each; remove the table, or run the job in a federation"
        raise ConfigError(f"parallel: {text}", key="parallel")
    if isinstance(strategy.schedule, Gossip):
        key = "strategy.schedule"
        text = f"{key} = 'gossip': sites of a simulation share one model, and here each has its own, which its neighbours mix"
        raise ConfigError(f"{text}; run the job in a federation", key=key, value="gossip")


def _require_one_app(job: Job) -> None:
    """Simulated sites share one model, which is made once."""
    for number, stage in enumerate(job.stages[1:]):
        if stage.job.app != job.app:
            key = f"control.override.{number}.app"
            text = (
                "a simulation keeps the values of [app]; override values of [strategy], or run the job in a federation"
            )
            raise ConfigError(f"{key}: {text}", key=key, value=str(stage.from_round))


class _World:
    """One simulated run, ready to begin."""

    def __init__(
        self,
        job: Job,
        sites: Sites,
        app: App,
        model: nn.Module,
        folder: Path,
        keeper: Keeper | None,
        seed: int,
        drops: Dropouts,
    ) -> None:
        _require_one_app(job)
        drops.require_sites(sites.names)
        strategy, parameters = resolve(job), job.strategy.parameters or "all"
        frozen = frozen_of(model) if parameters == "trainable" else ()
        self._manifest = run_manifest(manifest_of(model, parameters, frozen), strategy.lanes, strategy.local)
        stages = Strategies(job)
        self._job, self._keeper = job, keeper
        self._versions = Versions(folder, "", self._manifest, stages.downloads(self._manifest, job.job.seed))
        with self._versions.create(0, {}) as data:
            write_state(self._manifest, model, data)
        self._sequential = SequentialEngine(
            job,
            sites,
            app=app,
            model=model,
            manifest=self._manifest,
            bases=self._versions.named,
            folder=folder,
            kept=folder / "sites" if keeper is None else keeper.sites,
            seed=seed,
        )
        self._stages = stages
        self.updates = Updates.of(self._manifest, stages, seed=seed, job_seed=job.job.seed)
        self._pipeline = self._work(strategy, stages, tuple(sites.names), folder, seed, drops)

    def _work(
        self, strategy: Strategy, stages: Strategies, sites: tuple[str, ...], folder: Path, seed: int, drops: Dropouts
    ) -> Pipeline:
        job, manifest = self._job, self._manifest
        if job.secure_aggregation is not None:
            return MaskedWork(job, manifest, self._versions, sites, folder=folder, seed=seed, drops=drops)
        return Pipeline(
            run="", strategy=strategy, seed=job.job.seed, manifest=manifest, models=self._versions, stages=stages
        )

    def play(
        self,
        wish: engine_choice.Wish,
        *,
        began_s: float,
        conditions: Conditions,
        labels: Labels,
        out: Path | None,
        kept: Kept | None,
        on_round: Callable[[RoundResult], None] | None,
        show: Callable[[RunSnapshot], None] | None,
    ) -> Result:
        """The run from beginning to end, or from where it was kept."""
        if kept is not None:
            self._take_over(kept)
            began_s -= kept.rounds[-1].wall_s if kept.rounds else 0.0
        engine = engine_choice.engine_for(wish, self._sequential, self._versions)
        rounds: list[RoundResult] = [] if kept is None else [*kept.rounds]
        file = RoundsFile(out, goes_on=kept is not None) if out is not None else nullcontext()
        if self._keeper is not None and kept is None:
            self._keeper.begin()

        def keep(record: RoundRecord, simulated_s: float, waited: Waited, spread: Spread) -> None:
            entry = RoundResult.of(
                record, simulated_s=simulated_s, wall_s=time.monotonic() - began_s, waited=waited, spread=spread
            )
            rounds.append(entry)
            if isinstance(file, RoundsFile):
                file.write(entry)
            if on_round is not None:
                on_round(entry)

        run = SimulatedRun(
            row=_row(self._job),
            plan=plan_of(self._job),
            pipeline=self._pipeline,
            versions=self._versions,
            engine=engine,
            conditions=conditions,
            labels=labels,
            on_round=keep,
            show=show,
            keeper=self._keeper,
            kept=kept,
        )
        with file:
            try:
                state = run.run()
                name = engine.name
            finally:  # also on Ctrl-C: what is committed stays
                engine.close()
                if out is not None and run.state.version > 0 and self._versions.branches(run.state.version):
                    write_model(out / MODEL_FILE, self._manifest, self._newest(run.state).map)
        if self._keeper is not None:
            self._keeper.remove()
        return Result(
            name=self._job.job.name,
            status=state.outcome.value,
            reason=state.reason,
            sites=conditions.sites,
            rounds=tuple(sorted(rounds, key=lambda entry: entry.round)),
            manifest=self._manifest,
            model_bytes=bytes(self._newest(state).map),
            simulated_s=run.simulated_s,
            wall_s=time.monotonic() - began_s,
            first_round_s=rounds[0].wall_s if rounds else None,
            engine=name,
        )

    def _take_over(self, kept: Kept) -> None:
        """The version with which the run goes on."""
        strategy = resolve(self._job)
        assert self._keeper is not None  # it gave what was kept
        models = RunModels(self._keeper.folder, "", self._manifest)
        models.prepare()
        layout = self._stages.fragments(self._manifest).first.whole
        for branch in kept.branches:
            schedule: Any = strategy.schedule  # with branches each has an optimizer of its own
            optimizer = strategy.optimizer if branch is None else schedule.inner_optimizer
            self._versions.take(kept.version, branch, models, optimizer, layout)

    def _newest(self, state: RunState) -> ModelFile:
        return self._versions.open(state.version)


def _row(job: Job) -> RunRow:
    return RunRow(
        run="simulation",
        name=job.job.name,
        job=b"",
        app_hash="",
        submitted_by="",
        crc32=0,
        status="queued",
        reason=None,
        submitted_at=datetime.now(UTC),
    )


@contextmanager
def _torch_set_up_for(job: Job) -> Iterator[torch.device]:
    """Threads and determinism as the job says; afterwards torch is as it was."""
    num_threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    device = choose_device(job.training.device)
    set_up_torch(job.training, device)
    if job.training.threads is None:  # part of the result, so the same for every engine
        torch.set_num_threads(1)
    try:
        with seeded(job.job.seed, device):  # of the sites' trainings each has its own
            yield device
    finally:
        torch.set_num_threads(num_threads)
        torch.use_deterministic_algorithms(deterministic)


@contextmanager
def _scratch(num_bytes: int) -> Iterator[Path]:
    """A folder for what sites keep: in memory where what they may keep fits well, else where temporary files are."""
    room = shutil.disk_usage(MEMORY_FOLDER).free if MEMORY_FOLDER.is_dir() else 0
    where = MEMORY_FOLDER if room > ROOM_FACTOR * num_bytes else None
    folder = Path(tempfile.mkdtemp(prefix="atoll-simulation-", dir=where))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
