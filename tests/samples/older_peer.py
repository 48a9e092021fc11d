"""A site that knows version 1 of the protocol by its bytes alone: it says stored messages and reads fields by number.

What it says lies in tests/golden/version_1 and never changes. Two things in it are not known beforehand, and are put
in the place of stand-ins of the same length: the run's id, and the name of a grant. Neither generated code nor the
agent's is used here; TLS is set up as every caller of the server does.
"""

from __future__ import annotations

import queue
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from atoll.transport.credentials import open_blocking_channel
from atoll.transport.identity import Identity

FOLDER = Path(__file__).parents[1] / "golden" / "version_1"
RUN = b"01JDQ3T4V8Z6K1M2N3P4Q5R6S7"  # stands for the run's id
GRANT = b"A" * 24  # stands for the name of a grant
PATIENCE_S = 120.0

Fields = dict[int, Any]  # by number; the last one where a number comes more than once
Alter = Callable[[str, bytes], bytes]


def stored(name: str) -> bytes:
    return (FOLDER / f"{name}.bin").read_bytes()


def fields(data: bytes) -> Fields:
    """The fields of a message: numbers, bytes, and the bits of fixed-width values."""
    found: Fields = {}
    place = 0
    while place < len(data):
        tag, place = _varint(data, place)
        number, kind = tag >> 3, tag & 7
        if kind == 0:
            found[number], place = _varint(data, place)
            continue
        length, place = _varint(data, place) if kind == 2 else ({1: 8, 5: 4}[kind], place)
        found[number], place = data[place : place + length], place + length
    return found


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[place]
        value, place = value | (byte & 127) << shift, place + 1
        if byte < 128:
            return value, place
        shift += 7


def as_stored(name: str, data: bytes) -> bytes:
    return data


class OlderPeer:
    """One stream, and transfers beside it. Every wait is bounded."""

    def __init__(self, identity: Identity, alter: Alter) -> None:
        """Attach to the identity's server. `alter` says what becomes of a message, by its name, before it is sent."""
        self._alter = alter
        self._run = RUN
        self._said: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._heard: list[Fields] = []
        self._channel = open_blocking_channel(identity)
        attach: Any = self._channel.stream_stream("/atoll.wire.Control/Attach")
        self._messages = iter(attach(iter(self._said.get, None), timeout=PATIENCE_S))

    def close(self) -> None:
        self._said.put(None)
        self._channel.close()

    def say(self, name: str) -> None:
        """Send a stored message, for the run that was offered."""
        self._said.put(self._alter(name, stored(name).replace(RUN, self._run)))

    def hear(self, number: int) -> Fields:
        """The first message not yet heard whose body has this number in ServerMessage; others may come before it."""
        while not any(number in message for message in self._heard):
            self._heard.append(fields(next(self._messages)))
        found = next(message for message in self._heard if number in message)
        self._heard.remove(found)
        return fields(found[number])

    def hear_offer(self) -> Fields:
        """The offer of a run, which what is said from here on is about."""
        offer = self.hear(2)
        self._run = offer[1]
        assert len(self._run) == len(RUN)
        return offer

    def download(self, grant: bytes) -> bytes:
        """The bytes of a granted object."""
        assert len(grant) == len(GRANT)
        request = self._alter("download_request", stored("download_request").replace(GRANT, grant))
        method: Any = self._channel.unary_stream("/atoll.wire.Transfer/Download")
        data = b""
        for frame in method(request, timeout=PATIENCE_S):
            offset, length, crc32 = struct.unpack_from("<QII", frame)
            payload = frame[16:]
            assert (offset, length, crc32) == (len(data), len(payload), zlib.crc32(payload))
            data += payload
        return data

    def upload(self, grant: bytes, *names: str) -> Fields:
        """Send stored frames under a grant; how the server says that they have come."""
        method: Any = self._channel.stream_unary("/atoll.wire.Transfer/Upload")
        frames: Iterator[bytes] = map(stored, names)
        answer: bytes = method(frames, metadata=[("atoll-grant", grant.decode())], timeout=PATIENCE_S)
        return fields(answer)
