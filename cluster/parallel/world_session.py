"""The worker that the agent speaks with, where a site has several processes: it starts them, and speaks for them.

::

    agent <-- unix socket --> this process <-- a socket each --> rank 0 ... rank N-1
                                   `-- starts and watches --> a launcher --> a node each --> its ranks

Every request goes to all ranks, and counts as done when all of them say so: one that declines, declines for all. A rank
that fails in the middle of a step leaves the others waiting for it, so what has not answered soon after a failure is ended;
the next request starts the world anew. A rank that dies ends this process too, and the agent starts it again, as it does
with any worker: one place decides about restarts, and the session with the server never drops.
"""

from __future__ import annotations

import contextlib
import io
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
import torch.distributed as dist

from atoll.aggregation.strategy import resolve
from atoll.cluster.device import choose_device
from atoll.cluster.messages import (
    LINE_BYTES,
    Answer,
    Cancel,
    Close,
    Describe,
    Evaluate,
    Evaluated,
    Failed,
    Mask,
    Masked,
    Prepare,
    Prepared,
    Progress,
    Request,
    Train,
    Trained,
    decode,
    encode,
)
from atoll.cluster.parallel.open_spread import num_processes, open_spread, require_spreadable
from atoll.cluster.parallel.section import world_of
from atoll.cluster.parallel.spread_session import SpreadSession
from atoll.cluster.parallel.world import LOOK_EVERY_S, World
from atoll.cluster.parallel.world_section import WorldSection
from atoll.cluster.registry import AppEntry, load_app
from atoll.wire.errors import AtollError, Malformed, Stale
from atoll.wire.job import decode_job
from atoll.wire.parallel_section import ParallelSection

OnStep = Callable[[int, int], None]
GRACE_S = 5.0  # for the other ranks' answers after one has failed; those that failed alike answer within milliseconds

A = TypeVar("A", Prepared, Trained, Masked, Evaluated)
_log = logging.getLogger("atoll.worker")


class WorldLost(BaseException):
    """A rank has died. Not an Exception: the worker ends with its world, and the agent starts it again."""


def open_parallel(request: Prepare, section: ParallelSection, round_: int) -> SpreadSession | WorldSession:
    """This process's part of a run, in a world or alone; or, where there is no world yet, the world.

    Raises:
        ConfigError, AppFailed, ...: as `open_spread`; what can be refused is, before a process is started.
    """
    job = decode_job(request.job.encode()).at(round_)
    world = world_of(request)
    if world.launcher == "local" or dist.is_initialized():
        device_type = choose_device(job.training.device, request.device).type
    else:
        device_type = torch.device(request.device or "cpu").type  # of the nodes, which are other machines than this
    count = num_processes(section, device_type, is_own=request.parallel is not None, wanted=world.num_processes)
    if (count == 1 and world.launcher == "local") or dist.is_initialized():
        return open_spread(request, section, round_)
    entry = AppEntry(name=request.app_name, distribution=request.distribution, entry_point=request.entry_point)
    require_spreadable(job, resolve(job), load_app(entry, request.app_hash), request)
    return WorldSession(request, section, world, count, device_type)


class WorldSession:
    """The ranks of one run at one site."""

    def __init__(
        self, request: Prepare, section: ParallelSection, world: WorldSection, count: int, device_type: str
    ) -> None:
        """Start them, and have them load the run.

        Raises:
            LocalError: they do not start.
            AtollError: one of them cannot load the run.
        """
        self.run, self.site = request.run, request.site
        self._count = count
        self._said: queue.SimpleQueue[tuple[int, Answer | None]] = queue.SimpleQueue()
        self._is_open = True
        self._world = World(world, section, count, device_type)
        for rank, (_, lines) in self._world.connections.items():
            threading.Thread(target=self._listen, args=(rank, lines), name=f"rank {rank}", daemon=True).start()
        try:
            self._prepared = self._ask(request, Prepared, lambda done, total: None)
        except BaseException:
            self.close()
            raise

    def prepared(self) -> Prepared:
        """What the agent wants to know before it accepts the run; the ranks' devices as one."""
        return self._prepared

    def at(self, round_: int) -> WorldSession | None:
        """The session of any round, since each rank looks for itself; None where the world is gone."""
        return self if self._is_open else None

    def train(self, request: Train, on_step: OnStep) -> Trained:
        """One round, by all ranks. Raises what one of them raises."""
        return self._ask(request, Trained, on_step)

    def mask(self, request: Mask, on_step: OnStep) -> Masked:
        """The masked input of a session, by the first rank, which uses all cores. Raises as `mask_update` does."""
        return self._ask(request, Masked, on_step, num_ranks=1)

    def evaluate(self, request: Evaluate, on_step: OnStep) -> Evaluated:
        """Metric sums of a version, by all ranks. Raises what one of them raises."""
        return self._ask(request, Evaluated, on_step)

    def close(self, *, in_order: bool = True) -> None:
        """End the ranks; at once where some of them wait for others in vain. Safe to call twice."""
        if not self._is_open:
            return
        self._is_open = False
        if in_order:
            self._send(Close(), self._count)
        self._world.close(in_order=in_order)

    # ---------------------------------------------------------------------------------------------------------------

    def _listen(self, rank: int, lines: io.BufferedReader) -> None:
        """All that a rank says, and its end. Has a thread of its own."""
        with contextlib.suppress(OSError, ValueError, AtollError):
            while line := lines.readline(LINE_BYTES):
                message = decode(line)
                if not isinstance(message, Prepare | Train | Mask | Evaluate | Describe | Cancel | Close):
                    self._said.put((rank, message))
        self._said.put((rank, None))

    def _ask(
        self, request: Prepare | Train | Mask | Evaluate, wanted: type[A], on_step: OnStep, num_ranks: int | None = None
    ) -> A:
        """What all ranks, or the first `num_ranks`, answer: that of the first, where none has failed."""
        count = num_ranks or self._count
        self._send(request, count)
        key = "prepare" if isinstance(request, Prepare) else request.key
        answers = self._answers(key, on_step, count)
        failures = [answer for _, answer in sorted(answers.items()) if isinstance(answer, Failed)]
        if len(answers) < count:
            _log.error(
                "%d of %d ranks failed, the others wait for them: the world is ended", len(failures), self._count
            )
            self.close(in_order=False)
        if failures:
            raise failures[0].to_error()
        if not all(isinstance(answer, wanted) for answer in answers.values()):
            raise Malformed(f"a rank answered something else to {request.kind!r}")
        first = answers[0]
        assert isinstance(first, wanted)
        return first

    def _answers(self, key: str, on_step: OnStep, count: int) -> Mapping[int, Answer]:
        """By rank; of all that were asked, or of those that have answered some seconds after one has failed."""
        answers: dict[int, Answer] = {}
        is_cancelled = False
        end_s: float | None = None
        while len(answers) < count and (end_s is None or time.monotonic() < end_s):
            done, total = 0, 0
            try:
                rank, message = self._said.get(timeout=LOOK_EVERY_S)
            except queue.Empty:
                pass
            else:
                if message is None:
                    raise self._lost(rank)
                if isinstance(message, Progress):
                    done, total = (message.done, message.total) if rank == 0 else (0, 0)
                elif message.key == key:
                    answers[rank] = message
                    if isinstance(message, Failed) and end_s is None:
                        end_s = time.monotonic() + GRACE_S
            if not is_cancelled:
                try:
                    on_step(done, total)
                except Stale:
                    is_cancelled = True
                    self._send(Cancel(key=key), count)
        return answers

    def _send(self, request: Request, num_ranks: int) -> None:
        line = encode(request)
        for connection, _ in (self._world.connections[rank] for rank in range(num_ranks)):
            with contextlib.suppress(OSError):  # it has died; `_listen` says so
                connection.sendall(line)

    def _lost(self, rank: int) -> WorldLost:
        self.close(in_order=False)
        text = f"rank {rank} of {self._count} has died; its trace, if it left one, is above in this log"
        _log.error("%s", text)
        return WorldLost(text)
