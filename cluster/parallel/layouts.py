"""One model spread over a site's processes as `[parallel]` says, from torch's own modules.

The order is fixed: products are divided, blocks recompute, blocks are compiled, parameters are sharded or replicated. Names
in the state dict stay those of the app's model throughout.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from atoll.cluster.app import App
from atoll.cluster.parallel.blocks import blocks_of, compile_blocks, recompute
from atoll.cluster.parallel.dims import ParallelDims
from atoll.cluster.parallel.pipeline import Losses, PipelineStep, cut
from atoll.cluster.parallel.steps import ReplicaStep, SharedStep, autocast_of
from atoll.cluster.parallel.tensor_plan import divide
from atoll.wire.errors import AppFailed, ConfigError
from atoll.wire.parallel_section import ParallelSection


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """This process's part of a model, and how its gradients are made."""

    dims: ParallelDims
    section: ParallelSection
    model: nn.Module  # of a pipeline: its stages; their tensors have the names of the whole model's
    step: SharedStep

    def optimizer(self, app: App) -> Optimizer:
        """The app's optimizer over this process's parameters, or its part of one that all of them share.

        Raises:
            AppFailed: the app returns something else than an optimizer.
        """
        optimizer = app.optimizer(self.model.parameters())
        if not isinstance(optimizer, Optimizer):
            raise AppFailed(
                f"optimizer() returned {type(optimizer).__name__}, wanted a torch.optim.Optimizer", field="optimizer"
            )
        if self.section.zero_of(self.dims.degrees) == 1:
            return _divided(optimizer, self.dims)
        kinds = {
            parameter.device_mesh if isinstance(parameter, DTensor) else None for parameter in self.model.parameters()
        }
        if len(kinds) > 1:  # torch's fused and for-each forms take tensors of one kind
            for group in optimizer.param_groups:
                group.update({key: False for key in ("foreach", "fused") if key in group})
        return optimizer


def spread(
    app: App,
    model: nn.Module,
    dims: ParallelDims,
    section: ParallelSection,
    *,
    device: torch.device,
    example: Any = None,
) -> Layout:
    """The layout of `section` for a model, which is changed in place.

    Args:
        model: on `device`, or on the meta device: then its tensors are without values afterwards.
        example: a batch of the job's size, for a pipeline to trace the model with.

    Raises:
        ConfigError, AppFailed: the model does not fit the layout.
    """
    degrees = dims.degrees
    options: dict[str, Any] = {"accumulate": section.accumulate, "clip_norm": section.clip_norm}
    if degrees.dp_shard == 1:  # else the policy of fully_shard casts
        options["autocast"] = autocast_of(device, section.precision.param)
    if degrees.pp > 1:
        losses, blocks = Losses(app), blocks_of(model)
        stages = cut(
            app, model, dims, section, device, example, losses=losses,
            prepare=lambda stage: prepare(stage, _those_in(stage, blocks), dims, section),
        )  # fmt: skip
        step: SharedStep = PipelineStep(app, stages, losses, dims, **options)
        return Layout(dims=dims, section=section, model=stages.as_module(), step=step)
    if degrees.tp > 1:
        divide(app, model, dims.axis("tp"), section)
    prepare(model, blocks_of(model), dims, section)
    _materialise(model, device)
    module = model
    if degrees.dp_replicate > 1 and degrees.dp_shard == 1:
        module = _replicated(model, dims, section, device)
    return Layout(dims=dims, section=section, model=model, step=ReplicaStep(app, module, dims, **options))


def prepare(module: nn.Module, blocks: dict[str, nn.Module], dims: ParallelDims, section: ParallelSection) -> None:
    """Recompute, compile and shard a module by its blocks, as far as the section says."""
    recompute(blocks, section.activation_checkpoint)
    if section.compile != "none":
        compile_blocks(blocks or {"": module}, section.compile)
    if dims.degrees.dp_shard > 1:
        _shard(module, blocks, dims, section)


def _those_in(stage: nn.Module, blocks: Iterable[str]) -> dict[str, nn.Module]:
    """The blocks that a stage has; tracing keeps their names."""
    modules = dict(stage.named_modules())
    return {name: modules[name] for name in blocks if name in modules}


def _shard(module: nn.Module, blocks: dict[str, nn.Module], dims: ParallelDims, section: ParallelSection) -> None:
    axes = ("dp_replicate", "dp_shard") if dims.degrees.dp_replicate > 1 else ("dp_shard",)
    dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
    narrow = section.precision.param == "bf16"
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if narrow else None,
        reduce_dtype=torch.bfloat16 if section.precision.reduce == "bf16" else dtype,
        output_dtype=dtype if narrow else None,
    )
    inner = MixedPrecisionPolicy(param_dtype=policy.param_dtype, reduce_dtype=policy.reduce_dtype)
    again = section.zero_of(dims.degrees) == 3
    for block in blocks.values():
        fully_shard(block, mesh=dims.axis(*axes), reshard_after_forward=again, mp_policy=inner)
    fully_shard(module, mesh=dims.axis(*axes), reshard_after_forward=again, mp_policy=policy)


def _replicated(
    model: nn.Module, dims: ParallelDims, section: ParallelSection, device: torch.device
) -> DistributedDataParallel:
    group = dims.axis("dp_replicate").get_group()
    if section.precision.reduce == "bf16" and device.type != "cuda":
        raise ConfigError(
            "parallel.precision.reduce = bf16: torch's hook for replicated gradients (bf16_compress_hook) takes NCCL 2.10 "
            f"or later, and this site computes on {device.type}; leave it out, or divide parameters with dp_shard",
            key="parallel.precision.reduce",
            value="bf16",
        )
    with warnings.catch_warnings():  # of the name `broadcast_buffers`, whose successor torch 2.11 has not
        warnings.simplefilter("ignore", FutureWarning)
        module = DistributedDataParallel(
            model,
            device_ids=None if device.type == "cpu" else [device],
            process_group=group,
            broadcast_buffers=False,  # each share has its own statistics in a round; their mean leaves the site
            init_sync=False,  # all begin with the base version
            gradient_as_bucket_view=True,
        )
    if section.precision.reduce == "bf16":
        module.register_comm_hook(group, default_hooks.bf16_compress_hook)
    return module


def _materialise(model: nn.Module, device: torch.device) -> None:
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        model.to_empty(device=device)
    else:
        model.to(device)


def _divided(optimizer: Optimizer, dims: ParallelDims) -> Optimizer:
    """The same optimizer with its state divided among the processes that replicate the model (ZeRO-1)."""
    kind: Callable[..., Any] = type(optimizer)
    known = inspect.signature(kind.__init__).parameters
    taken = {name: value for name, value in optimizer.defaults.items() if name in known}
    groups = [{key: value for key, value in group.items()} for group in optimizer.param_groups]
    return ZeroRedundancyOptimizer(
        groups,
        optimizer_class=type(optimizer),
        process_group=dims.axis("dp_replicate").get_group(),
        **taken,
    )
