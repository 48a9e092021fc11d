"""The torch process of a site. Started by `WorkerProcess`: forked from a nursery, or in a process of its own by
`python -P -m atoll.cluster.worker --socket PATH`.

The main thread computes. A second thread only reads the socket: it hands requests on, notes cancellations at once,
and ends the process when the agent is gone, even in the middle of a long step. What it was writing then is a draft
that nobody will take for a result.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import queue
import socket
import threading
import time

from atoll.cluster.messages import (
    LINE_BYTES,
    Answer,
    Cancel,
    Close,
    Describe,
    Evaluate,
    Failed,
    Mask,
    Prepare,
    Progress,
    Request,
    Train,
    decode,
    encode,
)
from atoll.cluster.registry import MEND_APP, failure_of
from atoll.cluster.sessions import OnStep, Session, open_session
from atoll.wire.errors import AtollError, Malformed, RemoteError, Stale

PROGRESS_EVERY_S = 0.2
EXIT_ORPHANED = 3

log = logging.getLogger("atoll.worker")


class Inbox:
    """Requests as they come in, and which task was cancelled."""

    def __init__(self, connection: socket.socket) -> None:
        self.requests: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._connection = connection
        self._cancelled: set[str] = set()
        self._closing = False

    def read_forever(self) -> None:
        """Reads until Close; where the agent's end closes without it, the process ends. Has a thread of its own."""
        try:
            with self._connection.makefile("rb") as lines:
                while not self._closing and (line := lines.readline(LINE_BYTES)):
                    self._take(line)
                if self._closing:
                    return
        except (OSError, AtollError):
            log.exception("cannot read from the agent")
        # Not sys.exit: the main thread may be deep inside torch, and nobody is left to work for.
        os._exit(EXIT_ORPHANED)

    def is_cancelled(self, key: str) -> bool:
        """Whether the agent has given up this task, or closes the worker."""
        return self._closing or key in self._cancelled

    def _take(self, line: bytes) -> None:
        message = decode(line)
        if isinstance(message, Cancel):
            self._cancelled.add(message.key)
        elif isinstance(message, Prepare | Train | Mask | Evaluate | Describe | Close):
            self._closing = isinstance(message, Close)
            self.requests.put(message)
        else:
            raise Malformed(f"agent sent an answer: {message.kind!r}")


class Worker:
    """Answers requests, one at a time."""

    def __init__(self, connection: socket.socket, inbox: Inbox) -> None:
        self._connection, self._inbox = connection, inbox
        self._prepare: Prepare | None = None
        self._session: Session | None = None

    def serve(self) -> None:
        """Returns when the agent says Close."""
        while not isinstance(request := self._inbox.requests.get(), Close | Cancel):
            self._connection.sendall(self._answer(request))

    def close(self) -> None:
        """End what a session has started."""
        close = getattr(self._session, "close", None)  # of a world of processes
        if close is not None:
            close()
        self._session = None

    def _answer(self, request: Prepare | Train | Mask | Evaluate | Describe) -> bytes:
        key = "prepare" if isinstance(request, Prepare) else request.key
        try:
            return encode(self._do(request))
        except AtollError as error:
            log.error("%s %s: %s", request.kind, key, error)
            return encode(Failed.of(key, self._placed(error, request)))
        except (Exception, SystemExit) as error:  # the user's code may raise anything; the worker lives on
            log.exception("%s %s", request.kind, key)
            failure = failure_of(
                error, f"app failed to {request.kind}", advice=f"look at the data there, or {MEND_APP}"
            )
            return encode(Failed.of(key, self._placed(failure, request)))

    def _do(self, request: Prepare | Train | Mask | Evaluate | Describe) -> Answer:
        if isinstance(request, Prepare):
            self.close()  # the old run's memory first
            self._prepare = None
            self._session = open_session(request)
            self._prepare = request
            return self._session.prepared()
        if self._prepare is None:
            raise Malformed(f"{request.kind} before prepare")
        session = self._open_at(self._prepare, request.round)
        on_step = self._on_step(request.key)
        do = getattr(session, request.kind, None)  # each request has the name of a session's method
        if do is None:
            raise Malformed(f"{request.kind} in a run whose job does not ask for it", field="kind", value=request.kind)
        answer: Answer = do(request, on_step)
        return answer

    def _open_at(self, prepare: Prepare, round_: int) -> Session:
        """The session of a round, opened anew where the job's `[app]` has other values in it."""
        if self._session is not None:
            self._session = self._session.at(round_)
        if self._session is None:
            self._session = open_session(prepare, round_)
        return self._session

    def _on_step(self, key: str) -> OnStep:
        last_s = time.monotonic()

        def on_step(done: int, total: int) -> None:
            nonlocal last_s
            if self._inbox.is_cancelled(key):
                raise Stale(f"task {key} was cancelled", field=key)
            if total and (time.monotonic() - last_s > PROGRESS_EVERY_S or done == total):
                last_s = time.monotonic()
                self._connection.sendall(encode(Progress(key=key, done=done, total=total)))

        return on_step

    def _placed(self, error: AtollError, request: Prepare | Train | Mask | Evaluate | Describe) -> AtollError:
        """The error with site, run and round, where it does not name them itself."""
        session = request if isinstance(request, Prepare) else self._prepare
        if isinstance(error, RemoteError) and session is not None:
            error.site, error.run = error.site or session.site, error.run or session.run
            error.round = error.round or getattr(request, "round", 0)
        return error


def work(socket_path: str) -> None:
    """Be the worker of the agent that listens there, until it says Close."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(socket_path)
    work_over(connection)


def work_over(connection: socket.socket, hello: bytes = b"") -> None:
    """Be the worker of whoever is at the other end, until it says Close. `hello` is said first."""
    faulthandler.enable()  # a crash inside torch leaves a trace in the log
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    connection.sendall(hello)
    inbox = Inbox(connection)
    threading.Thread(target=inbox.read_forever, name="inbox", daemon=True).start()
    worker = Worker(connection, inbox)
    try:
        worker.serve()
    finally:
        worker.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="The torch process of an Atoll site; started by its agent.")
    parser.add_argument("--socket", required=True, help="unix socket on which the agent listens")
    work(parser.parse_args().socket)


if __name__ == "__main__":
    main()
