"""A small app whose data is made up, for simulations of many short runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from pydantic import BaseModel
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import atoll

NUM_CLASSES = 3


class Points(atoll.App):
    """Points around three centres; `source` may say how many there are, and what goes wrong."""

    class Config(BaseModel):
        lr: float = 0.1
        dropout: float = 0.2

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(self.config.dropout), nn.Linear(8, NUM_CLASSES)
        )

    def data(self, split: str) -> Dataset[Any] | None:
        number = self.source.get(f"num_{split}", 120 if split == "train" else 30)
        if number is None:
            return None
        draw = torch.Generator().manual_seed(1 if split == "train" else 2)
        labels = torch.arange(number) % NUM_CLASSES
        points = torch.randn(number, 4, generator=draw) + 2.0 * nn.functional.one_hot(labels, 4)
        return TensorDataset(points, labels)

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        if self.source.get("fault") == "raise" and torch.is_grad_enabled():
            raise RuntimeError("this batch cannot be learnt")
        return nn.functional.cross_entropy(output, batch[1])

    def optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=self.config.lr)

    def metrics(self, output: Tensor, batch: Any) -> dict[str, tuple[Tensor, float]]:
        correct = output.argmax(dim=1) == batch[1]
        return {"accuracy": (correct.sum(), len(correct))}


class Remembering(Points):
    """The same with an optimizer whose state goes from round to round."""

    keeps_optimizer: ClassVar[bool] = True

    def optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adam(params, lr=0.01)


# Strategies by what a site keeps from round to round: parts of the job's table, and other arguments of `simulate`.
KEEPING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fedavg": ({}, {}),
    "scaffold": ({"kind": "scaffold"}, {}),
    "error-feedback": ({"codec": {"kind": "top_k", "fraction": 0.1}}, {}),
    "difference": ({"kind": "ef21"}, {}),
    "own-optimizer": ({}, {"app": Remembering}),
    "personal": ({"personal": {"kind": "ditto", "lam": 0.1}}, {}),
    "local": ({"local": ["3.*"]}, {}),
}


def points_job(*, rounds: int = 2, min_sites: int = 6, **strategy: Any) -> dict[str, Any]:
    """The table of a job of it; `strategy` replaces keys of that table."""
    return {
        "job": {"name": "points", "app": "points", "rounds": rounds, "seed": 5},
        "strategy": {
            "schedule": {"kind": "rounds", "min": min_sites},
            "work": {"epochs": 1, "batch_size": 8},
            **strategy,
        },
        "training": {"threads": 1, "device": "cpu"},
    }
