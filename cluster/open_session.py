"""Loads what a worker keeps over the rounds of a run: app, model, optimizer and data, each once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import nn

from atoll.aggregation.by_round import ByRound
from atoll.aggregation.codecs.encoding import feedback_of
from atoll.aggregation.lanes import run_manifest
from atoll.aggregation.stages import Strategies
from atoll.aggregation.strategy import Strategy
from atoll.cluster.app import App, build_app, build_model
from atoll.cluster.carried_over import CarriedOver
from atoll.cluster.device import choose_device, set_up_torch
from atoll.cluster.messages import Prepare
from atoll.cluster.own_model import OwnModel
from atoll.cluster.pairing import Pairing
from atoll.cluster.registry import AppEntry, load_app
from atoll.cluster.run_session import RunSession
from atoll.cluster.site_state import SiteState
from atoll.cluster.training import open_training
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
    stages = Strategies(whole)
    strategy = stages.at(round_)
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
    exchanged = stages.fragments(manifest)
    fragments = exchanged.at(round_)
    feedback, folder = feedback_of(strategy.codec), Path(request.state_folder)
    return RunSession(
        run=request.run,
        site=request.site,
        whole=whole,
        job=job,
        stages=stages,
        strategy=strategy,
        manifest=manifest,
        exchanged=exchanged,
        fragments=fragments,
        own_model=OwnModel(fragments, strategy.exchange.alpha),
        device=device,
        app=app,
        model=model,
        # The server's own worker judges its versions as they are.
        downloads=stages.downloads(manifest, job.job.seed) if request.encoded else ByRound.always(None),
        transient={name: buffer.clone() for name, buffer in model.named_buffers() if name not in model.state_dict()},
        state=SiteState(folder),
        pairing=Pairing(rule=strategy.rule, state=SiteState(folder / "rule")),
        carried_over=CarriedOver(folder / "carried", fragments.whole, feedback) if feedback != "none" else None,
        training=open_training(request, whole, strategy, app, model) if request.training else None,
        test_data=app.data("test") if job.evaluation.sites or not request.training else None,
    )


def _require_same_model(manifest: Manifest, model: nn.Module, job: Job, strategy: Strategy) -> None:
    parameters = job.strategy.parameters or "all"
    manifest.require_same(run_manifest(manifest_of(model, parameters), strategy.lanes, strategy.local))
    require_same_frozen(manifest.frozen, frozen_of(model) if parameters == "trainable" else ())
