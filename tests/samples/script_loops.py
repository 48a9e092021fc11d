"""Training loops as people write them, each with and without `atoll.join`, on data that follow from the step's number."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import atoll
from atoll.cluster.script.joined import Joined
from atoll.cluster.script.messages import SOCKET_VARIABLE
from atoll.wire.model_file import open_model
from atoll.wire.tensors import load_state

BATCH = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """What a script does."""

    wrap: str = "none"  # "ddp", "fsdp2", "compile"
    optimizer: str = "sgd"  # "adamw", "lbfgs", "closure" (sgd with one), "two", "fused"
    schedules: bool = False  # a learning rate that falls with every step
    accumulate: int = 1
    clip: float | None = None
    scales: bool = False  # by GradScaler
    overflow: tuple[int, int] | None = None  # rank and step whose loss is infinite
    alike: bool = False  # every process sees whole batches, and averages nothing
    by_callable: bool = False  # examples
    max_steps: int | Sequence[int] = 1000  # of the loop, or of each rank's


def build(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def batch(step: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(BATCH, 4, generator=random)
    return x, (x[:, :3] + torch.randn(BATCH, 3, generator=random)).argmax(1)


def optimizers_of(loop: Loop, model: nn.Module) -> list[torch.optim.Optimizer]:
    parameters = list(model.parameters())
    match loop.optimizer:
        case "adamw":
            return [torch.optim.AdamW(parameters, lr=0.05)]
        case "lbfgs":
            return [torch.optim.LBFGS(parameters, lr=0.05, max_iter=2)]
        case "two":
            return [torch.optim.SGD(parameters[:2], lr=0.3), torch.optim.AdamW(parameters[2:], lr=0.05)]
        case "fused":
            return [torch.optim.SGD(parameters, lr=0.3, fused=True)]
        case _:
            return [torch.optim.SGD(parameters, lr=0.3, momentum=0.9)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What became of a loop."""

    steps: int  # that it began
    ended: str  # why the run did, or ""
    scale: float
    lr: float
    weights: list[Tensor]


def joined(loop: Loop, socket: Path | None, script: Path) -> Ran:
    """The loop as a script, in one process of a world."""
    vars(sys.modules["__main__"])["__file__"] = str(script)
    if socket is None:
        os.environ.pop(SOCKET_VARIABLE, None)
    else:
        os.environ[SOCKET_VARIABLE] = str(socket)
    torch.set_num_threads(1)
    model: Any = build(99)  # or what a wrapper makes of it
    match loop.wrap:
        case "ddp":
            model = nn.parallel.DistributedDataParallel(model)
        case "fsdp2":
            model = fully_shard(model)
        case "compile":
            model = torch.compile(model, backend="eager")
    optimizers = optimizers_of(loop, model)
    count = BATCH // (1 if loop.alike else dist.get_world_size())
    examples: Any = (lambda: count * loop.accumulate) if loop.by_callable else count * loop.accumulate
    parts: list[Joined] = []
    run = _Run(loop, model, optimizers, rank=dist.get_rank(), world_size=dist.get_world_size())
    try:
        parts.append(atoll.join(model, optimizers, examples=examples, clip=loop.clip))
        run.to_the_end()
        ended = ""
    except atoll.RunEnded as end:
        ended = end.reason
    for part in parts:
        part.leave()
    return run.ran(ended)


def by_hand(loop: Loop, bases: Sequence[Path], num_steps: int) -> list[dict[str, Tensor]]:
    """What the same loop comes to after each `num_steps`, begun from each of the bases in turn: without Atoll, alone."""
    torch.set_num_threads(1)
    model = build(99)
    if loop.overflow is not None:
        loop = replace(loop, overflow=(0, loop.overflow[1]))
    run = _Run(loop, model, optimizers_of(loop, model), rank=0, world_size=1, clip=loop.clip)
    found: list[dict[str, Tensor]] = []
    for path in bases:
        with open_model(path) as base:
            load_state(base.manifest, base.map, model)
        while run.made < num_steps * (len(found) + 1):
            run.step()
        found.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
    return found


class _Run:
    """The loop itself."""

    def __init__(
        self,
        loop: Loop,
        model: nn.Module,
        optimizers: list[torch.optim.Optimizer],
        *,
        rank: int,
        world_size: int,
        clip: float | None = None,
    ) -> None:
        self.loop, self.model, self.optimizers = loop, model, optimizers
        self.rank, self.world_size, self.clip = rank, world_size, clip
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000, enabled=loop.scales)
        self.schedules = [torch.optim.lr_scheduler.ExponentialLR(one, 0.9) for one in optimizers if loop.schedules]
        self.begun = self.made = 0

    def to_the_end(self) -> None:
        most = self.loop.max_steps if isinstance(self.loop.max_steps, int) else self.loop.max_steps[self.rank]
        while self.begun < most:
            self.step()

    def step(self) -> None:
        number, self.begun = self.begun, self.begun + 1
        if self.loop.optimizer in ("lbfgs", "closure"):
            self.optimizers[0].step(lambda: float(self.gradients(number)))
        else:
            self.gradients(number)
            scale = self.scaler.get_scale()
            for optimizer in self.optimizers:
                if self.clip is not None:
                    self.scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], self.clip)
                self.scaler.step(optimizer)
            self.scaler.update()
            if self.scaler.get_scale() < scale:
                return  # skipped
        for schedule in self.schedules:
            schedule.step()
        self.made += 1

    def gradients(self, number: int) -> Tensor:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        total = torch.zeros(())
        for part in range(self.loop.accumulate):
            x, y = batch(number * self.loop.accumulate + part)
            if not self.loop.alike:
                share = slice(self.rank * BATCH // self.world_size, (self.rank + 1) * BATCH // self.world_size)
                x, y = x[share], y[share]
            loss = F.cross_entropy(self.model(x), y) / self.loop.accumulate
            if self.loop.overflow == (self.rank, number):
                loss = loss * float("inf")
            self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]  # of torch
            total = total + loss.detach()
        if self.clip is not None and self.loop.optimizer in ("lbfgs", "closure"):
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        return total

    def ran(self, ended: str) -> Ran:
        weights: list[Any] = [p.detach() for p in self.model.parameters()]
        whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in weights]
        return Ran(
            steps=self.begun,
            ended=ended,
            scale=self.scaler.get_scale(),
            lr=self.optimizers[0].param_groups[0]["lr"],
            weights=[p.clone() for p in whole],
        )
