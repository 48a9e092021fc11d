"""Loads what a worker keeps over the rounds of a run: app, model, optimizer and data, each once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import nn
from torch.optim import Optimizer

from atoll.aggregation.codecs.encoding import feedback_of
from atoll.aggregation.download import Download
from atoll.aggregation.lanes import run_manifest
from atoll.aggregation.layout import update_layout
from atoll.aggregation.rounding import SECRET_BYTES
from atoll.aggregation.rules import Watching
from atoll.aggregation.strategy import Strategy, resolve
from atoll.cluster.app import App, build_app, build_model
from atoll.cluster.batches import plan_work
from atoll.cluster.carried_over import CarriedOver
from atoll.cluster.device import choose_device, set_up_torch
from atoll.cluster.messages import Prepare
from atoll.cluster.optimizer_state import LocalOptimizer
from atoll.cluster.pairing import Pairing
from atoll.cluster.personal import PersonalWork
from atoll.cluster.registry import AppEntry, load_app
from atoll.cluster.run_session import RunSession, Training
from atoll.cluster.site_state import SiteState
from atoll.wire.errors import AppFailed, Malformed
from atoll.wire.frozen import require_same_frozen
from atoll.wire.job import Job, decode_job
from atoll.wire.manifest import Manifest
from atoll.wire.tensors import frozen_of, manifest_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """An app that is imported and built, and its model: simulated sites share one, each with its own data."""

    app: App
    model: nn.Module


def open_session(request: Prepare, round_: int = 1, loaded: Loaded | None = None) -> RunSession:
    """Load everything that the run needs in a round, and in those after it until `[app]` changes.

    Args:
        loaded: what need not be loaded again.

    Raises:
        NotAllowed, Unknown, AppFailed: the app is another than asked for, not here, or fails.
        ConfigError: the job or its `[app]` table cannot be used.
        BadManifest: the app's model is not the run's, or has other frozen weights.
        DeviceMissing: the wished device is not here.
    """
    whole = decode_job(request.job.encode())
    job = whole.at(round_)
    strategy = resolve(job)
    device = choose_device(job.training.device, request.device)
    set_up_torch(job.training, device, trains=request.training)
    entry = AppEntry(name=request.app_name, distribution=request.distribution, entry_point=request.entry_point)
    if loaded is None:
        kind = load_app(entry, request.app_hash)
        for stage in whole.stages[1:]:
            build_app(kind, stage.job.app, request.data)  # values that the app does not take are told on joining
        app = build_app(kind, job.app, request.data)
        model = build_model(app, job.job.seed)
    else:
        app, model = loaded.app, loaded.model
    manifest = Manifest.decode(Path(request.manifest_path).read_bytes())
    _require_same_model(manifest, model, job, strategy)
    model = model.to(device)
    layout = update_layout(manifest, strategy.codec, strategy.buffers, strategy.local)
    feedback, folder = feedback_of(strategy.codec), Path(request.state_folder)
    return RunSession(
        run=request.run,
        site=request.site,
        whole=whole,
        job=job,
        strategy=strategy,
        manifest=manifest,
        layout=layout,
        device=device,
        app=app,
        model=model,
        # The server's own worker judges its versions as they are.
        download=Download(manifest, strategy.download, job.job.seed) if strategy.download and request.encoded else None,
        transient={name: buffer.clone() for name, buffer in model.named_buffers() if name not in model.state_dict()},
        state=SiteState(folder),
        pairing=Pairing(rule=strategy.rule, state=SiteState(folder / "rule")),
        carried_over=CarriedOver(folder / "carried", layout, feedback) if feedback != "none" else None,
        training=_open_training(request, whole, job, strategy, app, model) if request.training else None,
        test_data=app.data("test") if job.evaluation.sites or not request.training else None,
    )


def _require_same_model(manifest: Manifest, model: nn.Module, job: Job, strategy: Strategy) -> None:
    parameters = job.strategy.parameters or "all"
    manifest.require_same(run_manifest(manifest_of(model, parameters), strategy.lanes, strategy.local))
    require_same_frozen(manifest.frozen, frozen_of(model) if parameters == "trainable" else ())


def _open_training(request: Prepare, whole: Job, job: Job, strategy: Strategy, app: App, model: nn.Module) -> Training:
    secret = bytes.fromhex(request.rounding_seed_hex)
    if len(secret) != SECRET_BYTES:
        raise Malformed(f"rounding_seed_hex has {len(secret)} bytes, wanted {SECRET_BYTES}", field="rounding_seed_hex")
    dataset = app.data("train")
    if dataset is None:
        raise AppFailed('data("train") is None: this site has nothing to train on', field="data.train")
    sections = {stage.job.strategy.work for stage in whole.stages}
    optimizer = app.optimizer(model.parameters())
    if not isinstance(optimizer, Optimizer):
        raise AppFailed(
            f"optimizer() returned {type(optimizer).__name__}, wanted a torch.optim.Optimizer", field="optimizer"
        )
    if isinstance(strategy.rule, Watching):
        strategy.rule.watch(optimizer)  # so that what it refuses is refused before the site takes part
    section = strategy.personal.work(strategy.work)
    return Training(
        dataset=dataset,
        optimizer=LocalOptimizer(optimizer, keeps_state=app.keeps_optimizer),
        work=plan_work(app, dataset, job.strategy.work),
        max_weight=max(plan_work(app, dataset, section).max_weight for section in sections),
        secret=secret,
        personal=PersonalWork(kind=strategy.personal, work=plan_work(app, dataset, section)) if section else None,
    )
