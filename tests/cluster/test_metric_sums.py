from __future__ import annotations

import pytest
import torch

from atoll.cluster.metric_sums import FLUSH_BATCHES, MetricSums
from atoll.wire.errors import BadUpdate


def test_adds_sums_and_means_of_any_number_of_batches() -> None:
    sums = MetricSums()
    for number in range(3 * FLUSH_BATCHES + 1):
        sums.add("correct", torch.tensor(number), 4)
        sums.add_mean("loss", torch.tensor(0.5, requires_grad=True), 4)
        sums.add("plain", 1.5, 1)
    count = 3 * FLUSH_BATCHES + 1
    assert sums.result() == {
        "correct": (count * (count - 1) / 2, 4 * count),
        "loss": (2 * count, 4 * count),
        "plain": (1.5 * count, count),
    }


def test_nothing_is_nothing() -> None:
    assert MetricSums().result() == {}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_names_a_metric_that_is_not_finite(value: float) -> None:
    sums = MetricSums()
    sums.add("good", 1.0, 1)
    sums.add("bad", torch.tensor(value), 1)
    with pytest.raises(BadUpdate, match=r"'bad' is .*; lower the learning rate or look at the data$") as refused:
        sums.result()
    assert refused.value.field == "bad"
    sums = MetricSums()
    sums.add("good", 1.0, value)
    with pytest.raises(BadUpdate, match="'good'"):
        sums.result()


def test_a_loss_that_breaks_is_seen_long_before_the_end() -> None:
    sums = MetricSums()
    for _ in range(FLUSH_BATCHES - 1):
        sums.add_mean("loss", torch.tensor(float("nan")), 1)
    with pytest.raises(BadUpdate):
        sums.add_mean("loss", torch.tensor(0.5), 1)
