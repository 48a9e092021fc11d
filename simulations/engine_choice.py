"""Which engine does a run: the one that is asked for, or the faster one, which the run itself finds out.

Engines give the same bytes and leave the same at the sites, so one may follow the other in the middle of a round.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic

import torch

from atoll.cluster.messages import Evaluate, Train, Trained
from atoll.simulations.engine import KINDS, Engine, Kind, Metrics
from atoll.simulations.processes import ProcessesEngine
from atoll.simulations.sequential import SequentialEngine
from atoll.simulations.versions import Versions
from atoll.wire.errors import ConfigError
from atoll.wire.job import Job

MEASURE_S = 0.25  # of each engine; what is over before needs no processes, whose start takes a tenth of it
MEASURE_TASKS = 8
MAX_PROCESSES = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """An engine that can do the job; `kind` "auto": measure."""

    kind: Kind
    num_processes: int


def wished(kind: Kind, num_processes: int | None, job: Job, device: torch.device) -> Wish:
    """What of an engine and a number of processes there can be.

    Raises:
        ConfigError: there is no such engine, or it cannot do the job; names the setting.
    """
    if kind not in KINDS:
        raise _bad("engine", kind, ", ".join(KINDS))
    if num_processes is not None and not 1 <= num_processes <= MAX_PROCESSES:
        raise _bad("processes", num_processes, f"1 to {MAX_PROCESSES}")
    if kind == "sequential" and num_processes not in (None, 1):
        raise _bad("processes", num_processes, "1 with engine = sequential; take engine = processes")
    forced = kind == "processes" or (kind == "auto" and num_processes is not None)
    hindrance = _hindrance(job, device)
    if forced and hindrance is not None:
        key, text = hindrance
        raise ConfigError(f"engine = processes: {text}; take engine = sequential", key=key)
    number = num_processes or num_cores() if hindrance is None else 1
    if forced:
        return Wish(kind="processes", num_processes=number)
    return Wish(kind="auto" if kind == "auto" and number > 1 else "sequential", num_processes=number)


def engine_for(wish: Wish, sequential: SequentialEngine, versions: Versions) -> Engine:
    """The engine, ready; whoever gets it closes it. Raises DiskFull, LocalError as `ProcessesEngine` does."""
    if wish.kind == "sequential":
        return sequential
    if wish.kind == "processes":
        return ProcessesEngine(sequential, versions, wish.num_processes)
    return MeasuringEngine(sequential, versions, wish.num_processes)


class MeasuringEngine:
    """Begins without processes, tries them when there is enough to do, and goes on with what was faster."""

    def __init__(self, sequential: SequentialEngine, versions: Versions, num_processes: int) -> None:
        self._sequential, self._versions, self._num_processes = sequential, versions, num_processes
        self._engine: Engine = sequential
        self._open: dict[str, tuple[str | None, Train | Evaluate, float]] = {}  # expected and not asked for, by key
        self._alone_s: float | None = None  # seconds a task, without processes
        self._settled = False
        self._num_tasks, self._since_s = -1, 0.0  # the first task of an engine is not counted

    @property
    def name(self) -> str:
        return self._engine.name

    @property
    def fragments(self) -> Sequence[tuple[int, int]]:
        return self._sequential.fragments

    def max_weight(self, site: str) -> int:
        return self._sequential.max_weight(site)

    def num_steps(self, site: str) -> int:
        return self._sequential.num_steps(site)

    def expect(self, site: str | None, request: Train | Evaluate, at_s: float) -> None:
        self._engine.expect(site, request, at_s)
        if not self._settled:
            self._open[request.key] = (site, request, at_s)

    def withdraw(self, key: str) -> None:
        self._engine.withdraw(key)
        self._open.pop(key, None)

    def train(self, site: str, request: Train) -> tuple[Trained, memoryview]:
        if not self._settled:
            self._measure()
        self._open.pop(request.key, None)
        return self._engine.train(site, request)

    def evaluate(self, site: str | None, request: Evaluate) -> Metrics:
        self._open.pop(request.key, None)
        return self._engine.evaluate(site, request)

    def close(self) -> None:
        self._engine.close()

    def _measure(self) -> None:
        """Counts tasks from one to the next, with all that is done in between, and changes engines in time."""
        self._num_tasks += 1
        now_s = monotonic()
        if self._num_tasks == 0:
            self._since_s = now_s
        if self._num_tasks < MEASURE_TASKS or now_s - self._since_s < MEASURE_S:
            return
        task_s = (now_s - self._since_s) / self._num_tasks
        if self._alone_s is None:
            self._alone_s = task_s
            self._go_on_with(ProcessesEngine(self._sequential, self._versions, self._num_processes))
            return
        self._settled = True
        if task_s > self._alone_s:
            self._go_on_with(self._sequential)
        self._open.clear()

    def _go_on_with(self, engine: Engine) -> None:
        for key in self._open:
            self._engine.withdraw(key)
        self._engine.close()
        self._engine = engine
        for site, request, at_s in self._open.values():
            engine.expect(site, request, at_s)
        self._num_tasks = -1


def num_cores() -> int:
    """Of those that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _hindrance(job: Job, device: torch.device) -> tuple[str, str] | None:
    """Why a job cannot be done by several processes, and the setting that it is about; None where it can."""
    threads = job.training.threads
    if threads not in (None, 1):
        return "training.threads", f"each process has one thread, and the job wants training.threads = {threads}"
    if device.type != "cpu":
        return "training.device", f"processes are forked, and {device.type} does not go through a fork"
    if sys.platform != "linux":
        return "engine", "processes are forked, which is safe on Linux alone"
    return None


def _bad(key: str, value: object, bound: str) -> ConfigError:
    return ConfigError(f"{key} = {value}: wanted {bound}", key=key, value=str(value), bound=bound)
