"""The agent's end of a script: a worker that somebody else starts, beside the agent. Loads no torch.

Where `WorkerProcess` starts a process, this waits until one has connected. All else is the same: the same requests, the
same death, after which the agent asks the next script for the same task. The socket lies in the site's own folder, which
its account alone can open, and is there only while no script is connected: a run has one at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from atoll.cluster.messages import LINE_BYTES
from atoll.cluster.worker_process import CLOSE_TIMEOUT_S, WorkerDied, WorkerProcess

WAITING = "script.socket"  # file in the run's folder that says where the agent listens, while it waits for a script


class _Line(asyncio.StreamReaderProtocol):
    """A stream that says when the other end is gone, also while nobody reads."""

    def __init__(self, reader: asyncio.StreamReader, take: Callable[[_Line, asyncio.StreamWriter], None]) -> None:
        self.reader, self.ended = reader, asyncio.Event()
        self.transport: asyncio.BaseTransport | None = None
        super().__init__(reader, lambda reader, writer: take(self, writer))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        super().connection_made(transport)

    def eof_received(self) -> bool | None:
        self.ended.set()
        return super().eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set()
        super().connection_lost(exc)


class _Peer:
    """The process at the other end, as far as this one can know: it lives while its end of the line does."""

    returncode = None

    def __init__(self, line: _Line, pid: int) -> None:
        self.pid, self._line = pid, line

    @property
    def lives(self) -> bool:
        return not self._line.ended.is_set()

    async def wait(self) -> int:
        await self._line.ended.wait()
        return 0

    def kill(self) -> None:
        """Hang up. `atoll site exec` ends what it has started, or connects again."""
        if isinstance(self._line.transport, asyncio.WriteTransport):
            self._line.transport.abort()


class AwaitedScript(WorkerProcess):
    """The script of one run."""

    def __init__(self, folder: Path, *, on_waiting: Callable[[], None]) -> None:
        """`folder` (made when absent, mode 0700) holds the socket; `on_waiting` is called once it is there."""
        super().__init__(folder)
        self._on_waiting = on_waiting
        self._closed = asyncio.Event()

    async def start(self, timeout_s: float | None = None) -> None:
        """Wait until a script has connected: as long as it takes, unless told. Raises WorkerDied where that is too long."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        loop = asyncio.get_running_loop()
        connected: asyncio.Future[tuple[_Line, asyncio.StreamWriter]] = loop.create_future()

        def take(line: _Line, writer: asyncio.StreamWriter) -> None:
            if connected.done():
                writer.close()
            else:
                connected.set_result((line, writer))

        with contextlib.ExitStack() as cleanup:
            path = self._socket_path(cleanup)
            server = await loop.create_unix_server(
                lambda: _Line(asyncio.StreamReader(limit=LINE_BYTES, loop=loop), take), path
            )
            cleanup.callback(server.close)
            os.chmod(path, 0o600)
            waiting = self._folder / WAITING
            cleanup.callback(waiting.unlink, missing_ok=True)
            draft = waiting.with_suffix(".draft")
            draft.write_text(path)
            draft.replace(waiting)
            self._on_waiting()
            closed: asyncio.Future[Any] = asyncio.ensure_future(self._closed.wait())
            try:
                either: set[asyncio.Future[Any]] = {connected, closed}
                await asyncio.wait(either, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            finally:
                closed.cancel()
            if not connected.done():
                connected.cancel()
                raise WorkerDied("no script has joined the run", returncode=None, log_tail="")
        line, self._writer = connected.result()
        self._reader, self._process = line.reader, _Peer(line, _pid_of(self._writer))

    async def close(self) -> None:
        """Let go of the script, or stop waiting for one. Safe to call twice."""
        self._closed.set()
        await super().close()

    def kill(self) -> None:
        self._closed.set()
        super().kill()

    async def _death(self, what: str) -> WorkerDied:
        await self._end(CLOSE_TIMEOUT_S)
        return WorkerDied(f"the script {what}; what it printed is where it was started", returncode=None, log_tail="")


def _pid_of(writer: asyncio.StreamWriter) -> int:
    """The process at the other end; 0 where the system does not say."""
    connection = writer.get_extra_info("socket")
    if not hasattr(socket, "SO_PEERCRED"):
        return 0
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", packed)[0])
