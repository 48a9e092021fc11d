"""On PYTHONPATH of an agent: kills a worker (SIGKILL) once, in the phase that the file `fatal` beside this one names.

Python imports it before anything else, also in the nursery that workers are forked from. The agent is left alone, and so is every worker after the first death.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

# Phase -> what is seen before it, in order: files that the worker opens, by a part of their path.
PHASES: dict[str, list[str]] = {
    "start": [],
    "prepare": ["trial_apps"],  # the app's code
    "training": [".safetensors", ".fault", ".fault", ".fault"],  # the base version, then the app at each step
    "writing": [".safetensors"],  # and then the end of the encoding, see below
    "evaluation": ["/2.safetensors"],  # nobody trains from the last version
}
FATAL = Path(__file__).with_name("fatal")


def die() -> None:
    FATAL.unlink()
    os.kill(os.getpid(), signal.SIGKILL)


def die_before_the_checksum(_: object) -> int:
    """In place of the checksum of an update whose bytes are written and not yet durable."""
    die()
    return 0


def watch(phase: str) -> None:
    """Die when the phase has come."""
    expected = list(PHASES[phase])

    def seen(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and expected and expected[0] in str(arguments[0]):
            del expected[0]
            if expected:
                return
            if phase == "writing":
                sys.modules["atoll.cluster.run_session"].crc32_of = die_before_the_checksum  # type: ignore[attr-defined]
            else:
                die()

    if expected:
        sys.addaudithook(seen)
    else:
        die()


forks = 0


def count_fork() -> None:
    global forks
    forks += 1


def in_forked_worker() -> None:
    if forks > 1 and FATAL.exists():  # the first fork of a nursery is a trial
        watch(FATAL.read_text())


if "atoll.cluster.nursery" in sys.orig_argv:
    os.register_at_fork(before=count_fork, after_in_child=in_forked_worker)
elif "atoll.cluster.worker" in sys.orig_argv and FATAL.exists():
    watch(FATAL.read_text())
