"""What the processes of a site agree on: that all went well, or which error it was; and when a task is given up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from atoll.cluster.messages import Failed
from atoll.wire.errors import AtollError, Stale


def agree(error: AtollError | None) -> None:
    """Returns where no process has an error.

    Raises:
        AtollError: the error of the first that has one, on all processes alike.
    """
    if not dist.is_initialized():
        if error is not None:
            raise error
        return
    votes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(votes, None if error is None else Failed.of("", error).error)
    found = next((vote for vote in votes if vote is not None), None)
    if found is not None:
        raise Failed(key="", error=found).to_error()


class GivingUp:
    """Ends a task on all processes after the same step, though they hear of it at different moments.

    The vote of one step is counted at the next, so that no step waits for it.
    """

    def __init__(self, on_step: Callable[[int, int], None]) -> None:
        self._on_step = on_step
        self._vote: torch.Tensor | None = None
        self._work: dist.Work | None = None

    def __call__(self, done: int, total: int) -> None:
        """Called after each step.

        Raises:
            Stale: some process was told, in or before the step before this one.
        """
        told: Stale | None = None
        try:
            self._on_step(done, total)
        except Stale as error:
            told = error
        if not dist.is_initialized():
            if told is not None:
                raise told
            return
        if self._work is not None and self._vote is not None:
            self._work.wait()
            if self._vote.item():
                raise told or Stale("the task was cancelled, says another process of this site")
        self._vote = torch.tensor(int(told is not None))
        self._work = dist.all_reduce(self._vote, dist.ReduceOp.MAX, async_op=True)

    def end(self) -> None:
        """Called after the last step, when no vote may be left under way. Raises Stale as a step does."""
        if self._work is not None and self._vote is not None:
            self._work.wait()
            if self._vote.item():
                raise Stale("the task was cancelled, says a process of this site")
            self._work = self._vote = None
