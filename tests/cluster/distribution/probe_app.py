"""The app that the tests of cluster/ train: small, float64 by default, with every trait that a test needs as a value."""

import os
import signal
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import BaseModel
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import atoll


class Probe(atoll.App):
    class Config(BaseModel):
        lr: float = 0.1
        momentum: float = 0.0
        dropout: float = 0.0
        batch_norm: bool = False
        dtype: str = "float64"
        fault: str = ""
        frozen: str = ""  # beginning of the names of parameters that are not trained

    def model(self) -> nn.Module:
        layers = [nn.Linear(4, 8), nn.Tanh(), nn.Dropout(self.config.dropout), nn.Linear(8, 3)]
        if self.config.batch_norm:
            layers.insert(0, nn.BatchNorm1d(4))
        model = nn.Sequential(*layers).to(getattr(torch, self.config.dtype))
        for name, parameter in model.named_parameters():
            if self.config.frozen and name.startswith(self.config.frozen):
                parameter.requires_grad_(False)
                parameter.data += self.source.get("shift", 0.0)  # a site with other weights
        return model

    def data(self, split: str) -> TensorDataset | None:
        arrays = np.load(self.source["path"])
        if f"x_{split}" not in arrays:
            return None
        inputs = torch.from_numpy(arrays[f"x_{split}"]).to(getattr(torch, self.config.dtype))
        return TensorDataset(inputs, torch.from_numpy(arrays[f"y_{split}"]))

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        match self.config.fault:
            case "raise":
                raise RuntimeError("the scanner of room 7 is broken")
            case "exit":
                raise SystemExit(3)
            case "crash":
                os.kill(os.getpid(), signal.SIGKILL)
            case "one_rank" if os.environ.get("RANK") == "1":
                raise RuntimeError("the scanner of rank 1 is broken")
            case "nan":
                return F.cross_entropy(output, batch[1]) * float("nan")
            case "explode":
                return F.cross_entropy(output, batch[1]) * 1e9
        return F.cross_entropy(output, batch[1])

    def optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=self.config.lr, momentum=self.config.momentum)

    def metrics(self, output: Tensor, batch: Any) -> dict[str, tuple[Tensor, float]]:
        return {"accuracy": ((output.argmax(1) == batch[1]).sum(), len(output))}


class Keeping(Probe):
    keeps_optimizer = True


not_an_app = 7
