"""Which processes are on the agent's node, the first one, and how the others get at its files: tensor by tensor.

No process holds a whole copy of a model for that. On the way in, the first process reads each tensor and all processes of
other nodes take their slices of it; on the way out, a stage that has no process on the first node hands each tensor, once
put together, to one that is there. All go through the same names in the same order.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from atoll.cluster.parallel.streams import load_slice, own_tensors
from atoll.cluster.parallel.votes import agree
from atoll.wire.errors import AtollError, BadManifest
from atoll.wire.manifest import TensorSpec
from atoll.wire.tensors import DTYPES

PIECE_BYTES = 8 * 1024**2  # in which a tensor goes to the other nodes: as much as a connection takes at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """Where this process is among all. Every process makes one, at the same moment."""

    rank: int
    num_beside: int  # processes on the agent's node: ranks 0 to num_beside - 1
    world_size: int
    inward: dist.ProcessGroup | None  # the first process and those of other nodes; None where this is none of them

    @classmethod
    def here(cls) -> Nodes:
        """That of this process, in the world that it belongs to."""
        if not dist.is_initialized():
            return cls(rank=0, num_beside=1, world_size=1, inward=None)
        rank, world_size = dist.get_rank(), dist.get_world_size()
        num_beside = min(world_size, int(os.environ.get("LOCAL_WORLD_SIZE", world_size)))  # as torch's launcher says
        inward = None
        if num_beside < world_size:
            made = dist.new_group([0, *range(num_beside, world_size)], backend="gloo")
            inward = made if isinstance(made, dist.ProcessGroup) else None  # a number, where this one is not in it
        return cls(rank=rank, num_beside=num_beside, world_size=world_size, inward=inward)

    @property
    def is_beside(self) -> bool:
        """Whether this process sees the agent's files."""
        return self.rank < self.num_beside

    def read(self, read: Callable[[], bytes]) -> bytes:
        """What `read` gives on the agent's node, on all processes.

        Raises:
            AtollError: what it raises in some process, on all alike.
        """
        found, error = b"", None
        if self.is_beside:
            try:
                found = read()
            except AtollError as raised:
                error = raised
        agree(error)
        if self.inward is None:
            return found
        told: list[Any] = [found]
        if self.rank == 0 or not self.is_beside:
            dist.broadcast_object_list(told, src=0, group=self.inward)
        return bytes(told[0])

    def load(
        self, model: nn.Module, specs: Iterable[TensorSpec], sources: Mapping[str, Tensor], frozen: Collection[str]
    ) -> None:
        """This process's part of each tensor, where there are several nodes; `sources` is empty on others than the first.

        Raises:
            BadManifest: as `load_slices`.
        """
        own = {name: tensor for name, tensor in own_tensors(model).items() if name not in frozen}
        with torch.no_grad():
            for spec in specs:
                if spec.name in frozen:
                    continue
                source = self._passed_on(spec, sources.get(spec.name))
                if (target := own.pop(spec.name, None)) is not None:
                    load_slice(spec.name, target, source)
        if own:
            raise BadManifest(f'tensor "{min(own)}" of the model is not in the version', field=min(own))

    def _passed_on(self, spec: TensorSpec, source: Tensor | None) -> Tensor | None:
        """The tensor, on its way through the processes that do not see the file."""
        if self.rank != 0 and self.is_beside:
            return source
        whole = torch.empty(spec.shape, dtype=DTYPES[spec.dtype]) if source is None else source
        for piece in torch.split(whole.reshape(-1).view(torch.uint8), PIECE_BYTES):
            dist.broadcast(piece, src=0, group=self.inward)
        return whole

    def holders(self, model: nn.Module) -> Mapping[str, tuple[int, ...]]:
        """Of each tensor, the ranks of the stage that holds it, in order."""
        names = sorted(own_tensors(model))
        told: list[Any] = [names]
        if dist.is_initialized():
            told = [None] * self.world_size
            dist.all_gather_object(told, names)
        found: dict[str, list[int]] = {}
        for rank, held in enumerate(told):
            for name in held:
                found.setdefault(name, []).append(rank)
        return {name: tuple(ranks) for name, ranks in found.items()}

    def to_write(
        self, model: nn.Module, specs: Iterable[TensorSpec], holders: Mapping[str, tuple[int, ...]]
    ) -> Iterator[tuple[str, Tensor]]:
        """The tensors that this process writes, whole, in turn: every tensor is one process's, beside the agent.

        All processes go through it, and to the end: one that stops leaves the others waiting.
        """
        own = own_tensors(model)
        for number, spec in enumerate(specs):
            whole = own.get(spec.name)
            if isinstance(whole, DTensor):
                whole = whole.full_tensor()
            ranks = holders[spec.name]
            beside = [rank for rank in ranks if rank < self.num_beside]
            if beside:
                if beside[number % len(beside)] == self.rank and whole is not None:
                    yield spec.name, whole
                continue
            giver, taker = ranks[number % len(ranks)], number % self.num_beside
            if self.rank == giver and whole is not None:
                dist.send(whole.cpu().contiguous().reshape(-1).view(torch.uint8), taker)
            elif self.rank == taker:
                taken = torch.empty(spec.shape, dtype=DTYPES[spec.dtype])
                dist.recv(taken.reshape(-1).view(torch.uint8), giver)
                yield spec.name, taken
