"""Who does the tasks of a run at this site, and who hears of their fate: protocols, so that a region can stand in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from atoll.cluster.messages import (
    Describe,
    Described,
    Evaluate,
    Evaluated,
    Mask,
    Masked,
    Prepare,
    Prepared,
    Train,
    Trained,
)


class Worker(Protocol):
    """A process with torch (`cluster.worker_process.WorkerProcess`), or a server with sites of its own.

    One request at a time. A coroutine that waits may be cancelled: the worker stays usable.
    """

    @property
    def pid(self) -> int | None:
        """Of the process while it can take requests, else None."""
        ...

    async def start(self) -> None: ...

    async def prepare(self, request: Prepare, timeout_s: float | None = None) -> Prepared: ...

    async def train(self, request: Train, on_progress: Callable[[int, int], None] | None = None) -> Trained: ...

    async def mask(self, request: Mask) -> Masked: ...

    async def evaluate(self, request: Evaluate) -> Evaluated: ...

    async def describe(self, request: Describe) -> Described: ...

    async def close(self) -> None: ...


class Witness(Protocol):
    """Hears what the server says of runs and tasks, before the agent acts on it."""

    async def joined(self, run: str) -> None:
        """The site takes part, durably; said again at each start."""
        ...

    async def committed(self, run: str, round_: int, version: int) -> None: ...

    async def cancelled(self, key: str) -> None:
        """A task is not wanted any more; `key` as in the worker's requests."""
        ...

    async def ended(self, run: str, status: str, reason: str) -> None:
        """The run is over, or the site has left it."""
        ...


class Nobody:
    """The witness of a site whose workers need to know nothing."""

    async def joined(self, run: str) -> None:
        pass

    async def committed(self, run: str, round_: int, version: int) -> None:
        pass

    async def cancelled(self, key: str) -> None:
        pass

    async def ended(self, run: str, status: str, reason: str) -> None:
        pass
