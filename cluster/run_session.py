"""What a worker keeps loaded over the rounds of a run, and what it does with it: train and evaluate.

App, model, optimizer and data are loaded once. A base version is copied from its mapped file into the model's own
tensors; the update is encoded straight into the mapped file that will be sent. What a round leaves for the next one
is on the disk (`SiteState`) and nowhere else, so a worker that was killed and started again writes the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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
from atoll.aggregation.layout import UpdateLayout, update_layout
from atoll.aggregation.mixing import distance
from atoll.aggregation.rounding import SECRET_BYTES, Rounding, rounding_key
from atoll.aggregation.strategy import Strategy, resolve
from atoll.cluster.app import App, build_app, build_model
from atoll.cluster.batches import Work, plan_work
from atoll.cluster.device import choose_device, set_up_torch
from atoll.cluster.evaluate import evaluate
from atoll.cluster.local_loop import train_locally
from atoll.cluster.messages import Evaluate, Evaluated, Part, Prepare, Prepared, Train, Trained
from atoll.cluster.optimizer_state import LocalOptimizer
from atoll.cluster.own_model import CONSENSUS, mixed_model, write_model
from atoll.cluster.registry import AppEntry, load_app
from atoll.cluster.seeds import training_seed
from atoll.cluster.site_state import Kept, SiteState
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
    layout: UpdateLayout
    device: torch.device
    app: App
    model: nn.Module
    download: Download | None  # how versions come, where a codec makes them smaller
    transient: Mapping[str, Tensor]  # non-persistent buffers as they were when the model was new
    state: SiteState
    training: Training | None
    test_data: Dataset[Any] | None

    def prepared(self) -> Prepared:
        """What the agent wants to know before it accepts the run."""
        return Prepared(
            max_weight=self.training.work.max_weight if self.training else 0,
            update_bytes=self.layout.num_bytes if self.training else 0,
            device=str(self.device),
            download_bytes=self.download.num_bytes if self.download else 0,
        )

    def train(self, request: Train, on_step: OnStep) -> Trained:
        """One round: load the base, train, write the update.

        Raises:
            BadUpdate: the loss or a difference is not finite, or beyond the declared bound.
            AppFailed, DiskFull, LocalError, Malformed: as they say.
        """
        training = self._require_training()
        if request.gives == "mixed":
            return self._collected(request, training)
        work = self._work_of(request, training)
        whole = request.gives == "model"
        num_bytes = self.manifest.num_bytes if whole else self.layout.num_bytes
        # The room is taken before the work is done: a full disk costs no training.
        room = create_update(Path(request.out_path), num_bytes)
        with self._open_base(Path(request.base_path), request.mix) as base, room as out:
            kept = self.state.load(request.round)
            self._load(base, kept)
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
            crc32 = self._write_model(out) if whole else self._write_update(request.round, base, training, out)
        self._keep(request.round, training)
        return Trained(
            key=request.key,
            weight=outcome.weight,
            metrics=dict(outcome.metrics),
            num_bytes=num_bytes,
            crc32=crc32,
        )

    def _collected(self, request: Train, training: Training) -> Trained:
        """The difference of the site's own model to the base version; each site's counts the same."""
        with (
            self._open_base(Path(request.base_path)) as base,
            create_update(Path(request.out_path), self.layout.num_bytes) as out,
        ):
            own = mixed_model(self.layout, request.mix)
            tensors = views(self.manifest, own.map, writable=False)
            crc32 = self._write_update(request.round, base, training, out, tensors)
        return Trained(key=request.key, weight=1, metrics={}, num_bytes=self.layout.num_bytes, crc32=crc32)

    def evaluate(self, request: Evaluate, on_step: OnStep) -> Evaluated:
        """Metric sums of a version on this machine's test data.

        Raises:
            BadUpdate: a metric is not finite.
        """
        metrics: dict[str, tuple[float, float]] = {}
        with self._open_base(Path(request.base_path)) as base:
            if request.mix:
                own = mixed_model(self.layout, request.mix)
                metrics[CONSENSUS] = distance(self.layout, own.map, base.map), 1.0
            if self.test_data is None:
                return Evaluated(key=request.key, metrics=metrics)
            self._load(base, self.state.load(request.round + 1))
        found = evaluate(self.app, self.model, self.test_data, device=self.device, on_batch=lambda: on_step(0, 0))
        return Evaluated(key=request.key, metrics={**found, **metrics})

    def _require_training(self) -> Training:
        if self.training is None:
            raise NotAllowed("this worker was prepared for evaluation only", site=self.site, run=self.run)
        return self.training

    def _work_of(self, request: Train, training: Training) -> Work:
        """The round's work: the job's, but for what the task itself says otherwise."""
        if not request.config:
            return training.work
        unit = {"epochs", "steps"} & request.config.keys()
        table = self.job.strategy.work.model_dump(exclude_none=True, exclude={"epochs", "steps"} if unit else set())
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
    def _open_base(self, path: Path, mix: Sequence[Part] = ()) -> Iterator[ModelFile]:
        """The base version, mapped, or decoded into memory where it came by a codec; what is mixed, where `mix` says."""
        if mix:
            yield mixed_model(self.layout, mix)
            return
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

    def _write_model(self, out: memoryview) -> int:
        """Write the model itself into `out`; its crc32."""
        write_model(self.layout, self._trained(), out)
        return crc32_of(out)

    def _trained(self) -> dict[str, Tensor]:
        return {name: tensor.detach() for name, (tensor, _) in state_of(self.model).items()}

    def _write_update(
        self,
        round: int,
        base: ModelFile,
        training: Training,
        out: memoryview,
        trained: Mapping[str, Tensor] | None = None,
    ) -> int:
        """Encode the difference to the base into `out`, of the model or of `trained`; its crc32."""
        rounding = Rounding(rounding_key(training.secret, round))
        encode_update(
            self.layout,
            views(self.manifest, base.map, writable=False),
            self._trained() if trained is None else trained,
            out,
            rounding=rounding,
            bound=self.strategy.bound,
        )
        return crc32_of(out)

    def _keep(self, round: int, training: Training) -> None:
        kept = training.optimizer.end_round()
        tensors = state_of(self.model)
        local = {_LOCAL + spec.name: tensors[spec.name][0].detach() for spec in self.layout.absent}
        if local or kept.tensors or kept.values:
            self.state.save(round, Kept(tensors={**local, **kept.tensors}, values=kept.values))


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
        layout=update_layout(manifest, strategy.codec, strategy.buffers, strategy.local),
        device=device,
        app=app,
        model=model,
        # The server's own worker judges its versions as they are.
        download=Download(manifest, strategy.download, job.job.seed) if strategy.download and request.encoded else None,
        transient={name: buffer.clone() for name, buffer in model.named_buffers() if name not in model.state_dict()},
        state=SiteState(Path(request.state_folder)),
        training=_open_training(request, job, app, model) if request.training else None,
        test_data=app.data("test") if job.evaluation.sites or not request.training else None,
    )


def _open_training(request: Prepare, job: Job, app: App, model: nn.Module) -> Training:
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
    return Training(
        dataset=dataset,
        optimizer=LocalOptimizer(optimizer, keeps_state=app.keeps_optimizer),
        work=plan_work(app, dataset, job.strategy.work),
        secret=secret,
    )
