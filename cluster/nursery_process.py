"""The agent's end of a nursery: starts it at need, has it fork workers, learns of their ends. Loads no torch.

The nursery is started for the first worker, not before: an agent that waits for its first run, or never gets one,
costs no more than itself, and the nursery has the environment that this worker is to have. Who wants another
environment starts a worker directly, as does everybody where nothing can be forked: see `Nursery.fork`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from atoll.cluster.nursery_messages import PACKET_BYTES, Ended, Fork, Forked, Refused, decode, encode
from atoll.wire.errors import Malformed

FORKS = sys.platform == "linux"
"""macOS does not support a fork without exec after its system libraries, which torch loads, have been used; and pidfds
and packets between unix sockets are Linux's own. Elsewhere workers are started directly."""

_log = logging.getLogger(__name__)


class ForkedProcess:
    """A worker that a nursery forked. No child of this process: a pidfd is held, so that `kill` meets nobody else."""

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid = pid
        self._pidfd = pidfd
        self._ended: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()

    @property
    def lives(self) -> bool:
        """Whether the process has not ended yet."""
        return not self._ended.done()

    @property
    def returncode(self) -> int | None:
        """As subprocess has it; None while it lives, and where the nursery that would know it has ended before."""
        return self._ended.result() if self._ended.done() else None

    async def wait(self) -> int | None:
        """The return code, once the process has ended."""
        return await asyncio.shield(self._ended)

    def kill(self) -> None:
        """SIGKILL, unless it has ended."""
        if self.lives:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def end(self, returncode: int | None) -> None:
        """It has ended, says the nursery."""
        os.close(self._pidfd)
        self._ended.set_result(returncode)

    def orphan(self) -> None:
        """Its nursery is gone; from now on the kernel alone says when it ends."""
        asyncio.get_running_loop().add_reader(self._pidfd, self._gone)

    def _gone(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        self.end(None)


class Nursery:
    """One nursery process, started again where it has died. Its workers do not end with it; `close` when they have."""

    def __init__(self, log_path: Path, *, trains: bool = True) -> None:
        """`log_path` takes what the nursery itself has to say. `trains=False`: its workers only evaluate."""
        self._log_path, self._trains = log_path, trains
        self._process: asyncio.subprocess.Process | None = None
        self._control: socket.socket | None = None  # while the process runs, as far as is known
        self._environment: Mapping[str, str] = {}
        self._launch_turn = asyncio.Lock()
        self._asked: deque[asyncio.Future[ForkedProcess | None]] = deque()
        self._workers: dict[int, ForkedProcess] = {}  # that live, by pid

    @property
    def pid(self) -> int | None:
        """Process id of the nursery while it runs, else None."""
        return self._process.pid if self._process and self._process.returncode is None else None

    async def fork(self, socket_path: str, log: IO[bytes], env: Mapping[str, str]) -> ForkedProcess | None:
        """A worker that connects to `socket_path` and writes to `log`. None: start it directly.

        That is so where the system cannot fork, where the nursery has another environment than `env` (libraries read
        theirs when they are loaded), and where the nursery failed, which its log explains.
        """
        if not FORKS:
            return None
        async with self._launch_turn:
            if self._control is None and not await self._has_failed():
                await self._launch(env)
        if self._control is None or env != self._environment:
            return None
        try:
            socket.send_fds(self._control, [encode(Fork(socket_path=socket_path))], [log.fileno()])
        except OSError:  # it has just died; `_read` is about to learn of it
            return None
        answer: asyncio.Future[ForkedProcess | None] = asyncio.get_running_loop().create_future()
        self._asked.append(answer)
        return await answer

    async def close(self) -> None:
        """End the nursery. Safe to call twice, or where none was started."""
        self._lose()
        if self._process is not None:
            if self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError):  # it has nothing to put in order, and may be loading
                    os.kill(self._process.pid, signal.SIGKILL)
            await self._process.wait()

    # ---------------------------------------------------------------------------------------------------------------

    async def _has_failed(self) -> bool:
        """Whether the last nursery gave up by itself, as the next one would; one that was killed did not."""
        return self._process is not None and await self._process.wait() > 0

    async def _launch(self, env: Mapping[str, str]) -> None:
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.ExitStack() as on_failure, theirs, self._log_path.open("wb") as log:
            on_failure.callback(ours.close)
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", "atoll.cluster.nursery", "--control", str(theirs.fileno()),
                *([] if self._trains else ["--evaluates-only"]),
                stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, env=env,
                pass_fds=[theirs.fileno()], start_new_session=True,
            )  # fmt: skip
            on_failure.pop_all()
        ours.setblocking(False)
        asyncio.get_running_loop().add_reader(ours, self._read)
        self._control, self._environment = ours, dict(env)

    def _read(self) -> None:
        """One packet from the nursery, or its end."""
        assert self._control is not None
        try:
            packet, fds, _, _ = socket.recv_fds(self._control, PACKET_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        except (BlockingIOError, ConnectionResetError):  # reset: it ended with requests unread; what it sent comes next
            return
        try:
            message = decode(packet) if packet else None
        except Malformed as error:
            _log.error("%s", error)
            message = None
        match message:
            case Forked(pid=pid):
                self._forked(ForkedProcess(pid, fds[0]))
            case Refused(reason=reason):
                _log.warning("a worker is started directly: %s", reason)
                self._answer(None)
            case Ended(pid=pid, returncode=returncode):
                self._workers.pop(pid).end(returncode)
            case _:
                _log.warning("the nursery of this process's workers has ended; see %s", self._log_path)
                self._lose()

    def _forked(self, worker: ForkedProcess) -> None:
        self._workers[worker.pid] = worker
        if not self._answer(worker):
            worker.kill()  # who asked for it was cancelled meanwhile

    def _answer(self, worker: ForkedProcess | None) -> bool:
        answer = self._asked.popleft()
        if is_wanted := not answer.done():
            answer.set_result(worker)
        return is_wanted

    def _lose(self) -> None:
        """The nursery has ended, or is to. Workers that it would have told of are watched one by one."""
        if self._control is None:
            return
        asyncio.get_running_loop().remove_reader(self._control)
        self._control.close()
        self._control = None
        while self._asked:
            self._answer(None)
        for worker in self._workers.values():
            worker.orphan()
        self._workers.clear()
