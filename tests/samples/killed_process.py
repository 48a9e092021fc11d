"""A server or a site's agent that kills itself (SIGKILL) when a named step comes for the nth time.

python killed_process.py server|site|region FOLDER STEP NTH

"region" is a server whose agent towards its upper server is told the step.
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
        from atoll.client.region import join_region
        from atoll.server.main import run_server

        run_server(Path(folder), kill_at(step, int(nth)), join_region)
    elif kind == "region":
        from atoll.client.region import RegionSite
        from atoll.server.main import run_server

        observe = kill_at(step, int(nth))
        run_server(Path(folder), join=lambda home, region: RegionSite(home, region, observe))
    else:
        from atoll.client.main import run_agent

        run_agent(Path(folder), kill_at(step, int(nth)))


if __name__ == "__main__":
    main(*sys.argv[1:])
