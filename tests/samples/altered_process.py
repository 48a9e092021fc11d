"""A server or a site's agent in an altered world, which files steer while it runs.

python altered_process.py server|site FOLDER ALTERATIONS

ALTERATIONS is a JSON object; each key may be absent:

- "fatal": a file. When it names the step that has just come, it is removed and the process killed (SIGKILL).
- "clock": a file with seconds. The wall clock of this process is off by as much.
- "keepalive_s": a connection on which nothing comes is tried after so long, and given up after as long again.
"""

from __future__ import annotations

import datetime
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def alter_clock(path: Path) -> None:
    """Patch what Python reads the wall clock with. Must come before any import of atoll."""
    real_time, real_time_ns, real_datetime = time.time, time.time_ns, datetime.datetime

    def ahead_s() -> float:
        try:
            return float(path.read_text() or 0)
        except FileNotFoundError:
            return 0.0

    class Altered(real_datetime):  # type: ignore[valid-type, misc]
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:
            return real_datetime.now(tz) + datetime.timedelta(seconds=ahead_s())

    time.time = lambda: real_time() + ahead_s()
    time.time_ns = lambda: real_time_ns() + int(ahead_s() * 1e9)
    datetime.datetime = Altered  # type: ignore[misc]


def alter_keepalive(seconds: float) -> None:
    """Have both ends of a connection ask whether the other is there more often."""
    from atoll.transport import credentials

    milliseconds = int(seconds * 1000)
    names = ("grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms")
    credentials.KEEPALIVE_MS = milliseconds
    credentials._SHARED = tuple((name, milliseconds if name in names else value) for name, value in credentials._SHARED)


def kill_at(path: Path | None) -> Callable[[str, str], None]:
    """An observer of steps that dies at the one in the file."""

    def observe(now: str, subject: str) -> None:
        if path is None:
            return
        with suppress(FileNotFoundError):
            if path.read_text() == now:
                path.unlink()
                os.kill(os.getpid(), signal.SIGKILL)

    return observe


def main(kind: str, folder: str, text: str) -> None:
    alterations = json.loads(text)
    if "clock" in alterations:
        alter_clock(Path(alterations["clock"]))
    if "keepalive_s" in alterations:
        alter_keepalive(alterations["keepalive_s"])
    on_step = kill_at(Path(alterations["fatal"]) if "fatal" in alterations else None)
    if kind == "server":
        from atoll.server.main import run_server

        run_server(Path(folder), on_step)
    else:
        from atoll.client.main import run_agent

        run_agent(Path(folder), on_step)


if __name__ == "__main__":
    main(*sys.argv[1:])
