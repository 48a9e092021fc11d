"""Handwritten digits, 8 x 8 pixels each: a network of two layers that trains in seconds."""

from collections.abc import Iterable

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import BaseModel
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import atoll


class Digits(atoll.App):
    class Config(BaseModel):  # the table [app] of the job
        lr: float = 0.2
        hidden: int = 256
        dropout: float = 0.5

    def model(self) -> nn.Module:
        hidden, dropout = self.config.hidden, self.config.dropout
        return nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Dropout(dropout), nn.Linear(hidden, 10))

    def data(self, split: str) -> TensorDataset:
        arrays = np.load(self.source["path"])  # the table [data.digits] of the site
        return TensorDataset(torch.from_numpy(arrays[f"x_{split}"]), torch.from_numpy(arrays[f"y_{split}"]))

    def loss(self, output: Tensor, batch: list[Tensor]) -> Tensor:
        return F.cross_entropy(output, batch[1])

    def optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=self.config.lr)

    def metrics(self, output: Tensor, batch: list[Tensor]) -> dict[str, tuple[Tensor, float]]:
        correct = output.argmax(dim=1) == batch[1]
        return {"accuracy": (correct.sum(), len(correct))}
