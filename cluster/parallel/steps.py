"""The local step of every layout: a share of the batch, its loss scaled so that all shares make the whole's mean.

Let a batch weigh W (`App.examples`), and a share w of it. torch averages gradients over the N processes among which
batches are divided, so a share's mean loss counts N w / W: then the average is the gradient of the mean over the batch,
also where shares differ in length. A share without examples counts 0, and computes one all the same: others wait for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from atoll.cluster.app import App
from atoll.cluster.local_step import Share
from atoll.cluster.metric_sums import Sums
from atoll.cluster.parallel.clipping import clip_gradients
from atoll.cluster.parallel.dims import ParallelDims
from atoll.cluster.parallel.shares import bounds, num_examples, part
from atoll.cluster.seeds import share_seed


@dataclass(frozen=True, slots=True)
class Piece:
    """What is computed at once."""

    batch: Any
    weight: int  # 0: computed for the others' sake


def pieces(app: App, batch: Any, num_pieces: int) -> Callable[[int], Piece]:
    """Piece number i of a batch, of `num_pieces` as equal as its number of examples allows."""
    count = num_examples(batch)

    def piece(index: int) -> Piece:
        start, stop = bounds(count, num_pieces, index)
        if start == stop:
            return Piece(part(batch, 0, 1), 0)
        own = part(batch, start, stop)
        return Piece(own, app.examples(own))

    return piece


class SharedStep(ABC):
    """What the steps of all layouts have in common: seeds, clipping, sums over processes."""

    def __init__(
        self,
        app: App,
        dims: ParallelDims,
        parameters: Callable[[], Iterator[nn.Parameter]],
        *,
        accumulate: int,
        clip_norm: float | None,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.app, self.dims = app, dims
        self.accumulate, self.autocast = accumulate, autocast
        self._parameters, self._clip_norm = parameters, clip_norm

    def seed(self, seed: int) -> int:
        """Ranks of one share draw the same; those of another share something else."""
        return share_seed(seed, self.dims.share) if self.dims.num_shares > 1 else seed

    @abstractmethod
    def gradients(self, batch: Any) -> Share:
        """As `LocalStep.gradients`."""

    def before_update(self) -> None:
        if self._clip_norm is not None:
            stages = self.dims.axis("pp").get_group() if self.dims.degrees.pp > 1 else None
            clip_gradients(self._parameters(), self._clip_norm, stages=stages)

    def total(self, sums: Sums) -> Sums:
        """Added up in the order of ranks, so that every rank has the same bytes."""
        if self.dims.degrees.world_size == 1:
            return sums
        all_sums: list[Any] = [None] * self.dims.degrees.world_size
        dist.all_gather_object(all_sums, dict(sums) if self.dims.counts else {})
        found: dict[str, tuple[float, float]] = {}
        for one in all_sums:
            for name, (total, count) in one.items():
                before = found.get(name, (0.0, 0.0))
                found[name] = (before[0] + total, before[1] + count)
        return dict(sorted(found.items()))

    def share_pieces(self, batch: Any) -> tuple[list[Piece], int]:
        """This process's pieces of a batch, and what the batch weighs."""
        piece = pieces(self.app, batch, self.dims.num_shares * self.accumulate)
        first = self.dims.share * self.accumulate
        return [piece(first + number) for number in range(self.accumulate)], self.app.examples(batch)


class ReplicaStep(SharedStep):
    """Forward and backward through a module that every process has whole, sharded or with divided products."""

    def __init__(self, app: App, module: nn.Module, dims: ParallelDims, **options: Any) -> None:
        super().__init__(app, dims, module.parameters, **options)
        self._module = module

    def gradients(self, batch: Any) -> Share:
        own, batch_weight = self.share_pieces(batch)
        losses = [
            self._one(piece, batch_weight, is_last=number == len(own) - 1) * piece.weight
            for number, piece in enumerate(own)
        ]
        weight = sum(piece.weight for piece in own)
        return Share(sum(losses[1:], losses[0]) / max(weight, 1), weight, batch_weight)

    def _one(self, piece: Piece, batch_weight: int, *, is_last: bool) -> Tensor:
        with self._syncing(is_last):
            with self.autocast():
                loss = self.app.loss(self._module(*self.app.inputs(piece.batch)), piece.batch)
            (loss * (self.dims.num_shares * piece.weight / batch_weight)).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    @contextmanager
    def _syncing(self, is_last: bool) -> Iterator[None]:
        """Gradients are exchanged once a step, with the last piece."""
        module = self._module
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(is_last)
            module.set_is_last_backward(is_last)
        if isinstance(module, DistributedDataParallel) and not is_last:
            with module.no_sync():
                yield
        else:
            yield


def autocast_of(device: torch.device, param: str) -> Callable[[], AbstractContextManager[Any]]:
    """What the forward pass runs under where torch casts by operation: in all layouts but sharded ones."""
    if param == "model":
        return nullcontext
    return lambda: torch.autocast(device.type, dtype=torch.bfloat16)
