"""A server or a site's agent that kills itself (SIGKILL) in a phase of a session of secure aggregation.

python killed_session.py server FOLDER PHASE [NTH]      when it is about to tell the sites of a phase (secure_session.At)
python killed_session.py site   FOLDER STEP             when it has heard a step, and has said nothing to it
python killed_session.py silent FOLDER STEP             as site, once its answer is durable, and before it is sent
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def server(folder: Path, phase: str, nth: int) -> None:
    from atoll.client.region import join_region
    from atoll.server.main import run_server
    from atoll.server.secure_held import HeldSession
    from atoll.server.steps import unobserved

    say_all, left = HeldSession._say_all, nth

    def told(self: HeldSession) -> None:
        nonlocal left
        left -= self._now.at.name == phase
        if left == 0:
            die()
        say_all(self)

    HeldSession._say_all = told  # type: ignore[method-assign]
    run_server(folder, unobserved, join_region)


def site(folder: Path, step: str, *, answers: bool) -> None:
    from atoll.client.main import run_agent
    from atoll.client.secure_session import SecureSession

    taken = {"shares": "masked"}.get(step, "take") if answers else "take"
    method = getattr(SecureSession, taken)

    def take(self: SecureSession, message: object, *more: object) -> object:
        mine = message.WhichOneof("step") == step  # type: ignore[attr-defined]
        if mine and not answers:
            die()
        found = method(self, message, *more)
        if mine:
            die()
        return found

    setattr(SecureSession, taken, take)
    run_agent(folder)


if __name__ == "__main__":
    kind, where, when, *nth = sys.argv[1:]
    if kind == "server":
        server(Path(where), when, int(nth[0]) if nth else 1)
    else:
        site(Path(where), when, answers=kind == "silent")
