"""The demo's processes: each is the real `atoll` command, with a log of its own, and none outlives the demo."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Self

from atoll.wire.errors import LocalError

STOP_TIMEOUT_S = 15.0  # a server lets transfers end; after that, SIGKILL
START_TIMEOUT_S = 60.0  # imports from a cold disk
_PR_SET_PDEATHSIG = 1


class DemoFailed(LocalError):
    """A process of the demo failed; the message says which, what it said last, and where its log is."""


class Crew:
    """Starts processes and ends them. Use with `with`: leaving the block, however it is left, stops them all."""

    def __init__(self, logs: Path, environment: Mapping[str, str]) -> None:
        self.logs = logs
        self._environment = dict(environment)
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        logs.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, name: str, *arguments: str | Path) -> None:
        """Starts `atoll ARGUMENTS` as a process that goes on until `stop`. To be called from the main thread."""
        self.start_program(name, atoll_command(*arguments))

    def start_program(self, name: str, command: list[str]) -> None:
        """The same of another command."""
        with (self.logs / f"{name}.log").open("ab") as log, _ctrl_c_held_back():
            self._running[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,  # Ctrl-C reaches the demo alone, which then ends them in order
                preexec_fn=_die_with_parent(),  # noqa: PLW1509  no other thread runs when this is called
            )

    def ask(self, name: str, command: list[str], *, text: str = "", screen: IO[str] | None = None) -> str:
        """Runs a command to its end and returns what it printed on stdout.

        Args:
            text: given to it on stdin.
            screen: where its stderr goes; its log where None.

        Raises:
            DemoFailed: it ended with another code than 0.
        """
        path = self.logs / f"{name}.log"
        with path.open("a") as log:
            done = subprocess.run(
                command,
                input=text,
                stdout=subprocess.PIPE,
                stderr=screen or log,
                env=self._environment,
                text=True,
                start_new_session=True,
                check=False,
            )
            log.write(done.stdout)
        if done.returncode != 0:
            raise DemoFailed(f"{name} ended with code {done.returncode}: {_last_line(path)}; its log: {path}")
        return done.stdout

    def await_port(self, name: str, port: int) -> None:
        """Returns when the process `name` listens on the loopback port.

        Raises:
            DemoFailed: it died, or does not listen after a minute.
        """
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline_s:
            self.check()
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return
            time.sleep(0.05)
        raise DemoFailed(
            f"{name} does not listen on port {port} after {START_TIMEOUT_S:.0f} s; its log: {self._log(name)}"
        )

    def pids(self) -> dict[str, int]:
        """Process ids of those that go on, by name."""
        return {name: process.pid for name, process in self._running.items()}

    def check(self) -> None:
        """Raises DemoFailed where a process that should go on has ended."""
        for name, process in self._running.items():
            if process.poll() is not None:
                path = self._log(name)
                raise DemoFailed(f"{name} ended with code {process.returncode}: {_last_line(path)}; its log: {path}")

    def stop(self) -> None:
        """Ends all processes: the last started first, by SIGTERM, and by SIGKILL where that is not enough."""
        for process in reversed(self._running.values()):
            if process.poll() is None:
                process.terminate()
        deadline_s = time.monotonic() + STOP_TIMEOUT_S
        for process in self._running.values():
            try:
                process.wait(max(deadline_s - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._running.clear()

    def _log(self, name: str) -> Path:
        return self.logs / f"{name}.log"


def atoll_command(*arguments: str | Path) -> list[str]:
    """The command line of `atoll ARGUMENTS` in this Python."""
    return [sys.executable, "-m", "atoll.cli", *map(str, arguments)]


def free_ports(count: int) -> list[int]:
    """So many loopback ports that nobody listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def _last_line(path: Path) -> str:
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else "it said nothing"


@contextmanager
def _ctrl_c_held_back() -> Iterator[None]:
    """Ctrl-C arrives after the block, not in it: Python drops what is raised in the hooks that run around a fork."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _die_with_parent() -> Callable[[], None]:
    """What a child does before it starts, so that it ends even when the demo is killed with SIGKILL (Linux only)."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    parent = os.getpid()

    def before_start() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # held back in the demo, for the fork alone
        if libc is not None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != parent:  # it died in between
                os._exit(1)

    return before_start
