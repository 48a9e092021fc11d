"""A script's end of the line to `atoll site exec`. Loads no torch.

A thread reads, so that a process ends with `atoll site exec`, even in the middle of a long step: what it would compute
then, nobody would take. Nothing of it outlives the command that an administrator has started.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import sys
import threading
from typing import NoReturn

from atoll.cluster.messages import LINE_BYTES
from atoll.cluster.script.messages import FromRelay, Hello, ToRelay, decode, encode
from atoll.wire.errors import AtollError

EXIT_ORPHANED = 3


class Channel:
    """One process of a script, connected."""

    def __init__(self, path: str, *, rank: int, world_size: int) -> None:
        """Connects to the socket `path` and says who this is. Raises OSError where nobody listens."""
        self.rank, self.world_size = rank, world_size
        self._received: queue.SimpleQueue[FromRelay] = queue.SimpleQueue()
        self._is_left = False
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(path)
        self.send(Hello(rank=rank, world_size=world_size))
        threading.Thread(target=self._read, name="atoll", daemon=True).start()

    def send(self, message: ToRelay) -> None:
        """Say something. A relay that is gone ends this process."""
        try:
            self._connection.sendall(encode(message))
        except OSError:
            self._orphaned()

    def receive(self) -> FromRelay:
        """The next message; waits for it."""
        return self._received.get()

    def leave(self) -> None:
        """Take no more part; the process lives on."""
        self._is_left = True
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # which ends the reading thread too

    def _read(self) -> None:
        try:
            with self._connection.makefile("rb") as lines:
                while line := lines.readline(LINE_BYTES):
                    self._received.put(decode(line))  # type: ignore[arg-type]  # a relay sends nothing else
        except (OSError, AtollError) as error:
            if not self._is_left:
                print(f"atoll: {error}", file=sys.stderr, flush=True)
        if not self._is_left:
            self._orphaned()

    def _orphaned(self) -> NoReturn:
        print("atoll: `atoll site exec` has ended, and this script with it", file=sys.stderr, flush=True)
        os._exit(EXIT_ORPHANED)  # the main thread may be deep inside torch
