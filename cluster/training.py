"""What a worker trains with at a site over the rounds of a run: data, optimizer, work, and the secret of rounding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from atoll.aggregation.rounding import SECRET_BYTES
from atoll.aggregation.rules import Watching
from atoll.aggregation.strategy import Strategy, resolve
from atoll.cluster.app import App
from atoll.cluster.batches import Work, plan_work
from atoll.cluster.messages import Prepare
from atoll.cluster.optimizer_state import LocalOptimizer
from atoll.cluster.personal import PersonalWork
from atoll.wire.errors import AppFailed, Malformed
from atoll.wire.job import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What a site needs beyond the model to train it."""

    dataset: Dataset[Any]
    optimizer: LocalOptimizer
    work: Work
    max_weight: int  # of an update in any round of the run, as promised
    secret: bytes  # of the randomness of rounding
    personal: PersonalWork | None  # where the site has a model for itself


def open_training(request: Prepare, whole: Job, strategy: Strategy, app: App, model: nn.Module) -> Training:
    """The data and the optimizer of an app, and its work in the rounds that `strategy` is of; `whole` is of all rounds.

    Raises:
        Malformed: the secret of rounding has another length.
        AppFailed: there is nothing to train on, or what the app returns is no optimizer.
    """
    secret = bytes.fromhex(request.rounding_seed_hex)
    if len(secret) != SECRET_BYTES:
        raise Malformed(f"rounding_seed_hex has {len(secret)} bytes, wanted {SECRET_BYTES}", field="rounding_seed_hex")
    dataset = app.data("train")
    if dataset is None:
        raise AppFailed('data("train") is None: this site has nothing to train on', field="data.train")
    sections = {resolve(stage.job).work for stage in whole.stages}
    optimizer = app.optimizer(model.parameters())
    if not isinstance(optimizer, Optimizer):
        raise AppFailed(
            f"optimizer() returned {type(optimizer).__name__}, wanted a torch.optim.Optimizer", field="optimizer"
        )
    if isinstance(strategy.rule, Watching):
        strategy.rule.watch(optimizer)  # so that what it refuses is refused before the site takes part
    section = strategy.personal.work(strategy.work)
    counts_steps = strategy.exchange.steps is not None
    return Training(
        dataset=dataset,
        optimizer=LocalOptimizer(optimizer, keeps_state=app.keeps_optimizer or counts_steps),
        work=plan_work(app, dataset, strategy.work),
        max_weight=max(plan_work(app, dataset, section).max_weight for section in sections),
        secret=secret,
        personal=PersonalWork(kind=strategy.personal, work=plan_work(app, dataset, section)) if section else None,
    )
