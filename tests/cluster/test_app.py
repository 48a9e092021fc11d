from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from atoll.cluster.app import App, build_app, build_model
from atoll.wire.errors import AppFailed, ConfigError


class Small(App):
    class Config(BaseModel):
        learning_rate: float = 0.1
        hidden: int = 3

    def model(self) -> nn.Module:
        return nn.Linear(2, self.config.hidden)

    def data(self, split: str) -> TensorDataset:
        return TensorDataset(torch.zeros(4, 2))

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return output.mean()

    def optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=self.config.learning_rate)


class Open(Small):
    class Config(Small.Config):
        model_config = ConfigDict(extra="allow")


class NoModule(Small):
    def model(self) -> Any:
        return 7


def test_takes_the_jobs_values_and_the_sites_source() -> None:
    app = build_app(Small, {"hidden": 5}, {"path": "/data"})
    assert (app.config.hidden, app.config.learning_rate, app.source["path"]) == (5, 0.1, "/data")
    assert isinstance(app.config, Small.Config)


@pytest.mark.parametrize(
    ("values", "message"),
    [({"learningrate": 1}, r"job: unknown key 'app.learningrate'; did you mean 'learning_rate'\?"),
     ({"hidden": "many"}, r"job: app.hidden = 'many': wanted a whole number"), ({"hidden": 1.5}, r"job: app.hidden = 1.5: wanted")],
)  # fmt: skip
def test_refuses_values_that_the_app_does_not_take(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_app(Small, values, {})


def test_an_app_may_take_any_key() -> None:
    assert build_app(Open, {"anything": 1}, {}).config.anything == 1


def test_the_first_model_follows_the_jobs_seed() -> None:
    app = build_app(Small, {}, {})
    weights = [next(build_model(app, seed).parameters()) for seed in (1, 1, 2)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_a_model_must_be_a_module() -> None:
    with pytest.raises(AppFailed, match=r"NoModule\.model\(\) returned int"):
        build_model(NoModule({}, {}), 0)


def test_an_app_says_what_it_lacks() -> None:
    class Half(App):
        def model(self) -> nn.Module:
            return nn.Linear(1, 1)

    with pytest.raises(TypeError, match="data"):
        build_app(Half, {}, {})  # type: ignore[type-abstract]


@pytest.mark.parametrize(
    "batch", [[torch.zeros(3, 2), torch.zeros(3)], {"x": torch.zeros(3, 2)}, torch.zeros(3), ("name", torch.zeros(3))]
)
def test_counts_examples_of_batches_of_any_form(batch: Any) -> None:
    assert build_app(Small, {}, {}).examples(batch) == 3


def test_atoll_app_loads_only_when_it_is_used() -> None:
    code = "import sys, atoll; before = 'torch' in sys.modules; atoll.App; print(before, 'torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False", "True"]
