"""Processes that need not load torch again: forked from one that has it, by the standard library's fork server.

A server, or `atoll run`, spends some core-seconds on imports before its first line, and these tests start hundreds. What is
forked is a process like any other, with an id, descriptors and an environment of its own, to be stopped and killed.
Agents are not started so: they hold no torch.
"""

from __future__ import annotations

import gc
import importlib
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from samples.fork_server import LOADED, fork_server


class Started(Protocol):
    """What these tests use of `subprocess.Popen`."""

    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> int | None: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int) -> None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


class Forked:
    """A forked process, with the methods of `subprocess.Popen`."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], out: Path, err: Path) -> None:
        """`arguments` as for exec: Python, and a file or `-m` and a module. Appends to `out` and `err`."""
        self._process = fork_server().Process(
            target=_become, args=([*arguments], {**environment}, out, err), daemon=True
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return code

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _become(arguments: list[str], environment: dict[str, str], out: Path, err: Path) -> None:
    """Be what `exec` of these arguments would have become."""
    missing = [name for name in LOADED if name not in sys.modules]
    assert not missing, f"the fork server has not loaded {missing}"
    gc.freeze()
    os.environ.clear()
    os.environ.update(environment)
    for number, path, flags in ((0, Path(os.devnull), os.O_RDONLY), (1, out, os.O_APPEND), (2, err, os.O_APPEND)):
        file = os.open(path, flags | os.O_CREAT | (os.O_WRONLY if number else 0))
        os.dup2(file, number)
        os.close(file)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115  for as long as the process lives
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.path[:0] = [part for part in environment.get("PYTHONPATH", "").split(os.pathsep) if part]
    importlib.invalidate_caches()
    _, program, *rest = arguments
    if program == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [program, *rest]
        runpy.run_path(program, run_name="__main__")
