"""Apps of the integration tests: a small classifier on real data that can be told to misbehave at one site.

`source["path"]` is the site's npz file; `source["fault"]` may name a file whose text says what goes wrong there:
raise, nan, huge, die, slow SECONDS; raise-at STEP (counted over all rounds); await PATH, until the file is there;
pace FOLDER, each step until a file with its number (counted over all rounds) is there;
meet FOLDER NUMBER, until so many workers train at once; build CHANGE, or turn CHANGE while training, to a model whose
last bias has another name, shape or dtype. Without the file the app behaves. `source["opened"]` may name a file in
which each call of `data` is a line, with the split and the worker's process id.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset, TensorDataset

import atoll

PATIENCE_S = 120.0  # for what a fault waits for


class Trial(atoll.App):
    class Config(BaseModel):
        lr: float = 0.1
        hidden: int = 16
        dtype: str = "float32"
        batch_norm: bool = False

    num_steps = 0  # batches that this worker has trained on

    def model(self) -> nn.Module:
        layers: list[nn.Module] = [nn.Linear(30, self.config.hidden)]
        if self.config.batch_norm:
            layers.append(nn.BatchNorm1d(self.config.hidden))
        self.last = nn.Linear(self.config.hidden, 2)
        model = nn.Sequential(*layers, nn.Tanh(), self.last).to(getattr(torch, self.config.dtype))
        match self._fault():
            case ["build", change]:
                alter_bias(self.last, change)
        return model

    def data(self, split: str) -> Dataset[Any]:
        if path := self.source.get("opened"):
            with Path(path).open("a") as file:
                file.write(f"{split} {os.getpid()}\n")
        with np.load(self.source["path"]) as file:
            x, y = torch.from_numpy(file[f"x_{split}"]), torch.from_numpy(file[f"y_{split}"])
        return TensorDataset(x.to(getattr(torch, self.config.dtype)), y)

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        loss = nn.functional.cross_entropy(output, batch[1])
        self.num_steps += torch.is_grad_enabled()
        match self._fault():
            case ["raise"]:
                raise RuntimeError("this batch cannot be learnt")
            case ["nan"]:
                return loss * float("nan")
            case ["huge"]:
                return loss * 1e7  # finite, and a step far beyond the bound of 1024
            case ["die"]:
                os.kill(os.getpid(), signal.SIGKILL)
            case ["slow", seconds]:
                time.sleep(float(seconds))
            case ["raise-at", step] if self.num_steps == int(step):
                raise RuntimeError("this batch cannot be learnt")
            case ["await", path]:
                wait_for(Path(path).exists, path)
            case ["pace", folder]:
                wait_for((Path(folder) / str(self.num_steps)).exists, f"{self.num_steps} in {folder}")
            case ["meet", folder, number]:
                (Path(folder) / str(os.getpid())).touch()
                wait_for(lambda: len(list(Path(folder).iterdir())) >= int(number), f"{number} workers in {folder}")
            case ["turn", change]:
                alter_bias(self.last, change)
        return loss

    def optimizer(self, params: Iterable[nn.Parameter]) -> Optimizer:
        return torch.optim.SGD(params, lr=self.config.lr)

    def metrics(self, output: Tensor, batch: Any) -> dict[str, tuple[float, float]]:
        return {"accuracy": (float((output.argmax(1) == batch[1]).sum()), float(len(output)))}

    def features(self, batch: Any) -> dict[str, Tensor]:
        """Three measurements, one of which every fifth example lacks, and the label."""
        match self._fault():
            case ["await", path]:
                wait_for(Path(path).exists, path)
        x, y = batch
        some = torch.where(torch.arange(len(y)) % 5 == 0, torch.nan, x[:, 1])
        return {"radius": x[:, 0], "texture": some, "area": x[:, 3], "malignant": y}

    def _fault(self) -> list[str]:
        path = Path(self.source.get("fault", "/nonexistent"))
        return path.read_text().split() if torch.is_grad_enabled() and path.exists() else []


def alter_bias(layer: nn.Linear, change: str) -> None:
    """Give the layer's bias another name, shape or dtype."""
    bias = layer.bias
    if change == "name":
        layer.bias = None  # type: ignore[assignment]  # torch takes it
        layer.offset = bias
    else:
        layer.bias = nn.Parameter(torch.zeros(3) if change == "shape" else bias.detach().double())


def wait_for(what: Callable[[], bool], name: str) -> None:
    """Returns as soon as `what` holds."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not what():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"never came: {name}")
        time.sleep(0.005)


class OneTensorMore(Trial):
    """The same app to look at, another schema: what a site with a changed model would send."""

    def model(self) -> nn.Module:
        return nn.Sequential(super().model(), nn.Linear(2, 2))


class Notes(atoll.OpaqueApp):
    """A model of notes: each says how many there were before it, and is as long as the job wants."""

    class Config(BaseModel):
        size: int = 100

    def train(self, payloads: Sequence[bytes], seed: int) -> bytes:
        path = Path(self.source["fault"])
        if path.exists():
            match path.read_text().split():
                case ["await", awaited]:
                    wait_for(Path(awaited).exists, awaited)
                case ["long", size]:
                    return bytes(int(size))
                case ["text"]:
                    return "no bytes"  # type: ignore[return-value]  # that is the fault
        return f"{len(payloads)} {seed} ".encode().ljust(self.config.size, b".")

    def evaluate(self, payloads: Sequence[bytes]) -> dict[str, tuple[float, float]]:
        return {"notes": (float(len(payloads)), 1.0)}
