"""The probe app's training as a script. It stands here, and not beside its tests, since other processes import it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from samples.script_run import STEPS
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

import atoll
from atoll.cluster.batches import Work, batches
from atoll.cluster.script.messages import SOCKET_VARIABLE
from atoll.cluster.seeds import training_seed

BATCH, LR, MOMENTUM = 8, 0.05, 0.9


def build(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.0), nn.Linear(8, 3))


class Unchanged(atoll.App):
    """What `batches` asks of an app, which is the loader."""

    def model(self) -> nn.Module:
        raise NotImplementedError

    def data(self, split: str) -> None:
        raise NotImplementedError

    def loss(self, output: Any, batch: Any) -> Tensor:
        raise NotImplementedError

    def optimizer(self, params: Any) -> Any:
        raise NotImplementedError


def script(wrap: str, socket: Path, path: Path, x: Tensor, y: Tensor) -> None:
    """The probe's training as a loop of its own, in one process of a world."""
    vars(sys.modules["__main__"])["__file__"] = str(path)
    os.environ[SOCKET_VARIABLE] = str(socket)
    torch.set_num_threads(1)
    rank, size = dist.get_rank(), dist.get_world_size()
    model: Any = build(99)
    model = nn.parallel.DistributedDataParallel(model) if wrap == "ddp" else model
    model = fully_shard(model) if wrap == "fsdp2" else model
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    work = Work(num_epochs=None, num_steps=STEPS, batch_size=BATCH, shuffle=True, max_weight=1000)
    try:
        joined = atoll.join(model, optimizer, examples=BATCH // size)
        while True:
            seed = training_seed(5, "north", joined.round)
            for whole_x, whole_y in batches(Unchanged(None, {}), TensorDataset(x, y), work, seed):
                share = slice(rank * BATCH // size, (rank + 1) * BATCH // size)
                optimizer.zero_grad()
                F.cross_entropy(model(whole_x[share]), whole_y[share]).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
    except atoll.RunEnded:
        pass
