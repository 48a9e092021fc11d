"""A worker without torch: speaks the agent's language, trains nothing. Behaves as the file `data.fault` says.

Its update is eight bytes from the task's key, over and over, so that a test can tell whose it is. Each training that
it begins is a line in the file `data.ledger`; so is each time that it gets ready, with its process id.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import sys
import threading
import time
import zlib
from pathlib import Path

from atoll.cluster.messages import (
    Answer,
    Cancel,
    Close,
    Evaluate,
    Evaluated,
    Failed,
    Message,
    Prepare,
    Prepared,
    Progress,
    Train,
    Trained,
    decode,
    encode,
)
from atoll.wire.errors import AppFailed, AtollError, DeviceMissing, DiskFull, Stale

UPDATE_BYTES = 1 << 16
MAX_WEIGHT = 100


def update_of(key: str) -> bytes:
    """The bytes that the stub writes as the update of a task."""
    return (zlib.crc32(key.encode()).to_bytes(8, "little") * (UPDATE_BYTES // 8))[:UPDATE_BYTES]


class Stub:
    """One connection to the agent."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._requests: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._cancelled: set[str] = set()
        self._prepare: Prepare | None = None

    def read_forever(self) -> None:
        """Ends the process when the agent closes or goes."""
        for line in self._connection.makefile("rb"):
            message = decode(line)
            if isinstance(message, Close):
                break
            if isinstance(message, Cancel):
                self._cancelled.add(message.key)
            else:
                self._requests.put(message)
        os._exit(0)

    def serve(self) -> None:
        """Answers for ever."""
        while True:
            request = self._requests.get()
            key = "prepare" if isinstance(request, Prepare) else getattr(request, "key", "")
            try:
                self._say(self._do(request))
            except AtollError as error:
                self._say(Failed.of(key, error))

    def _do(self, request: object) -> Answer:
        if isinstance(request, Prepare):
            self._prepare = request
            self._note(f"prepare {os.getpid()}")
            self._misbehave("prepare", "prepare")
            return Prepared(max_weight=MAX_WEIGHT, update_bytes=UPDATE_BYTES, device="cpu")
        if isinstance(request, Train):
            self._note(request.key)
            self._misbehave("train", request.key)
            update = update_of(request.key)
            Path(request.out_path).write_bytes(update)
            return Trained(
                key=request.key,
                weight=10,
                metrics={"loss": (1.0, 10.0)},
                num_bytes=len(update),
                crc32=zlib.crc32(update),
            )
        assert isinstance(request, Evaluate)
        self._misbehave("evaluate", request.key)
        return Evaluated(key=request.key, metrics={"accuracy": (9.0, 10.0)})

    def _misbehave(self, doing: str, key: str) -> None:
        words = self._fault()
        while words[:2] == [doing, "wait"]:
            self._say(Progress(key=key, done=1, total=2))
            if key in self._cancelled:
                raise Stale(f"task {key} was given up")
            time.sleep(0.02)
            words = self._fault()
        if words == [doing, "raise"]:
            raise AppFailed(f"app failed to {doing}: ValueError: nothing to learn here")
        if words == [doing, "no-device"]:
            raise DeviceMissing("device cuda:7 was asked for, this machine has none")
        if words == [doing, "full"]:
            raise DiskFull("no room on the disk; free some")
        if words == [doing, "die"]:
            os.kill(os.getpid(), signal.SIGKILL)
        if words == [doing, "die-once"]:
            self._fault_path().unlink()
            os.kill(os.getpid(), signal.SIGKILL)

    def _fault_path(self) -> Path:
        assert self._prepare is not None
        return Path(self._prepare.data["fault"])

    def _fault(self) -> list[str]:
        path = self._fault_path()
        return path.read_text().split() if path.exists() else []

    def _note(self, line: str) -> None:
        assert self._prepare is not None
        with Path(self._prepare.data["ledger"]).open("a") as file:
            file.write(f"{line}\n")

    def _say(self, answer: Answer) -> None:
        self._connection.sendall(encode(answer))


def main() -> None:
    """Connect to the socket that the agent names."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(sys.argv[sys.argv.index("--socket") + 1])
    stub = Stub(connection)
    threading.Thread(target=stub.read_forever, daemon=True).start()
    stub.serve()


if __name__ == "__main__":
    main()
