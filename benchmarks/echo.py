"""The app of the benchmarks: loads, changes and differences every tensor in torch, and computes next to nothing."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import atoll

PART_BYTES = 4 << 20  # of one tensor: about what the layers of a mid-sized network have


class Nudge(torch.optim.Optimizer):
    """Adds a constant to every value."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(2.0**-10)


class Parts(nn.Module):
    """`num_bytes` of float32 parameters, in tensors of PART_BYTES."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        sizes = [PART_BYTES // 4] * (num_bytes // PART_BYTES) + [num_bytes % PART_BYTES // 4]
        self.parts = nn.ParameterList([torch.zeros(size) for size in sizes if size])

    def forward(self, x: Tensor) -> Tensor:
        return x * self.parts[-1][0]


class Echo(atoll.App):
    class Config(BaseModel):
        megabytes: float = 4.0

    def model(self) -> nn.Module:
        return Parts(int(self.config.megabytes * 1e6))

    def data(self, split: str) -> TensorDataset:
        return TensorDataset(torch.ones(1, 1), torch.zeros(1))

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return output.mean()

    def optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return Nudge(params)


def install(folder: Path) -> Path:
    """Makes this module an installed distribution below `folder`, which goes on PYTHONPATH."""
    info = folder / "atoll_echo-1.dist-info"
    info.mkdir(parents=True)
    (folder / "atoll_echo.py").write_text(Path(__file__).read_text())
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: atoll-echo\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[atoll.apps]\necho = atoll_echo:Echo\n")
    (info / "RECORD").write_text("atoll_echo.py,,\natoll_echo-1.dist-info/RECORD,,\n")
    return folder
