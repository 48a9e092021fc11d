"""The loop by itself: order, weights, schedules, rules, and what an app can do wrong."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR, LRScheduler
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from atoll.aggregation.rules.fedprox import FedProx
from atoll.aggregation.rules.rule import LocalRule, NoRule
from atoll.cluster.app import App
from atoll.cluster.batches import batches, plan_work
from atoll.cluster.evaluate import evaluate
from atoll.cluster.local_loop import Outcome, train_locally
from atoll.wire.errors import AppFailed, BadUpdate
from atoll.wire.job import WorkSection

CPU = torch.device("cpu")
NO_RULE = NoRule(NoRule.Options())


class Line(App):
    """y = w x, with the examples numbered so that their order can be seen."""

    def model(self) -> nn.Module:
        return nn.Linear(1, 1, bias=False)

    def data(self, split: str) -> TensorDataset:
        x = torch.arange(10.0).unsqueeze(1)
        return TensorDataset(x, 3 * x)

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return F.mse_loss(output, batch[1])

    def optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.001)

    def metrics(self, output: Tensor, batch: Any) -> dict[str, tuple[Tensor | float, float]]:
        return {"sum": (batch[1].sum(), 1)}


class Words(Line):
    """Each example has its own weight."""

    def examples(self, batch: Any) -> int:
        return int(batch[0].sum())


class Plain(Dataset[Any]):
    """Not a TensorDataset: loaded one by one."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.tensor([float(index)])}


class Stream(IterableDataset[Any]):
    def __init__(self, count: int) -> None:
        self._count = count

    def __iter__(self) -> Iterator[Any]:
        return iter((torch.tensor([float(i)]), torch.tensor([3.0 * i])) for i in range(self._count))


def line(kind: type[App] = Line) -> App:
    return kind(None, {})


def order(app: App, dataset: Dataset[Any], *, seed: int = 1, **work: Any) -> list[list[int]]:
    section = WorkSection.model_validate(work)
    return [b[0].flatten().int().tolist() for b in batches(app, dataset, plan_work(app, dataset, section), seed)]


def train(
    app: App, *, rule: LocalRule = NO_RULE, start: float = 0.0, seed: int = 1, **work: Any
) -> tuple[float, Outcome]:
    dataset, model = app.data("train"), app.model()
    assert dataset is not None
    nn.init.constant_(next(model.parameters()), start)
    section = WorkSection.model_validate(work)
    outcome = train_locally(
        app, model, app.optimizer(model.parameters()), dataset,
        work=plan_work(app, dataset, section), rule=rule, seed=seed, device=CPU,
    )  # fmt: skip
    return next(model.parameters()).item(), outcome


def test_every_pass_has_each_example_once_in_an_order_of_the_seed() -> None:
    app, data = line(), line().data("train")
    assert data is not None
    first = order(app, data, epochs=2, batch_size=4)
    assert [len(batch) for batch in first] == [4, 4, 2, 4, 4, 2]
    passes = [number for batch in first[:3] for number in batch], [number for batch in first[3:] for number in batch]
    assert sorted(passes[0]) == sorted(passes[1]) == list(range(10))
    assert passes[0] != passes[1]
    assert order(app, data, epochs=2, batch_size=4) == first
    assert order(app, data, epochs=2, batch_size=4, seed=2) != first


def test_steps_go_on_into_the_next_pass() -> None:
    data = line().data("train")
    assert data is not None
    found = order(line(), data, steps=4, batch_size=4)
    assert [len(batch) for batch in found] == [4, 4, 2, 4]


def test_full_batch_is_all_examples_in_their_own_order() -> None:
    data = line().data("train")
    assert data is not None
    assert order(line(), data, epochs=2, full_batch=True) == [list(range(10))] * 2


def test_any_dataset_is_loaded_in_an_order_of_the_seed() -> None:
    app = line()
    work = plan_work(app, Plain(), WorkSection(epochs=1, batch_size=3))
    found = [[b["x"].flatten().int().tolist() for b in batches(app, Plain(), work, seed)] for seed in (1, 1, 2)]
    assert found[0] == found[1] != found[2]


def test_a_stream_has_steps_and_no_epochs() -> None:
    assert order(line(), Stream(5), steps=4, batch_size=2) == [[0, 1], [2, 3], [4], [0, 1]]
    with pytest.raises(AppFailed, match="steps"):
        order(line(), Stream(5), epochs=1)
    with pytest.raises(AppFailed, match="no batch"):
        order(line(), Stream(0), steps=1)
    with pytest.raises(AppFailed, match="no weight can be promised"):
        order(line(Words), Stream(5), steps=1)


@pytest.mark.parametrize(
    ("kind", "work", "weight", "promised"),
    [(Line, {"epochs": 3, "batch_size": 4}, 10, 10), (Line, {"steps": 3, "batch_size": 4}, 10, 12),
     (Line, {"steps": 3, "batch_size": 64}, 30, 30), (Line, {"epochs": 2, "full_batch": True}, 10, 10),
     (Words, {"epochs": 3, "batch_size": 4}, 45, 45), (Words, {"steps": 5, "full_batch": True}, 225, 450)],
)  # fmt: skip
def test_weights_are_what_was_promised(kind: type[App], work: dict[str, Any], weight: int, promised: int) -> None:
    assert plan_work(line(kind), line(kind).data("train"), WorkSection.model_validate(work)).max_weight == promised  # type: ignore[arg-type]
    assert train(line(kind), **work)[1].weight == weight


def test_more_examples_than_promised_are_refused() -> None:
    class Twice(Line):
        def loader(self, dataset: Dataset[Any], **options: Any) -> Iterable[Any]:
            return [*super().loader(dataset, **options), *super().loader(dataset, **options)]

    with pytest.raises(AppFailed, match="20 examples a pass, 1 to 10 were promised"):
        train(line(Twice), epochs=1)


def test_equal_seeds_give_equal_weights_and_metrics() -> None:
    assert train(line(), epochs=3, batch_size=3) == train(line(), epochs=3, batch_size=3)
    assert train(line(), epochs=3, batch_size=3) != train(line(), epochs=3, batch_size=3, seed=2)


def test_the_loss_is_that_of_all_examples_seen() -> None:
    _, outcome = train(line(), steps=1, full_batch=True)
    assert outcome.metrics["loss"] == pytest.approx((10 * 9 * 28.5, 10))  # mean of x^2 for 0..9 is 28.5


def test_a_schedule_begins_anew_each_round_and_moves_with_each_step() -> None:
    class Decaying(Line):
        def scheduler(self, optimizer: torch.optim.Optimizer) -> LRScheduler:
            return ExponentialLR(optimizer, 0.5)

    weight, _ = train(line(Decaying), steps=2, full_batch=True)
    first = 0.001 * 2 * 28.5 * 3
    assert weight == pytest.approx(first + 0.0005 * 2 * 28.5 * (3 - first))


def test_fedprox_pulls_back_to_the_base() -> None:
    free, _ = train(line(), steps=20, full_batch=True)
    held, _ = train(line(), steps=20, full_batch=True, rule=FedProx(FedProx.Options(mu=100.0)))
    assert 0 < held < free


def test_a_loss_that_is_not_finite_is_refused() -> None:
    with pytest.raises(BadUpdate, match="'loss' is nan"):
        train(line(), start=float("nan"), epochs=1)
    with pytest.raises(BadUpdate, match="'loss' is inf"):
        train(line(), start=1e38, epochs=1)


def test_evaluation_adds_up_over_batches_and_sites() -> None:
    app, data = line(), line().data("test")
    model = app.model()
    nn.init.constant_(next(model.parameters()), 2.0)
    by_one = evaluate(app, model, data, device=CPU, batch_size=1)
    at_once = evaluate(app, model, data, device=CPU)
    assert at_once["loss"] == pytest.approx((285.0, 10))  # sum of x^2
    assert by_one["loss"] == at_once["loss"]
    assert at_once["sum"] == (135.0, 1)
    assert by_one["sum"] == (135.0, 10)
    assert evaluate(app, model, None, device=CPU) == {}
