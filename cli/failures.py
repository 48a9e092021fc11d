"""From an exception to one clear line on stderr and an exit code. A traceback appears only where it was asked for."""

from __future__ import annotations

import os
import sys

from atoll.cli.exit_codes import ExitCode
from atoll.cli.output import one_line

TRACEBACK_VARIABLE = "ATOLL_TRACEBACK"


def report(error: BaseException) -> int:
    """Prints why the command failed, and returns the exit code that says so."""
    if isinstance(error, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
        return ExitCode.INTERRUPTED
    _close_broken_pipe(error)
    if os.environ.get(TRACEBACK_VARIABLE, "") not in ("", "0"):
        import traceback

        traceback.print_exception(error)
    code = exit_code(error)
    text = one_line(str(error)) or type(error).__name__
    if code is ExitCode.FAULT:
        text = f"{type(error).__name__}: {text} (a fault in Atoll; `atoll --debug ...` shows where)"
    print(f"atoll: {text}", file=sys.stderr)
    return code


def exit_code(error: BaseException) -> ExitCode:
    """The code for `error`: that of its kind in `atoll.wire.errors`, or FAULT for anything that we did not foresee."""
    from atoll.wire.errors import AtollError, RemoteError

    if isinstance(error, AtollError):
        return ExitCode.REFUSED if isinstance(error, RemoteError) else ExitCode(error.exit_code)
    return ExitCode.LOCAL if isinstance(error, OSError) else ExitCode.FAULT


def _close_broken_pipe(error: BaseException) -> None:
    """Ends quietly where the reader of our output is gone, as in `atoll runs | head -1`."""
    if isinstance(error, BrokenPipeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(ExitCode.OK)
