"""The same app, model and number of passes with all data in one place: what a federation is compared with."""

from __future__ import annotations

from atoll.aggregation.rules.rule import NoRule
from atoll.cluster.app import App, build_model
from atoll.cluster.batches import plan_work
from atoll.cluster.device import choose_device, set_up_torch
from atoll.cluster.evaluate import evaluate
from atoll.cluster.local_loop import train_locally
from atoll.cluster.seeds import training_seed
from atoll.wire.errors import AppFailed
from atoll.wire.job import Job


def train_centrally(app: App, job: Job, epochs: int) -> dict[str, tuple[float, float]]:
    """Metric sums on the app's test data after `epochs` passes over its training data, from the run's own version 0.

    `app` must have the joined data of all sites as its source. Batch size, seed and device are the job's; one
    optimizer goes through all passes, as it would without a federation.

    Raises:
        AppFailed: the app has no training data here.
    """
    device = choose_device(job.training.device)
    set_up_torch(job.training, device)
    dataset = app.data("train")
    if dataset is None:
        raise AppFailed('data("train") is None: there is nothing to train on', field="data.train")
    model = build_model(app, job.job.seed).to(device)
    section = job.strategy.work.model_copy(update={"epochs": epochs, "steps": None})
    train_locally(
        app,
        model,
        app.optimizer(model.parameters()),
        dataset,
        work=plan_work(app, dataset, section),
        rule=NoRule(NoRule.Options()),
        seed=training_seed(job.job.seed, "central", 1),
        device=device,
    )
    return evaluate(app, model, app.data("test"), device=device)
