"""Where the processes of a world meet: each other, by a store, and the worker that speaks for them, by a socket.

On one machine both are files in a private folder, so nothing listens to other machines. Over several machines they are two
ports on one address of the worker's machine. Whoever connects to the worker says the world's secret first. The store, as
torch's collectives themselves, has no such check: the network between the nodes must be the site's own.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

SECRET_VARIABLE = "ATOLL_WORLD_SECRET"
KEEP_ALIVE_S = 20  # until a silent connection is probed; a machine without power says no goodbye
NUM_PROBES, PROBE_EVERY_S = 4, 10


@dataclass(frozen=True, slots=True)
class FolderMeeting:
    """A private folder of this machine."""

    folder: Path

    @property
    def text(self) -> str:
        """The folder."""
        return str(self.folder)

    @property
    def socket_path(self) -> str:
        return str(self.folder / "ranks.sock")

    def listen(self) -> socket.socket:
        """The worker's end."""
        server = socket.socket(socket.AF_UNIX)
        server.bind(self.socket_path)
        server.listen(128)
        return server

    def connect(self) -> socket.socket:
        """A rank's end."""
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self.socket_path)
        return connection


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkMeeting:
    """Two ports of one address."""

    address: str
    store_port: int
    port: int  # of the worker

    @property
    def text(self) -> str:
        """`host:port:port`."""
        return f"{self.address}:{self.store_port}:{self.port}"

    def connect(self) -> socket.socket:
        """A rank's end."""
        connection = socket.create_connection((self.address, self.port), timeout=60)
        connection.settimeout(None)
        keep_alive(connection)
        return connection


def parse_meeting(text: str) -> FolderMeeting | NetworkMeeting:
    """What `text` of a meeting says."""
    if text.startswith(os.sep):
        return FolderMeeting(Path(text))
    address, store_port, port = text.rsplit(":", 2)
    return NetworkMeeting(address=address, store_port=int(store_port), port=int(port))


def listen_on(address: str, port: int) -> socket.socket:
    """A socket that listens on one address of this machine; port 0 is a free one.

    Raises:
        OSError: the address is not this machine's, or the port is taken.
    """
    server = socket.socket(socket.AF_INET)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind((address, port))
        server.listen(1024)
    except OSError:
        server.close()
        raise
    return server


def keep_alive(connection: socket.socket) -> None:
    """Ends the connection within about a minute after its other end's machine has gone."""
    if connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):  # not on macOS
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEP_ALIVE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_EVERY_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, NUM_PROBES)
