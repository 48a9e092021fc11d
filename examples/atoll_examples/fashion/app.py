"""Clothes in ten classes, 28 x 28 pixels each: a small convolutional network."""

from collections.abc import Iterable

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import BaseModel
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import atoll


class Fashion(atoll.App):
    class Config(BaseModel):
        lr: float = 0.05

    def model(self) -> nn.Module:
        features = nn.Sequential(nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
                                 nn.Conv2d(16, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2))  # fmt: skip
        return nn.Sequential(features, nn.Flatten(), nn.Linear(32 * 7 * 7, 128), nn.ReLU(), nn.Linear(128, 10))

    def data(self, split: str) -> TensorDataset:
        arrays = np.load(self.source["path"])
        return TensorDataset(torch.from_numpy(arrays[f"x_{split}"]), torch.from_numpy(arrays[f"y_{split}"]))

    def inputs(self, batch: list[Tensor]) -> tuple[Tensor]:
        return (batch[0].float().unsqueeze(1) / 255,)  # bytes in the file and in memory, a fourth of the floats

    def loss(self, output: Tensor, batch: list[Tensor]) -> Tensor:
        return F.cross_entropy(output, batch[1])

    def optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=self.config.lr)

    def metrics(self, output: Tensor, batch: list[Tensor]) -> dict[str, tuple[Tensor, float]]:
        correct = output.argmax(dim=1) == batch[1]
        return {"accuracy": (correct.sum(), len(correct))}
