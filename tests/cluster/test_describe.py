"""What leaves a site of its data: nothing about fewer examples than it allows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import atoll
from atoll.cluster.describe import describe
from atoll.wire.errors import AppFailed
from atoll.wire.statistics_section import StatisticsSection


class Ward(atoll.App):
    """Ages, and a second feature as the test wants it."""

    gives: Mapping[str, Any] | None = None

    def model(self) -> nn.Module:
        raise AssertionError("statistics need no model")

    def data(self, split: str) -> TensorDataset:
        raise AssertionError("the test gives the data")

    def loss(self, output: Any, batch: Any) -> Tensor:
        raise AssertionError("nothing is trained")

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        raise AssertionError("nothing is trained")

    def features(self, batch: Any) -> Mapping[str, Tensor]:
        return {"age": batch[0], "pressure": batch[1]} if self.gives is None else self.gives


AGES = np.random.default_rng(0).normal(50, 20, size=10_000)  # three batches
SECTION = StatisticsSection.model_validate({"histograms": {"age": {"edges": [0, 18, 18.001, 40, 65, 120]}}})


def ward(pressure: Tensor | None = None) -> tuple[Ward, TensorDataset]:
    ages = torch.from_numpy(AGES)
    return Ward(None, {}), TensorDataset(ages, ages.float() if pressure is None else pressure)


def test_the_sums_of_all_batches_and_cells_that_are_large_enough() -> None:
    app, dataset = ward()
    found = describe(app, dataset, SECTION, least=10)["age"]
    assert found.count == 10_000
    assert found.total == pytest.approx(AGES.sum(), rel=1e-15)
    assert found.squares == pytest.approx(AGES.var() * 10_000, rel=1e-12)
    bins = np.bincount(np.searchsorted([0, 18, 18.001, 40, 65, 120], AGES, side="right"), minlength=7)
    assert bins[2] < 10  # the narrow one, and those above 120, are counted with their neighbours
    assert bins[6] < 10
    assert found.cells == [
        (0, 1, bins[0]),
        (1, 2, bins[1]),
        (2, 4, bins[2] + bins[3]),
        (4, 5, bins[4]),
        (5, 7, bins[5:].sum()),
    ]


@pytest.mark.parametrize(
    ("missing", "told"), [(0, True), (1, False), (9, False), (10, True), (9990, True), (9991, False)]
)
def test_a_feature_that_few_have_or_few_lack_is_withheld(missing: int, told: bool) -> None:
    pressure = torch.ones(10_000)
    pressure[:missing] = torch.nan
    app, dataset = ward(pressure)
    found = describe(app, dataset, StatisticsSection(), least=10)
    assert ("pressure" in found) == told
    assert not told or found["pressure"].count == 10_000 - missing
    assert "age" in found


def test_a_site_smaller_than_the_minimum_tells_nothing() -> None:
    app, dataset = ward()
    assert describe(app, dataset, SECTION, least=10_001) == {}


@pytest.mark.parametrize(
    ("gives", "words"),
    [
        ({}, r"does not name age; it names nothing"),
        ({"size": torch.ones(3)}, r"does not name age; it names size"),
        ({"age": torch.ones(3, 2)}, r"gives 'age' with shape \[3, 2\], wanted one number an example"),
        ({"age": torch.tensor([1.0, torch.inf])}, r"gives infinite values of 'age'; leave them out as NaN"),
        ({"age": torch.ones(3), "size": torch.ones(2)}, r"columns of unlike lengths; put NaN"),
    ],
)
def test_what_is_no_column_of_numbers_is_said(gives: Mapping[str, Tensor], words: str) -> None:
    app, dataset = ward()
    app.gives = gives
    with pytest.raises(AppFailed, match=words) as failed:
        describe(app, dataset, SECTION, least=1)
    assert failed.value.field == "features"
