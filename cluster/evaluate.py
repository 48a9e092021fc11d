"""Judging a model on one machine's test data: sums and counts, so that sites can be added up exactly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from atoll.cluster.app import App
from atoll.cluster.batches import to_device
from atoll.cluster.metric_sums import MetricSums

EVALUATION_BATCH = 512  # no gradients are kept, so a batch may be larger than in training


def evaluate(
    app: App,
    model: nn.Module,
    dataset: Dataset[Any] | None,
    *,
    device: torch.device,
    batch_size: int = EVALUATION_BATCH,
    on_batch: Callable[[], None] = lambda: None,
) -> dict[str, tuple[float, float]]:
    """Sum and count of "loss" and of the app's own metrics; nothing where there is no data.

    Raises:
        BadUpdate: a metric is not finite.
    """
    sums = MetricSums()
    if dataset is None:
        return {}
    model.eval()
    with torch.inference_mode():
        for batch in app.loader(dataset, batch_size=batch_size, shuffle=False, generator=torch.Generator()):
            on_batch()
            batch = to_device(batch, device)
            output = model(*app.inputs(batch))
            num_examples = app.examples(batch)
            sums.add_mean("loss", app.loss(output, batch), num_examples)
            for name, (total, count) in app.metrics(output, batch).items():
                sums.add(name, total, count)
    return sums.result()
