"""The engine that simulates sites in several processes, with one thread each, on the memory of one machine.

Workers are forked, so app, model and data are loaded once and shared until somebody writes to them; model versions and
updates lie in files that all of them map (`shared_memory`), and what sites keep from round to round is in the run's
folder. Beyond that a worker has its own model, optimizer state and activations, and one update is on its way for each
place of the window: so memory grows with the number of processes and not with that of sites.

Tasks are begun in the order in which they will be asked for, a few of them ahead of the run. A task that is taken back
after it was begun leaves nothing at its site. A worker that is killed is replaced, and its tasks are done again, which
gives the same bytes: a round begins with what the round before has left.
"""

from __future__ import annotations

import contextlib
import heapq
import multiprocessing
import os
import selectors
import signal
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path

from atoll.cluster.messages import Evaluate, Failed, Train, Trained
from atoll.simulations.engine import Metrics
from atoll.simulations.sequential import SequentialEngine
from atoll.simulations.versions import Versions
from atoll.simulations.worker import Answer, Order, run_worker
from atoll.wire.errors import LocalError

ORDERS_EACH = 2  # a worker has one under way and one to go on with
WINDOW = 4  # updates that may be ready or under way, for each worker
MOST_DEATHS = 3  # of workers at one task, after which it is the task's fault


@dataclass(slots=True, kw_only=True)
class _Expected:
    """A task that was told of, and what has become of it."""

    number: int
    site: str | None
    request: Train | Evaluate
    room: Path | None = None
    result: Trained | Metrics | Failed | None = None
    begun: bool = False
    withdrawn: bool = False
    deaths: int = 0


@dataclass(slots=True, eq=False)
class _Worker:
    process: ForkProcess
    pipe: Connection
    orders: deque[_Expected] = field(default_factory=deque)  # the first is under way


class ProcessesEngine:
    """Trains and judges at several sites at a time, by an engine that each process has a copy of."""

    def __init__(self, inner: SequentialEngine, versions: Versions, num_processes: int) -> None:
        """Forks the processes.

        Raises:
            DiskFull: there is no room for the updates on their way.
            LocalError: a process cannot be started.
        """
        self._inner, self._versions = inner, versions
        self._num_numbers = 0
        self._queue: list[tuple[float, int, _Expected]] = []  # by time, then by number
        self._known: dict[str, _Expected] = {}  # by key
        self._given: dict[int, _Expected] = {}  # to workers, by number
        self._num_rooms, self._free = 0, list[Path]()
        self._last: Path | None = None  # the room of the update that was handed out last
        self._window = WINDOW * num_processes
        self._selector = selectors.DefaultSelector()
        self._workers: list[_Worker] = []
        try:
            for _ in range(num_processes):
                self._workers.append(self._start())
        except BaseException:
            self.close()
            raise

    @property
    def name(self) -> str:
        return f"processes ({len(self._workers)})"

    @property
    def fragments(self) -> Sequence[tuple[int, int]]:
        return self._inner.fragments

    @property
    def pids(self) -> list[int]:
        """Those of the processes."""
        return [worker.process.pid or 0 for worker in self._workers]

    def max_weight(self, site: str) -> int:
        return self._inner.max_weight(site)

    def num_steps(self, site: str) -> int:
        return self._inner.num_steps(site)

    def expect(self, site: str | None, request: Train | Evaluate, at_s: float) -> None:
        self._num_numbers += 1
        expected = _Expected(number=self._num_numbers, site=site, request=request)
        self._known[request.key] = expected
        heapq.heappush(self._queue, (at_s, expected.number, expected))

    def withdraw(self, key: str) -> None:
        expected = self._known.pop(key, None)
        if expected is not None:
            self._take_back(expected)

    def train(self, site: str, request: Train) -> tuple[Trained, memoryview]:
        if self._last is not None:
            self._free.append(self._last)
        self._last = None
        expected = self._result(site, request)
        self._last = expected.room
        if isinstance(expected.result, Failed):
            raise expected.result.to_error()
        assert isinstance(expected.result, Trained)
        assert expected.room is not None
        return expected.result, self._inner.update_at(expected.room, expected.result.num_bytes)

    def evaluate(self, site: str | None, request: Evaluate) -> Metrics:
        result = self._result(site, request).result
        if isinstance(result, Failed):
            raise result.to_error()
        assert not isinstance(result, Trained | None)
        return result

    def close(self) -> None:
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.pipe.close()
        self._workers.clear()
        self._selector.close()

    # --- tasks ------------------------------------------------------------------------------------------------------

    def _result(self, site: str | None, request: Train | Evaluate) -> _Expected:
        """The task as it is asked for now, done."""
        expected = self._known.pop(request.key, None)
        if expected is not None and expected.request != request:
            self._take_back(expected)
            expected = None
        if expected is None:
            self.expect(site, request, float("-inf"))
            expected = self._known.pop(request.key)
        if not expected.begun:
            self._begin(expected)
        while expected.result is None:
            self._give_out()
            self._take_in()
        self._give_out()
        return expected

    def _give_out(self) -> None:
        """Gives workers what comes next, as far as the window goes."""
        while self._queue:
            expected = self._queue[0][2]
            if not (expected.withdrawn or expected.begun):
                full = min(len(worker.orders) for worker in self._workers) >= ORDERS_EACH
                no_room = not self._free and self._num_rooms >= self._window
                if full or (no_room and isinstance(expected.request, Train)):
                    return
                self._begin(expected)
            heapq.heappop(self._queue)

    def _begin(self, expected: _Expected) -> None:
        expected.begun = True
        if isinstance(expected.request, Train):
            expected.room = self._room()
        self._give(min(self._workers, key=lambda worker: len(worker.orders)), expected)

    def _give(self, worker: _Worker, expected: _Expected) -> None:
        buffer = self._versions.buffer_of(Path(expected.request.base_path).name)
        order = Order(expected.number, expected.site, expected.request, buffer, expected.room)
        worker.orders.append(expected)
        self._given[expected.number] = expected
        with contextlib.suppress(OSError):  # it has ended, which `_take_in` finds out
            worker.pipe.send(order)

    def _take_in(self) -> None:
        """Waits for an answer, or for the end of a worker, and takes in all that are there."""
        for key, _ in self._selector.select():
            worker: _Worker = key.data
            try:
                answer: Answer = worker.pipe.recv()
            except (EOFError, OSError):
                self._replace(worker)
                continue
            expected = self._given.pop(answer.number)
            worker.orders.remove(expected)
            expected.result = answer.result

    def _take_back(self, expected: _Expected) -> None:
        expected.withdrawn = True
        if not expected.begun:
            return  # `_give_out` drops it
        while expected.result is None:
            self._take_in()
        if isinstance(expected.request, Train):
            assert expected.site is not None
            assert expected.room is not None
            self._inner.forget(expected.site, expected.request.round)
            self._free.append(expected.room)

    def _room(self) -> Path:
        if self._free:
            return self._free.pop()
        self._num_rooms += 1
        return self._inner.make_room(f"update-{self._num_rooms}")

    # --- processes --------------------------------------------------------------------------------------------------

    def _start(self) -> _Worker:
        context = multiprocessing.get_context("fork")
        mine, theirs = context.Pipe()
        others = [*(worker.pipe for worker in self._workers), mine]
        process = context.Process(target=run_worker, args=(self._inner, self._versions, theirs, os.getpid(), others))
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # the worker is to ignore it from its first step
            process.start()
        except OSError as error:
            raise LocalError(
                f"process {len(self._workers) + 1} of the simulation cannot be started: {error.strerror}; set fewer "
                "--processes"
            ) from None
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        theirs.close()
        worker = _Worker(process, mine)
        self._selector.register(mine, selectors.EVENT_READ, worker)
        return worker

    def _replace(self, worker: _Worker) -> None:
        """Puts a new worker in the place of one that has ended, with the same orders."""
        self._selector.unregister(worker.pipe)
        worker.pipe.close()
        worker.process.join()
        self._workers.remove(worker)
        if worker.orders:
            worker.orders[0].deaths += 1
            self._require_bearable(worker.orders[0], worker.process.exitcode)
        new = self._start()
        self._workers.append(new)
        for expected in worker.orders:
            self._give(new, expected)

    def _require_bearable(self, expected: _Expected, code: int | None) -> None:
        if expected.deaths < MOST_DEATHS:
            return
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with code {code}"
        raise LocalError(
            f"the process that was to {expected.request.kind} at {expected.site or 'the server'} in round "
            f"{expected.request.round} {how}, {expected.deaths} times; if memory ran out, set fewer --processes "
            "(processes) or a smaller batch_size in strategy.work"
        )
