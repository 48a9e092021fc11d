"""Malignant or benign, from 30 measurements of a tumour's cells (Wisconsin diagnostic data).

No hospital knows the others' scales: a BatchNorm layer learns them, and its statistics are averaged with the model.
"""

from collections.abc import Iterable

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import BaseModel
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import atoll


class BreastCancer(atoll.App):
    class Config(BaseModel):
        lr: float = 0.05

    def model(self) -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(30), nn.Linear(30, 16), nn.ReLU(), nn.Linear(16, 1), nn.Flatten(0))

    def data(self, split: str) -> TensorDataset:
        arrays = np.load(self.source["path"])
        return TensorDataset(torch.from_numpy(arrays[f"x_{split}"]), torch.from_numpy(arrays[f"y_{split}"]))

    def loss(self, output: Tensor, batch: list[Tensor]) -> Tensor:
        return F.binary_cross_entropy_with_logits(output, batch[1].float())

    def optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=self.config.lr)

    def metrics(self, output: Tensor, batch: list[Tensor]) -> dict[str, tuple[Tensor, float]]:
        correct = (output > 0) == batch[1].bool()
        return {"accuracy": (correct.sum(), len(correct))}
