"""Stages and schedules of a pipeline, and its local step.

The model is traced with one micro-batch and cut where a stage begins, so an app needs nothing for it. Shapes are fixed
by the trace: a micro-batch that is shorter, as at the end of an epoch, is filled up with copies of its first example,
whose outputs the loss does not see.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    SplitPoint,
    pipeline,
)
from torch.distributed.pipelining.schedules import _PipelineSchedule

from atoll.cluster.app import App
from atoll.cluster.local_step import Share
from atoll.cluster.parallel.blocks import blocks_of
from atoll.cluster.parallel.dims import ParallelDims
from atoll.cluster.parallel.shares import bounds, num_examples, part
from atoll.cluster.parallel.steps import Piece, SharedStep, pieces
from atoll.wire.errors import AppFailed
from atoll.wire.parallel_section import ParallelSection


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """This process's stages: modules with the model's own names, and the schedule that runs them."""

    modules: tuple[nn.Module, ...]
    schedule: _PipelineSchedule
    num_microbatches: int
    microbatch: int  # examples in each
    is_first: bool
    is_last: bool

    def as_module(self) -> nn.Module:
        """One module that has the tensors of all of this process's stages, under the whole model's names."""
        if len(self.modules) == 1:
            return self.modules[0]
        holder = nn.Module()
        for module in self.modules:
            _take_over(holder, module)
        return holder


class PipelineStep(SharedStep):
    """Micro-batches through stages; the loss is known to the last of them, and counted there."""

    def __init__(self, app: App, stages: Stages, losses: Losses, dims: ParallelDims, **options: Any) -> None:
        super().__init__(app, dims, lambda: parameters_of(stages.modules), **options)
        self._stages, self._losses = stages, losses

    def gradients(self, batch: Any) -> Share:
        own, batch_weight = self.share_pieces(batch)
        total: Tensor | float = 0.0
        for piece in own:
            total = total + self._pass(piece, batch_weight)
        weight = sum(piece.weight for piece in own)
        return Share(total / max(weight, 1), weight, batch_weight)

    def _pass(self, piece: Piece, batch_weight: int) -> Tensor | float:
        """One forward and backward of all stages; the loss times its weight at the last stage, else 0."""
        stages = self._stages
        micro = microbatches(self.app, piece, stages.num_microbatches)
        args = padded_inputs(self.app, micro, stages.microbatch) if stages.is_first else ()
        target = torch.arange(stages.num_microbatches) if stages.is_last else None
        losses: list[Tensor] | None = [] if stages.is_last else None
        with self.autocast(), self._losses.of(micro, self.dims.num_shares / batch_weight):
            stages.schedule.step(*args, target=target, losses=losses, return_outputs=False)
            return self._losses.weighted


class Losses:
    """The loss of each micro-batch, called by the schedule with a number in place of a target."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._micro: Sequence[Piece] = ()
        self._factor = 0.0
        self.weighted: Tensor | float = 0.0

    def of(self, micro: Sequence[Piece], factor: float) -> AbstractContextManager[None]:
        """Have the next calls be about these micro-batches; a loss counts `factor` times its weight."""
        self._micro, self._factor, self.weighted = micro, factor, 0.0
        return nullcontext()

    def __call__(self, output: Any, number: Tensor) -> Tensor:
        piece = self._micro[int(number)]
        loss = self._app.loss(part(output, 0, num_examples(piece.batch)), piece.batch)
        self.weighted = self.weighted + loss.detach() * piece.weight
        return loss * (self._factor * piece.weight)


def microbatches(app: App, piece: Piece, count: int) -> list[Piece]:
    """A piece in `count` parts; all of weight 0 where the piece has none."""
    part_of = pieces(app, piece.batch, count)
    return [one if piece.weight else Piece(one.batch, 0) for one in map(part_of, range(count))]


def padded_inputs(app: App, micro: Sequence[Piece], size: int) -> tuple[Tensor, ...]:
    """The model's inputs for all micro-batches one after the other, `size` examples each."""
    rows = []
    for piece in micro:
        inputs = app.inputs(piece.batch)
        if not all(isinstance(value, Tensor) for value in inputs):
            raise AppFailed(
                "inputs() of the app gives more than tensors, which a pipeline cannot hand over; give tensors, or "
                "another layout in [parallel]",
                field="inputs",
            )
        rows.append([_padded(value, size) for value in inputs])
    return tuple(torch.cat(values) for values in zip(*rows, strict=True))


def _padded(value: Tensor, size: int) -> Tensor:
    if len(value) == size:
        return value
    return torch.cat([value, value[:1].expand(size - len(value), *value.shape[1:])])


def parameters_of(modules: Sequence[nn.Module]) -> Iterator[nn.Parameter]:
    return itertools.chain.from_iterable(module.parameters() for module in modules)


def cut(
    app: App,
    model: nn.Module,
    dims: ParallelDims,
    section: ParallelSection,
    device: torch.device,
    example: Any,
    *,
    prepare: Callable[[nn.Module], None],
    losses: Losses | None,
) -> Stages:
    """This process's stages of a model.

    Args:
        example: a batch of the job's size.
        prepare: what is done to a stage's module before it runs, such as sharding.
        losses: None for a forward pass alone.

    Raises:
        AppFailed: the model cannot be traced or cut, or two stages would share a parameter.
    """
    _require_untied(model)
    pp, num_microbatches = dims.degrees.pp, section.microbatches(dims.degrees.pp)
    num_stages = pp * section.stages_per_rank
    share = bounds(num_examples(example), dims.num_shares * section.accumulate, 0)[1]
    size = max(1, bounds(share, num_microbatches, 0)[1])
    inputs = padded_inputs(app, [Piece(part(example, 0, 1), 1)], size)
    points = split_points(model, section, num_stages)
    try:
        pipe = pipeline(model, inputs, split_spec={name: SplitPoint.BEGINNING for name in points})
        for name in points:  # torch leaves its marks there, which the next trace would run into
            vars(model.get_submodule(name)).pop("forward", None)
    except (Exception, SystemExit) as error:  # whatever tracing the user's code raises
        raise AppFailed(
            f"the model cannot be traced for a pipeline: {error}; write it without control flow that depends on "
            "values, or take another layout in [parallel]",
            field="parallel.pp",
        ) from error
    _require_apart([pipe.get_stage_module(index) for index in range(num_stages)])
    mine = range(dims.place("pp"), num_stages, pp)
    modules = tuple(pipe.get_stage_module(index) for index in mine)
    for module in modules:
        module.to(device)
        prepare(module)
    group = dims.axis("pp").get_group()
    built = [pipe.build_stage(index, device, group) for index in mine]
    options: dict[str, Any] = {"n_microbatches": num_microbatches, "loss_fn": losses, "scale_grads": False}
    schedule: _PipelineSchedule
    if section.pipeline.schedule == "interleaved":
        schedule = ScheduleInterleaved1F1B(list(built), **options)
    else:
        kind = ScheduleGPipe if section.pipeline.schedule == "gpipe" else Schedule1F1B
        schedule = kind(built[0], **options)
    return Stages(
        modules=modules,
        schedule=schedule,
        num_microbatches=num_microbatches,
        microbatch=size,
        is_first=dims.place("pp") == 0,
        is_last=dims.place("pp") == pp - 1,
    )


def split_points(model: nn.Module, section: ParallelSection, num_stages: int) -> tuple[str, ...]:
    """Names of the modules that the stages but the first begin with.

    Raises:
        AppFailed: the job names another number of them, or unknown ones, or the model has too few blocks.
    """
    blocks = blocks_of(model)
    if section.pipeline.split_points != "auto":
        points, known = section.pipeline.split_points, dict(model.named_modules())
        unknown = [name for name in points if name not in known]
        if len(points) != num_stages - 1 or unknown:
            raise AppFailed(
                f"parallel.pipeline.split_points names {', '.join(points)}; wanted {num_stages - 1} modules of the "
                f"model, such as {', '.join(list(blocks)[:4])}",
                field="parallel.pipeline.split_points",
                value=", ".join(points),
                bound=num_stages - 1,
            )
        return points
    if len(blocks) < num_stages:
        raise AppFailed(
            f"the model has {len(blocks)} blocks, and {num_stages} stages want one each; lower parallel.pp",
            field="parallel.pp",
            value=num_stages,
            bound=len(blocks),
        )
    sizes = [sum(parameter.numel() for parameter in block.parameters()) for block in blocks.values()]
    return tuple(list(blocks)[index] for index in _balanced(sizes, num_stages))


def _balanced(sizes: Sequence[int], num_parts: int) -> list[int]:
    """Where the parts but the first begin, so that each has about the same size and at least one member."""
    ends = list(itertools.accumulate(sizes))
    starts: list[int] = []
    for number in range(1, num_parts):
        wanted = ends[-1] * number / num_parts
        first, last = (starts[-1] if starts else 0) + 1, len(sizes) - (num_parts - number)
        starts.append(min(range(first, last + 1), key=lambda index: abs(ends[index - 1] - wanted)))
    return starts


def _take_over(holder: nn.Module, module: nn.Module) -> None:
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        path, _, last = name.rpartition(".")
        owner = holder
        for step in path.split(".") if path else ():
            if step not in owner._modules:
                owner.add_module(step, nn.Module())
            owner = owner.get_submodule(step)
        if isinstance(tensor, nn.Parameter):
            owner.register_parameter(last, tensor)
        else:
            source = module.get_submodule(path) if path else module
            owner.register_buffer(last, tensor, persistent=last not in source._non_persistent_buffers_set)


def _require_untied(model: nn.Module) -> None:
    first: dict[nn.Parameter, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(parameter, name) != name:
            raise AppFailed(
                f"parameters {first[parameter]!r} and {name!r} are one (tied), which stages of a pipeline cannot share; "
                "untie them, or take another layout in [parallel]",
                field=name,
            )


def _require_apart(modules: Sequence[nn.Module]) -> None:
    owners: dict[str, int] = {}
    for index, module in enumerate(modules):
        for name, _ in module.named_parameters():
            if owners.setdefault(name, index) != index:
                raise AppFailed(
                    f"parameter {name!r} is used in stages {owners[name]} and {index} of the pipeline, where it would "
                    "become two; give the model one of its own in each, or another layout in [parallel]",
                    field=name,
                )
