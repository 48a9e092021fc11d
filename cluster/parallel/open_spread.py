"""Loads one process's part of a run that a site's processes do together, and refuses what they cannot do."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

from atoll.aggregation.codecs.encoding import feedback_of
from atoll.aggregation.lanes import run_manifest
from atoll.aggregation.rounding import SECRET_BYTES
from atoll.aggregation.strategy import Strategy, resolve
from atoll.cluster.app import App, build_app
from atoll.cluster.batches import batches, plan_work
from atoll.cluster.device import choose_device, set_up_torch
from atoll.cluster.messages import Prepare
from atoll.cluster.parallel.dims import ParallelDims
from atoll.cluster.parallel.layouts import spread
from atoll.cluster.parallel.nodes import Nodes
from atoll.cluster.parallel.pipeline import Stages, cut
from atoll.cluster.parallel.skeleton import build_skeleton
from atoll.cluster.parallel.spread_session import SpreadSession, SpreadTraining
from atoll.cluster.registry import AppEntry, load_app
from atoll.wire.errors import AppFailed, ConfigError, LocalError, Malformed
from atoll.wire.frozen import require_same_frozen
from atoll.wire.job import Job, decode_job
from atoll.wire.manifest import Manifest
from atoll.wire.parallel_section import ParallelSection
from atoll.wire.tensors import frozen_of, manifest_of


def num_processes(section: ParallelSection, device_type: str, *, is_own: bool, wanted: int | None = None) -> int:
    """How many processes this site starts: as the section says, or one for each accelerator.

    Args:
        is_own: the section is of this machine's settings, and not of a job that came over the wire.
        wanted: what `[world]` says, where it does.

    Raises:
        ConfigError: the axes do not make that number; or a job asks for more than the machine has devices or cores.
    """
    if wanted is not None:
        count = section.degrees(wanted).world_size
        if count != wanted:
            raise ConfigError(
                f"parallel.processes = {count}, and world.nodes x world.processes_per_node = {wanted}: make them equal",
                key="parallel.processes",
                value=str(count),
                bound=str(wanted),
            )
        return count
    at_hand = None if device_type == "cpu" else torch.accelerator.device_count()
    count = section.degrees(at_hand if -1 in section.named_degrees.values() else None).world_size
    most = at_hand or os.cpu_count() or 1
    if count > most and not is_own:
        raise ConfigError(
            f"parallel: the job asks for {count} processes and this machine has {most} devices or cores for them; lower "
            "parallel.processes or an axis, or have the site say [parallel] in its settings",
            key="parallel.processes",
            value=str(count),
            bound=str(most),
        )
    return count


def require_spreadable(job: Job, strategy: Strategy, app: type[App], request: Prepare) -> None:
    """Returns where the job keeps nothing at a site from one round to the next, and changes nothing whole.

    Raises:
        ConfigError: names the part of the job that a site with [parallel] cannot do.
    """
    feedback = feedback_of(strategy.codec)
    refusals = {
        "strategy.rule": (strategy.rule.name, strategy.rule.name not in ("none", "fedprox")),
        "strategy.codec": (strategy.codec.name, feedback != "none"),
        "strategy.download": ("a codec", strategy.download is not None and request.encoded),
        "strategy.local": (", ".join(strategy.local), bool(strategy.local)),
        "strategy.buffers": (strategy.buffers, strategy.buffers == "local"),
        "strategy.personal": ("a model of the site's own", strategy.personal.work(strategy.work) is not None),
        "strategy.schedule": (
            "every_steps",
            strategy.exchange.steps is not None or strategy.exchange.num_fragments > 1,
        ),
        "app.keeps_optimizer": ("True", app.keeps_optimizer),
    }
    for key, (value, is_refused) in refusals.items():
        if is_refused:
            raise ConfigError(
                f"{key} = {value} keeps state at a site or works on whole tensors, which this version does not divide "
                "among the processes of [parallel]: choose another, or remove [parallel] from the job and the site",
                key=key,
                value=value,
            )


def open_spread(request: Prepare, section: ParallelSection, round_: int = 1) -> SpreadSession:
    """Load this process's part of what the run needs. Every process of the site's world calls this.

    Raises:
        NotAllowed, Unknown, AppFailed, ConfigError, BadManifest, DeviceMissing: as `open_session` does, and where the
            model or the job does not go with the layout.
    """
    whole = decode_job(request.job.encode())
    job = whole.at(round_)
    strategy = resolve(job)
    device = own_device(job, request)
    set_up_torch(job.training, device, trains=request.training)
    entry = AppEntry(name=request.app_name, distribution=request.distribution, entry_point=request.entry_point)
    kind = load_app(entry, request.app_hash)
    require_spreadable(job, strategy, kind, request)
    for stage in whole.stages[1:]:
        build_app(kind, stage.job.app, request.data)  # values that the app does not take are told on joining
    app = build_app(kind, job.app, request.data)
    nodes = Nodes.here()
    manifest = Manifest.decode(nodes.read(lambda: _bytes_of(Path(request.manifest_path))))
    parameters = job.strategy.parameters or "all"
    dims = ParallelDims.of(section, device_type=device.type)
    needs_values = parameters == "trainable" or dims.degrees.pp > 1  # which trace it
    model = build_skeleton(app, job.job.seed, needs_values=needs_values)
    manifest.require_same(run_manifest(manifest_of(model, parameters), strategy.lanes, strategy.local))
    require_same_frozen(manifest.frozen, frozen_of(model) if parameters == "trainable" else ())
    if dims.degrees.pp > 1 and any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
        raise ConfigError(
            "parallel.pp: batch norm would count the examples that fill up a micro-batch; use another norm, or layout",
            key="parallel.pp",
        )
    transient = {name: buffer.clone() for name, buffer in model.named_buffers() if name not in model.state_dict()}
    training = _open_training(request, whole, strategy, app) if request.training else None
    test_data = app.data("test") if job.evaluation.sites or not request.training else None
    example = _example(app, training, test_data, job) if dims.degrees.pp > 1 else None
    judged = None
    if dims.degrees.pp > 1 and test_data is not None:
        judged = _judge_of(app, job, dims, section, device, example)
    layout = spread(app, model, dims, section, device=device, example=example)
    return SpreadSession(
        run=request.run,
        site=request.site,
        whole=whole,
        job=job,
        strategy=strategy,
        manifest=manifest,
        updates=strategy.fragments(manifest).whole,
        device=device,
        app=app,
        layout=layout,
        nodes=nodes,
        holders=nodes.holders(layout.model),
        transient=transient,
        training=training,
        test_data=test_data,
        judged=judged,
    )


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise LocalError(
            f"{path}: {error.strerror or error}; the first node of [world] must see the site's folder by the same path"
        ) from None


def own_device(job: Job, request: Prepare) -> torch.device:
    """This process's device: of several accelerators, the one with its number on this machine.

    Raises:
        ConfigError: the job or the machine names one of them.
        DeviceMissing: as `choose_device`.
    """
    device = choose_device(job.training.device, request.device)
    if device.type == "cpu" or not dist.is_initialized():
        return device
    for wish in (job.training.device, request.device or "auto"):
        if ":" in wish:
            raise ConfigError(
                f'device = "{wish}" is one device, and [parallel] has a process for each; leave its number out',
                key="training.device",
                value=wish,
            )
    own = torch.device(device.type, int(os.environ.get("LOCAL_RANK", "0")))
    torch.accelerator.set_device_index(own.index)
    return own


def _open_training(request: Prepare, whole: Job, strategy: Strategy, app: App) -> SpreadTraining:
    secret = bytes.fromhex(request.rounding_seed_hex)
    if len(secret) != SECRET_BYTES:
        raise Malformed(f"rounding_seed_hex has {len(secret)} bytes, wanted {SECRET_BYTES}", field="rounding_seed_hex")
    dataset = app.data("train")
    if dataset is None:
        raise AppFailed('data("train") is None: this site has nothing to train on', field="data.train")
    works = [plan_work(app, dataset, resolve(stage.job).work) for stage in whole.stages]
    return SpreadTraining(
        dataset=dataset,
        work=plan_work(app, dataset, strategy.work),
        max_weight=max(work.max_weight for work in works),
        secret=secret,
    )


def _example(app: App, training: SpreadTraining | None, test_data: Dataset[Any] | None, job: Job) -> Any:
    """A batch of the job's size, by which a pipeline is traced."""
    if training is not None:
        return next(batches(app, training.dataset, training.work, seed=0))
    if test_data is None:
        raise AppFailed('data("test") is None: a pipeline is traced with an example', field="data.test")
    size = resolve(job).work.batch_size
    return next(iter(app.loader(test_data, batch_size=size, shuffle=False, generator=torch.Generator())))


def _judge_of(
    app: App, job: Job, dims: ParallelDims, section: ParallelSection, device: torch.device, example: Any
) -> tuple[nn.Module, Stages]:
    """A pipeline for evaluation: a trace is of training or of evaluation, as dropout shows, so there are two."""
    model = build_skeleton(app, job.job.seed, needs_values=True).eval()
    section = section.for_forward_passes(dims.degrees.pp)
    stages = cut(app, model, dims, section, device, example, prepare=lambda stage: None, losses=None)
    return stages.as_module(), stages
