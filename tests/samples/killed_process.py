"""A server or a site's agent that kills itself (SIGKILL) when a named step comes for the nth time.

python killed_process.py server|site FOLDER STEP NTH
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path


def kill_at(step: str, nth: int) -> Callable[[str, str], None]:
    """An observer of steps."""
    left = nth

    def observe(now: str, subject: str) -> None:
        nonlocal left
        left -= now == step
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    return observe


def main(kind: str, folder: str, step: str, nth: str) -> None:
    if kind == "server":
        from atoll.server.main import run_server

        run_server(Path(folder), kill_at(step, int(nth)))
    else:
        from atoll.client.main import run_agent

        run_agent(Path(folder), kill_at(step, int(nth)))


if __name__ == "__main__":
    main(*sys.argv[1:])
