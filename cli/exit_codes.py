"""What the exit codes of `atoll` mean. Scripts, schedulers and unit files depend on them: a number never changes its
meaning, and a retired one is not given out again.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Every code that the command returns."""

    OK = 0
    FAULT = 1
    CONFIG = 2
    LOCAL = 3
    REFUSED = 4
    NOT_FINISHED = 5
    INTERRUPTED = 130


MEANING: dict[ExitCode, str] = {
    ExitCode.OK: "done",
    ExitCode.FAULT: "a fault in Atoll itself: please report it with the output of --debug",
    ExitCode.CONFIG: "an option, a settings file or a job says something that cannot be done: correct it",
    ExitCode.LOCAL: "this machine cannot do it: identity, disk, port, device",
    ExitCode.REFUSED: "the other side refused or could not be reached; the message says why",
    ExitCode.NOT_FINISHED: "the run that was followed failed or was stopped",
    ExitCode.INTERRUPTED: "interrupted with Ctrl-C; a submitted run goes on",
}


def table() -> str:
    """The codes with their meaning, one a line, as `atoll --help` prints them."""
    return "\n".join(f"  {code.value:>3}  {text}" for code, text in MEANING.items())
