"""Evaluation by all processes of a site: each judges its share of every batch, and the sums are added up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import Dataset

from atoll.cluster.app import App
from atoll.cluster.batches import to_device
from atoll.cluster.evaluate import EVALUATION_BATCH
from atoll.cluster.metric_sums import MetricSums
from atoll.cluster.parallel.pipeline import Stages, microbatches, padded_inputs
from atoll.cluster.parallel.shares import num_examples, part
from atoll.cluster.parallel.steps import Piece, SharedStep, pieces


def judge(
    app: App,
    model: nn.Module,
    step: SharedStep,
    dataset: Dataset[Any],
    *,
    device: torch.device,
    stages: Stages | None = None,
    on_batch: Callable[[], None] = lambda: None,
) -> Mapping[str, tuple[float, float]]:
    """Sum and count of "loss" and of the app's own metrics, the same on every process.

    Args:
        stages: of a pipeline, traced for evaluation.

    Raises:
        BadUpdate: a metric is not finite.
    """
    sums, share, num_shares = MetricSums(), step.dims.share, step.dims.num_shares
    size = EVALUATION_BATCH if stages is None else stages.num_microbatches * stages.microbatch * num_shares
    model.eval()
    with torch.no_grad():  # not inference_mode: sharded parameters are gathered into tensors that training uses too
        for batch in app.loader(dataset, batch_size=size, shuffle=False, generator=torch.Generator()):
            on_batch()
            piece = pieces(app, to_device(batch, device), num_shares)(share)
            with step.autocast():
                found = [(model(*app.inputs(piece.batch)), piece)] if stages is None else _through(app, stages, piece)
                for output, one in found:
                    _count(app, sums, output, one)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # without a backward pass nobody else does, under ZeRO-2
    return sums.result(step.total)


def _through(app: App, stages: Stages, piece: Piece) -> list[tuple[Any, Piece]]:
    """Each micro-batch's output and itself, at the last stage; nothing at the others."""
    micro = microbatches(app, piece, stages.num_microbatches)
    args = padded_inputs(app, micro, stages.microbatch) if stages.is_first else ()
    output = stages.schedule.step(*args)
    if not stages.is_last:
        return []
    starts = range(0, stages.num_microbatches * stages.microbatch, stages.microbatch)
    return [
        (part(output, start, start + num_examples(one.batch)), one) for start, one in zip(starts, micro, strict=True)
    ]


def _count(app: App, sums: MetricSums, output: Any, piece: Piece) -> None:
    loss = app.loss(output, piece.batch)
    metrics = app.metrics(output, piece.batch)
    if piece.weight:
        sums.add_mean("loss", loss, piece.weight)
        for name, (total, count) in metrics.items():
            sums.add(name, total, count)
