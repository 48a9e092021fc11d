"""A process that trains and judges for a simulation: forked from it, so that app, model and data are there already.

It is asked over a pipe, one request after the other, and answers each. Versions and updates are in files that both map;
what sites keep is in the run's folder. So a worker holds nothing that is needed after it, and any other does the same.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

import torch

from atoll.cluster.messages import Evaluate, Failed, Train, Trained
from atoll.simulations.engine import Metrics
from atoll.simulations.sequential import SequentialEngine
from atoll.simulations.versions import Versions
from atoll.wire.errors import AtollError

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Order:
    """One thing to be done. `buffer` holds the version; `room` takes the update, where there is one."""

    number: int
    site: str | None
    request: Train | Evaluate
    buffer: str
    room: Path | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of an order."""

    number: int
    result: Trained | Metrics | Failed


def run_worker(
    engine: SequentialEngine, versions: Versions, pipe: Connection, parent: int, others: Iterable[Connection]
) -> NoReturn:
    """Does orders until the other end of the pipe is closed. Called in the process that was forked.

    Args:
        parent: the process that forked it, without which it ends.
        others: ends of other workers' pipes, which the fork has copied.
    """
    _end_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's matter, which ends the workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for other in others:
        other.close()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # blocked by the parent for the fork
    torch.set_num_threads(1)
    code = 1
    try:
        while True:
            order = pipe.recv()
            pipe.send(Answer(order.number, _done(engine, versions, order)))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        code = 0
    except Exception:  # of ours: what the app raises is an answer
        traceback.print_exc()
        raise
    finally:
        os._exit(code)  # nothing to put in order: what is set up to be done at the parent's exit is the parent's


def _done(engine: SequentialEngine, versions: Versions, order: Order) -> Trained | Metrics | Failed:
    request = order.request
    versions.lend(Path(request.base_path).name, order.buffer)
    try:
        if isinstance(request, Evaluate):
            return engine.evaluate(order.site, request)
        assert order.site is not None  # only the server has none, and it trains nothing
        assert order.room is not None
        return engine.train_into(order.room, order.site, request)
    except AtollError as error:
        return Failed.of(request.key, error)


def _end_with(parent: int) -> None:
    """Have the system end this process when its parent ends, however that comes about (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended in between
            os._exit(1)
