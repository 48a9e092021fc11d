"""What a worker keeps loaded over the rounds of a run, and what it does with it: train and evaluate.

App, model, optimizer and data are loaded once. A base version is copied from its mapped file into the model's own
tensors; the update is encoded straight into the mapped file that will be sent. What a round leaves for the next one
is on the disk (`SiteState`) and nowhere else, so a worker that was killed and started again writes the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from atoll.aggregation.download import Download
from atoll.aggregation.encode import encode_update
from atoll.aggregation.fragments import Fragments
from atoll.aggregation.layout import UpdateLayout
from atoll.aggregation.rounding import SECRET_BYTES, Rounding, rounding_key
from atoll.aggregation.strategy import Strategy, resolve
from atoll.cluster.app import App, build_app, build_model
from atoll.cluster.batches import Work, plan_work
from atoll.cluster.device import choose_device, set_up_torch
from atoll.cluster.evaluate import evaluate
from atoll.cluster.local_loop import train_locally
from atoll.cluster.messages import Evaluate, Evaluated, Prepare, Prepared, Train, Trained
from atoll.cluster.optimizer_state import LocalOptimizer
from atoll.cluster.own_model import OwnModel
from atoll.cluster.registry import AppEntry, load_app
from atoll.cluster.seeds import training_seed
from atoll.cluster.site_state import Kept, SiteState, joined
from atoll.cluster.update_file import create_update
from atoll.wire.checksum import crc32_of
from atoll.wire.errors import AppFailed, Malformed, NotAllowed
from atoll.wire.explain import explain
from atoll.wire.job import Job, WorkSection, decode_job
from atoll.wire.manifest import Manifest
from atoll.wire.model_file import ModelFile, map_file, open_model
from atoll.wire.tensors import load_state, manifest_of, state_of, views

OnStep = Callable[[int, int], None]
_LOCAL = "local/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What a site needs beyond the model to train it."""

    dataset: Dataset[Any]
    optimizer: LocalOptimizer
    work: Work
    secret: bytes  # of the randomness of rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSession:
    """One run at one site, loaded. Made by `open_session`."""

    run: str
    site: str
    job: Job
    strategy: Strategy
    manifest: Manifest
    fragments: Fragments
    device: torch.device
    app: App
    model: nn.Module
    download: Download | None  # how versions come, where a codec makes them smaller
    transient: Mapping[str, Tensor]  # non-persistent buffers as they were when the model was new
    state: SiteState
    own_model: OwnModel
    training: Training | None
    test_data: Dataset[Any] | None

    @property
    def layout(self) -> UpdateLayout:
        """Of all that travels, in one round or in turns."""
        return self.fragments.whole

    def prepared(self) -> Prepared:
        """What the agent wants to know before it accepts the run."""
        return Prepared(
            max_weight=self.training.work.max_weight if self.training else 0,
            update_bytes=max(f.layout.num_bytes for f in self.fragments.all) if self.training else 0,
            device=str(self.device),
            download_bytes=self.download.num_bytes if self.download else 0,
            fragments=[(f.start, f.stop) for f in self.fragments.all] if self.fragments.count > 1 else [],
        )

    def train(self, request: Train, on_step: OnStep) -> Trained:
        """One round: load the base, train, write the update.

        Raises:
            BadUpdate: the loss or a difference is not finite, or beyond the declared bound.
            AppFailed, DiskFull, LocalError, Malformed: as they say.
        """
        training = self._require_training()
        work = self._work_of(request, training)
        # The room is taken before the work is done: a full disk costs no training.
        layout = self.fragments.of_round(request.round).layout
        room = create_update(Path(request.out_path), layout.num_bytes)
        with self._open_base(Path(request.base_path)) as base, room as out:
            kept = self.state.load(request.round)
            self._load(base, kept)
            self.own_model.begin(self._tensors(), kept, request.round)
            training.optimizer.begin_round(kept)
            outcome = train_locally(
                self.app,
                self.model,
                training.optimizer.torch,
                training.dataset,
                work=work,
                rule=self.strategy.rule,
                seed=training_seed(self.job.job.seed, self.site, request.round),
                device=self.device,
                on_step=on_step,
            )
            crc32 = self._write_update(request.round, base, training, out)
        self._keep(request.round, training)
        return Trained(
            key=request.key,
            weight=outcome.weight,
            metrics=dict(outcome.metrics),
            num_bytes=layout.num_bytes,
            crc32=crc32,
        )

    def evaluate(self, request: Evaluate, on_step: OnStep) -> Evaluated:
        """Metric sums of a version on this machine's test data.

        Raises:
            BadUpdate: a metric is not finite.
        """
        if self.test_data is None:
            return Evaluated(key=request.key, metrics={})
        with self._open_base(Path(request.base_path)) as base:
            self._load(base, self.state.load(request.round + 1))
        metrics = evaluate(self.app, self.model, self.test_data, device=self.device, on_batch=lambda: on_step(0, 0))
        return Evaluated(key=request.key, metrics=metrics)

    def _require_training(self) -> Training:
        if self.training is None:
            raise NotAllowed("this worker was prepared for evaluation only", site=self.site, run=self.run)
        return self.training

    def _work_of(self, request: Train, training: Training) -> Work:
        """The round's work: the job's, but for what the task itself says otherwise."""
        if not request.config:
            return training.work
        unit = {"epochs", "steps"} & request.config.keys()
        table = self.strategy.work.model_dump(exclude_none=True, exclude={"epochs", "steps"} if unit else set())
        try:
            section = WorkSection.model_validate({**table, **request.config})
        except ValidationError as error:
            raise Malformed(str(explain(error, WorkSection, "task")), field="config") from None
        work = plan_work(self.app, training.dataset, section)
        if work.max_weight > training.work.max_weight:
            raise Malformed(
                f"the task asks for work that weighs up to {work.max_weight}; this site promised at most "
                f"{training.work.max_weight} in this run",
                field="config",
                value=work.max_weight,
                bound=training.work.max_weight,
            )
        return work

    @contextmanager
    def _open_base(self, path: Path) -> Iterator[ModelFile]:
        """The base version, mapped, or decoded into memory where it came by a codec."""
        if self.download is None:
            with open_model(path) as base:
                yield base
            return
        data = bytearray(self.manifest.num_bytes)
        with map_file(path) as payload:
            self.download.read(payload, data)
        view = memoryview(data).toreadonly()
        yield ModelFile(manifest=self.manifest, data_offset=0, num_bytes=len(data), map=view, metadata={})

    def _load(self, base: ModelFile, kept: Kept) -> None:
        """The base version's tensors, and in place of its local ones those that this site has kept.

        Buffers that are no part of the state start anew, as they would after a restart of the worker.
        """
        self.manifest.require_same(base.manifest)
        load_state(self.manifest, base.map, self.model)
        tensors = state_of(self.model)
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                if name in self.transient:
                    buffer.copy_(self.transient[name])
            for spec in self.layout.absent:
                if (own := kept.tensors.get(_LOCAL + spec.name)) is not None:
                    tensors[spec.name][0].copy_(own)

    def _write_update(self, round: int, base: ModelFile, training: Training, out: memoryview) -> int:
        """Encode the difference to the base into `out`; its crc32."""
        rounding = Rounding(rounding_key(training.secret, round))
        encode_update(
            self.fragments.of_round(round).layout,
            views(self.manifest, base.map, writable=False),
            self._tensors(),
            out,
            rounding=rounding,
            bound=self.strategy.bound,
        )
        return crc32_of(out)

    def _keep(self, round: int, training: Training) -> None:
        tensors = self._tensors()
        local = Kept(tensors={_LOCAL + spec.name: tensors[spec.name] for spec in self.layout.absent})
        parts = (local, training.optimizer.end_round(), self.own_model.kept(tensors, round))
        if any(part.tensors or part.values for part in parts):
            self.state.save(round, joined(parts))

    def _tensors(self) -> Mapping[str, Tensor]:
        """Those of the model, by the names of the manifest."""
        return {name: tensor.detach() for name, (tensor, _) in state_of(self.model).items()}


def open_session(request: Prepare) -> RunSession:
    """Load everything that the run needs.

    Raises:
        NotAllowed, Unknown, AppFailed: the app is another than asked for, not here, or fails.
        ConfigError: the job or its `[app]` table cannot be used.
        BadManifest: the app's model is not the run's.
        DeviceMissing: the wished device is not here.
    """
    job = decode_job(request.job.encode())
    strategy = resolve(job)
    device = choose_device(job.training.device, request.device)
    set_up_torch(job.training, device, trains=request.training)
    entry = AppEntry(name=request.app_name, distribution=request.distribution, entry_point=request.entry_point)
    app = build_app(load_app(entry, request.app_hash), job.app, request.data)
    model = build_model(app, job.job.seed).to(device)
    manifest = Manifest.decode(Path(request.manifest_path).read_bytes())
    manifest.require_same(manifest_of(model))
    return RunSession(
        run=request.run,
        site=request.site,
        job=job,
        strategy=strategy,
        manifest=manifest,
        fragments=(fragments := strategy.fragments(manifest)),
        own_model=OwnModel(fragments, strategy.exchange.alpha),
        device=device,
        app=app,
        model=model,
        # The server's own worker judges its versions as they are.
        download=Download(manifest, strategy.download, job.job.seed) if strategy.download and request.encoded else None,
        transient={name: buffer.clone() for name, buffer in model.named_buffers() if name not in model.state_dict()},
        state=SiteState(Path(request.state_folder)),
        training=_open_training(request, strategy, app, model) if request.training else None,
        test_data=app.data("test") if job.evaluation.sites or not request.training else None,
    )


def _open_training(request: Prepare, strategy: Strategy, app: App, model: nn.Module) -> Training:
    secret = bytes.fromhex(request.rounding_seed_hex)
    if len(secret) != SECRET_BYTES:
        raise Malformed(f"rounding_seed_hex has {len(secret)} bytes, wanted {SECRET_BYTES}", field="rounding_seed_hex")
    dataset = app.data("train")
    if dataset is None:
        raise AppFailed('data("train") is None: this site has nothing to train on', field="data.train")
    optimizer = app.optimizer(model.parameters())
    if not isinstance(optimizer, Optimizer):
        raise AppFailed(
            f"optimizer() returned {type(optimizer).__name__}, wanted a torch.optim.Optimizer", field="optimizer"
        )
    counts_steps = strategy.exchange.steps is not None
    return Training(
        dataset=dataset,
        optimizer=LocalOptimizer(optimizer, keeps_state=app.keeps_optimizer or counts_steps),
        work=plan_work(app, dataset, strategy.work),
        secret=secret,
    )
