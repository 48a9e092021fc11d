"""THE local loop: what a site does in one round. Workers, the central baseline and simulations all train through it.

The same app, weights, data, work and seed give the same bytes on one machine: order of the data, dropout and
augmentation follow the seed, and nothing else is random.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from atoll.aggregation.rules.rule import LocalRule, show
from atoll.cluster.app import App
from atoll.cluster.batches import Work, batches, to_device
from atoll.cluster.local_step import LocalStep, OneProcess
from atoll.cluster.metric_sums import MetricSums
from atoll.cluster.optimizer_step import optimizer_step
from atoll.cluster.seeds import seeded
from atoll.wire.errors import AppFailed


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one round of local training came to; the weights are in the model."""

    weight: int  # examples: see atoll.cluster.batches
    metrics: Mapping[str, tuple[float, float]]  # sum and count of the training loss, over all examples seen


def train_locally(
    app: App,
    model: nn.Module,
    optimizer: Optimizer,
    dataset: Dataset[Any],
    *,
    work: Work,
    rule: LocalRule,
    seed: int,
    device: torch.device,
    on_step: Callable[[int, int], None] = lambda done, total: None,
    step: LocalStep | None = None,
    restores: bool = True,
) -> Outcome:
    """Trains `model` in place from the weights that it has. `on_step(done, total)` is called after each step.

    Args:
        step: how gradients are made, where several processes make them together: each of them calls this with the
            same arguments and its own part of the model, and all come to the same outcome.
        restores: whether random generators go on afterwards as if nothing had been drawn.

    Raises:
        BadUpdate: the loss is not finite.
        AppFailed: the loader gave no batch, or more examples than the app promised; the rule is not defined for the
            optimizer.
    """
    sums, num_examples, done = MetricSums(), 0, 0
    step = step or OneProcess(app, model)
    model.train()
    with seeded(step.seed(seed), device, restores=restores):
        scheduler = app.scheduler(optimizer)
        show(rule, optimizer)
        moving = optimizer_step(optimizer)
        rule.begin(model)
        for batch in batches(app, dataset, work, seed):
            batch = to_device(batch, device)
            moving.clear()
            share = step.gradients(batch)
            rule.before_step(model)
            step.before_update()
            moving.move()
            rule.after_step(model)
            if scheduler is not None:
                scheduler.step()
            sums.add_mean("loss", share.loss, share.weight)
            num_examples, done = num_examples + share.batch_weight, done + 1
            on_step(done, work.num_steps)
        rule.end(model)
    return Outcome(weight=_weight(num_examples, work), metrics=sums.result(step.total))


def _weight(num_examples: int, work: Work) -> int:
    weight = num_examples // (work.num_epochs or 1)
    if not 1 <= weight <= work.max_weight:
        raise AppFailed(
            f"the loader gave {weight} examples a pass, 1 to {work.max_weight} were promised; loader() must give each "
            "example once a pass, and examples() must be additive",
            field="weight",
            value=weight,
            bound=f"1 to {work.max_weight}",
        )
    return weight
