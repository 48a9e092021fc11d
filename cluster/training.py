"""What a worker trains with at a site over the rounds of a run: data, optimizer, work, and the secret of rounding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from atoll.aggregation.rounding import SECRET_BYTES
from atoll.aggregation.rules.rule import Watching
from atoll.aggregation.strategy import Strategy, resolve
from atoll.cluster.app import App
from atoll.cluster.batches import Work, plan_work
from atoll.cluster.messages import Prepare, Train
from atoll.cluster.optimizer_state import LocalOptimizer
from atoll.cluster.personal import PersonalWork
from atoll.wire.errors import AppFailed, Malformed
from atoll.wire.explain import explain
from atoll.wire.job import Job, WorkSection


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What a site needs beyond the model to train it."""

    dataset: Dataset[Any]
    optimizer: LocalOptimizer
    work: Work
    max_weight: int  # of an update in any round of the run, as promised
    secret: bytes  # of the randomness of rounding
    personal: PersonalWork | None  # where the site has a model for itself
    sections: Sequence[WorkSection]  # the work of all rounds of the run

    def at_site(self, app: App, strategy: Strategy, dataset: Dataset[Any], secret: bytes) -> Training:
        """That of another site with the same app: only its data and its secret differ.

        Raises:
            AppFailed: there is nothing to train on.
        """
        work, max_weight, personal = _plan(app, strategy, dataset, self.sections)
        return replace(self, dataset=dataset, secret=secret, work=work, max_weight=max_weight, personal=personal)

    def work_of(self, request: Train, app: App, strategy: Strategy) -> Work:
        """The round's work: the job's, but for what the task itself says otherwise."""
        if not request.config:
            return self.work
        unit = {"epochs", "steps"} & request.config.keys()
        table = strategy.work.model_dump(exclude_none=True, exclude={"epochs", "steps"} if unit else set())
        try:
            section = WorkSection.model_validate({**table, **request.config})
        except ValidationError as error:
            raise Malformed(str(explain(error, WorkSection, "task")), field="config") from None
        work = plan_work(app, self.dataset, section)
        if work.max_weight > self.max_weight:
            raise Malformed(
                f"the task asks for work that weighs up to {work.max_weight}; this site promised at most "
                f"{self.max_weight} in this run",
                field="config",
                value=work.max_weight,
                bound=self.max_weight,
            )
        return work


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
    sections = [resolve(stage.job).work for stage in whole.stages]
    optimizer = app.optimizer(model.parameters())
    if not isinstance(optimizer, Optimizer):
        raise AppFailed(
            f"optimizer() returned {type(optimizer).__name__}, wanted a torch.optim.Optimizer", field="optimizer"
        )
    if isinstance(strategy.rule, Watching):
        strategy.rule.watch(optimizer)  # so that what it refuses is refused before the site takes part
    work, max_weight, personal = _plan(app, strategy, dataset, sections)
    counts_steps = strategy.exchange.steps is not None
    return Training(
        dataset=dataset,
        optimizer=LocalOptimizer(optimizer, keeps_state=app.keeps_optimizer or counts_steps),
        work=work,
        max_weight=max_weight,
        secret=secret,
        personal=personal,
        sections=sections,
    )


def _plan(
    app: App, strategy: Strategy, dataset: Dataset[Any], sections: Sequence[WorkSection]
) -> tuple[Work, int, PersonalWork | None]:
    """A round's work, the largest weight of an update in all of them, and the work of the personal model."""
    section = strategy.personal.work(strategy.work)
    personal = PersonalWork(kind=strategy.personal, work=plan_work(app, dataset, section)) if section else None
    max_weight = max(plan_work(app, dataset, section).max_weight for section in sections)
    return plan_work(app, dataset, strategy.work), max_weight, personal
