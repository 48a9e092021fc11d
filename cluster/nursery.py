"""The process that workers are forked from: `python -P -m atoll.cluster.nursery --control FD`. Started by `Nursery`.

It has loaded torch and all else that every worker needs, which takes seconds, and forks a worker in milliseconds.
What makes that safe: it has one thread, it never touches an accelerator, it imports no app, and it has the environment
that its workers are to have. It sets no signal handlers, so there are none to take back in a worker. It ends when its
agent's end of the control socket closes; its workers notice the same on sockets of their own.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import gc
import importlib
import logging
import os
import select
import socket
import sys
import threading
from typing import NoReturn

import numpy as np
import torch

from atoll.cluster import worker
from atoll.cluster.nursery_messages import PACKET_BYTES, Ended, Fork, Forked, Refused, decode, encode

log = logging.getLogger(__name__)


class Parent:
    """Forks workers, and tells the agent of each how it ended."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)
        self._pids: dict[int, int] = {}  # of the living workers, by pidfd

    def serve(self) -> None:
        """Returns when the agent's end is closed."""
        while True:
            for fd, _ in self._poll.poll():
                if fd in self._pids:
                    self._reap(fd)
                elif not self._take():
                    return

    def _take(self) -> bool:
        packet, fds, _, _ = socket.recv_fds(self._control, PACKET_BYTES, 1)
        if not packet:
            return False
        request = decode(packet)
        if not isinstance(request, Fork) or len(fds) != 1:
            raise ValueError(f"agent sent {request.kind!r} with {len(fds)} descriptors")
        (log_fd,) = fds
        try:
            self._fork(request, log_fd)
        finally:
            os.close(log_fd)
        return True

    def _fork(self, request: Fork, log_fd: int) -> None:
        if (num_threads := count_threads()) != 1:
            self._control.send(encode(Refused(reason=f"the nursery has {num_threads} threads")))
            return
        try:
            pid = os.fork()
        except OSError as error:  # no memory, or too many processes
            self._control.send(encode(Refused(reason=str(error))))
            return
        if pid == 0:
            self._forget()
            live(request.socket_path, log_fd)
        fd = os.pidfd_open(pid)
        self._pids[fd] = pid
        self._poll.register(fd, select.POLLIN)
        socket.send_fds(self._control, [encode(Forked(pid=pid))], [fd])

    def _reap(self, fd: int) -> None:
        pid = self._pids.pop(fd)
        self._poll.unregister(fd)
        os.close(fd)
        _, status = os.waitpid(pid, 0)
        self._control.send(encode(Ended(pid=pid, returncode=os.waitstatus_to_exitcode(status))))

    def _forget(self) -> None:
        """In a worker: let go of what is the nursery's. With its control socket open, no end of it would show."""
        self._control.close()
        for fd in self._pids:
            os.close(fd)


def live(socket_path: str, log_fd: int) -> NoReturn:
    """Be the worker, in a process just forked, and end it as the interpreter would end a worker's own."""
    code = 1
    try:
        os.setsid()
        os.dup2(log_fd, sys.stdout.fileno())
        os.dup2(log_fd, sys.stderr.fileno())
        os.close(log_fd)
        importlib.invalidate_caches()  # what was installed since the nursery started
        np.random.seed()  # from the system, as at the start of any process; Python's `random` does so by itself
        worker.work(socket_path)
        code = 0
    except (Exception, SystemExit):
        log.exception("the worker failed")
    finally:
        leave(code)


def leave(code: int) -> NoReturn:
    """What the interpreter does at its end, but for taking apart all modules and objects: that costs 0.4 core-seconds
    and a private copy of the nursery's memory."""
    with contextlib.suppress(BaseException):  # each of them prints what goes wrong
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def prepare(*, trains: bool) -> None:
    """Load what workers load later, and make sure that they can be forked from here. Raises SystemExit where not."""
    if trains:
        importlib.import_module("torch._dynamo")  # optimizers do so at their first step, 2 s and 70 MB
    # Libraries that started threads at their import (OpenBLAS of numpy) end them before a fork and start them at need.
    pid = os.fork()
    if pid == 0:
        os._exit(torch.cuda._is_in_bad_fork() or torch.xpu._is_in_bad_fork())
    os.close(os.pidfd_open(pid))  # raises where the kernel is older than 5.3
    if os.waitpid(pid, 0)[1] != 0:
        raise SystemExit("an import has asked for accelerators: processes forked from here could not use them")
    if (num_threads := count_threads()) != 1:
        raise SystemExit(f"an import has left {num_threads - 1} threads running: nothing can be forked from here")
    gc.collect()
    gc.freeze()  # a collection in a worker must not write to, and so copy, what it shares with the nursery


def count_threads() -> int:
    """Threads of this process, also those that Python does not know of."""
    return len(os.listdir("/proc/self/task"))


def main() -> None:
    parser = argparse.ArgumentParser(description="The process that an Atoll agent's workers are forked from.")
    parser.add_argument("--control", required=True, type=int, help="descriptor of the socket to the agent")
    parser.add_argument("--evaluates-only", action="store_true", help="load nothing that only training needs")
    options = parser.parse_args()
    control = socket.socket(fileno=options.control)
    control.set_inheritable(False)
    prepare(trains=not options.evaluates_only)
    with contextlib.suppress(ConnectionError):  # the agent is gone
        Parent(control).serve()
    os._exit(0)  # see `leave`


if __name__ == "__main__":
    main()
