"""A world of ranks, from its start to its end: launches it, waits until all are there, and holds a connection to each."""

from __future__ import annotations

import contextlib
import hmac
import io
import logging
import os
import secrets
import socket
import subprocess
import tempfile
import time
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import TCPStore

from atoll.cluster.parallel.launchers.choose import launch_of
from atoll.cluster.parallel.launchers.spec import Launch, WorldSpec, world_spec
from atoll.cluster.parallel.meeting import FolderMeeting, NetworkMeeting, keep_alive, listen_on
from atoll.cluster.parallel.world_section import WorldSection
from atoll.wire.errors import LocalError
from atoll.wire.parallel_section import ParallelSection

CLOSE_S = 10.0  # for the ranks to end in order
LOOK_EVERY_S = 0.1
HELLO_S = 5.0  # for who has connected to say which rank it is
WITHDRAW_S = 60.0
_log = logging.getLogger("atoll.worker")


def backend_of(section: ParallelSection, device_type: str) -> str:
    """What the ranks speak with each other: "gloo" or "nccl"."""
    return section.backend if section.backend != "auto" else "gloo" if device_type == "cpu" else "nccl"


def planned(
    world: WorldSection, section: ParallelSection, count: int, device_type: str, *, folder: Path, ports: tuple[int, int]
) -> tuple[WorldSpec, Launch]:
    """A start of the world, under a new generation and secret; nothing is started.

    Args:
        count: of processes.
        folder: where the ranks meet with `launcher = "local"`.
        ports: of the store and of the worker, with any other launcher.
    """
    meeting: FolderMeeting | NetworkMeeting = FolderMeeting(folder)
    if world.launcher != "local":
        meeting = NetworkMeeting(address=world.address or "", store_port=ports[0], port=ports[1])
    spec = world_spec(
        world,
        num_processes=count,
        meeting=meeting,
        generation=secrets.token_hex(4),
        secret=secrets.token_hex(32),
        backend=backend_of(section, device_type),
        device_type=device_type,
        timeouts=section.timeouts,
    )
    return spec, launch_of(spec, world)


class World:
    """`connections` holds one for each rank, once all are there."""

    def __init__(self, world: WorldSection, section: ParallelSection, count: int, device_type: str) -> None:
        """Start it, and wait for all ranks.

        Raises:
            LocalError: the address or a port cannot be had, the launcher is not there or fails, or ranks are missing after
                `parallel.timeouts.start`.
        """
        self.connections: dict[int, tuple[socket.socket, io.BufferedReader]] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="atoll-")
        self._count = count
        self._launched: subprocess.Popen[bytes] | None = None
        self._launch: Launch | None = None
        try:
            ports = self._listen(world)
            self._spec, self._launch = planned(
                world, section, count, device_type, folder=Path(self._folder.name), ports=ports
            )
            with self._server:
                self._launched = self._run(self._launch)
                self._await_ranks(section.timeouts.start)
        except BaseException:
            self.close(in_order=False)
            raise

    def close(self, *, in_order: bool = True) -> None:
        """End what is left; in order where all ranks were told to close."""
        launched = self._launched
        if in_order and launched is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                launched.wait(CLOSE_S)
        for connection, _ in self.connections.values():
            with contextlib.suppress(OSError):  # a rank that still computes ends when it finds it closed
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        if launched is not None and launched.poll() is None:
            launched.terminate()
            try:
                launched.wait(CLOSE_S)
            except subprocess.TimeoutExpired:
                launched.kill()
                launched.wait()
        if launched is not None and launched.stdin is not None:
            with contextlib.suppress(OSError):
                launched.stdin.close()
        if launched is not None and self._launch is not None and self._launch.withdraw is not None:
            _withdraw(self._launch.withdraw)
        self._folder.cleanup()

    def _listen(self, world: WorldSection) -> tuple[int, int]:
        """The ports of store and worker; zeros on one machine."""
        if world.launcher == "local":
            self._server = FolderMeeting(Path(self._folder.name)).listen()
            return 0, 0
        address = world.address or ""
        try:
            with listen_on(address, world.port) as server:
                store_port = int(server.getsockname()[1])
                self._store = TCPStore(
                    address,
                    store_port,
                    is_master=True,
                    wait_for_workers=False,
                    timeout=timedelta(seconds=HELLO_S),
                    master_listen_fd=server.detach(),  # of this address alone, where torch's own would be of all
                )
            self._server = listen_on(address, world.port + 1 if world.port else 0)
        except OSError as error:
            raise LocalError(
                f"world: no listening on {address}, port {world.port or 'any'}: {error.strerror or error}; address must be "
                "one of this machine, and port and the next one free"
            ) from None
        return store_port, int(self._server.getsockname()[1])

    def _run(self, launch: Launch) -> subprocess.Popen[bytes]:
        try:
            found = subprocess.Popen(launch.command, stdin=subprocess.PIPE, env={**os.environ, **launch.environment})
        except OSError as error:
            raise LocalError(f"world: {launch.command[0]} cannot be run: {error.strerror or error}") from None
        if launch.text is not None and found.stdin is not None:
            with contextlib.suppress(OSError):  # it has ended, and says why in the log
                found.stdin.write(launch.text.encode())
                found.stdin.close()
        return found

    def _await_ranks(self, timeout_s: float) -> None:
        end_s = time.monotonic() + timeout_s
        self._server.settimeout(LOOK_EVERY_S)
        while len(self.connections) < self._count:
            if self._has_failed() or time.monotonic() > end_s:
                raise LocalError(
                    f"{len(self.connections)} of {self._count} processes of [parallel] started within {timeout_s:g} s; the "
                    "worker's log says why, and parallel.timeouts.start how long to wait"
                )
            with contextlib.suppress(TimeoutError):
                connection, _ = self._server.accept()
                self._welcome(connection)

    def _has_failed(self) -> bool:
        assert self._launched is not None
        assert self._launch is not None
        code = self._launched.poll()
        return code is not None and (self._launch.stays or code != 0)

    def _welcome(self, connection: socket.socket) -> None:
        connection.settimeout(HELLO_S)
        lines = connection.makefile("rb")
        try:
            secret, _, rank = lines.readline(128).decode("ascii").partition(" ")
            if not hmac.compare_digest(secret, self._spec.secret) or int(rank) not in range(self._count):
                raise ValueError
            if int(rank) in self.connections:
                raise ValueError
        except (OSError, ValueError):
            _log.warning("somebody who is no rank of this world has called; the connection is closed")
            lines.close()
            connection.close()
            return
        connection.settimeout(None)
        keep_alive(connection)
        self.connections[int(rank)] = (connection, lines)


def _withdraw(command: tuple[str, ...]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=WITHDRAW_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        _log.error("%s: %s", command[0], error)
        return
    if done.returncode:
        _log.error("%s ended with %d: %s", command[0], done.returncode, done.stderr.strip()[-500:])
