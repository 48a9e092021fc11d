"""The bulk line: granted bytes over a TLS connection of their own, read and written where they lie.

gRPC copies each byte several times between a file and the wire; here a thread with a blocking socket moves it from a
mapping to the wire and from the wire to its place, and holds no interpreter lock meanwhile. All else of Atoll is gRPC.

Format. TLS 1.3, both ends with the certificates that they show on the gRPC port; plain text on loopback where both ask::

    server  GREETING                                    once, when it has accepted the site's certificate
    site    magic u32 | kind u8 | grant 24 | offset u64 | name 63      a request; `name` in plain text only, else zeros
    server  outcome u8 | received u64 | length u32 | ErrorDetail        an answer: GO, DONE or REFUSED

Up: request, GO, the site's frames (wire/frames.py) from the grant's offset to the end, DONE. Down: request, GO, the server's
frames from the request's offset to the end. Then the next request. After REFUSED, or anything that is not this, the
connection ends.

Invariant: what is read before the grant is known is of fixed size.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
import ssl
import struct
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeVar

from atoll.transport.credentials import ServerCertificate
from atoll.transport.identity import Identity
from atoll.transport.pieces import Pieces
from atoll.transport.transfer import RoomySlot, settle
from atoll.wire.errors import Malformed, Unavailable, from_detail
from atoll.wire.errors_pb2 import ErrorDetail
from atoll.wire.frames import FRAME_HEADER

T = TypeVar("T")

GREETING = b"atoll bulk/1\n"
_MAGIC = 0x314C4B42  # "BKL1"
_REQUEST = struct.Struct("<IB24sQ63s")
REQUEST_BYTES = _REQUEST.size
_ANSWER = struct.Struct("<BQI")
_MOST_DETAIL_BYTES = 16 << 10  # about 3,000 characters (wire/errors.py) of up to 4 bytes

SILENCE_S = 60.0  # of a peer in the middle of a transfer; what is merely slow loses its grant before
_WRITE_BYTES = 256 << 10


class Kind(IntEnum):
    UP = 1
    DOWN = 2


class Outcome(IntEnum):
    GO = 0
    DONE = 1
    REFUSED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a site asks for on a line."""

    kind: Kind
    grant: str  # 24 characters
    offset: int  # DOWN: first byte wanted
    name: str = ""  # of the site, in plain text

    def encode(self) -> bytes:
        return _REQUEST.pack(_MAGIC, self.kind, self.grant.encode(), self.offset, self.name.encode())

    @staticmethod
    def decode(data: bytes | bytearray) -> Request:
        """Raises Malformed where it is none."""
        magic, kind, grant, offset, name = _REQUEST.unpack(data)
        try:
            if magic != _MAGIC:
                raise ValueError("magic")
            texts = (text.rstrip(b"\0").decode("ascii") for text in (grant, name))
            return Request(kind=Kind(kind), grant=next(texts), offset=offset, name=next(texts))
        except ValueError:
            raise Malformed("this is no request of a bulk line; send `transport/bulk.py`'s", field="request") from None


def encode_answer(outcome: Outcome, received: int, detail: bytes = b"") -> bytes:
    """An answer of the server; `detail` is a serialised ErrorDetail."""
    return _ANSWER.pack(outcome, received, len(detail)) + detail


class LineBroke(Unavailable):
    """The connection ended, or its other end said nothing for too long. Never travels."""


class Line:
    """One connection in blocking mode, for one thread at a time; `stop` from any other.

    Raises (from all that move bytes):
        LineBroke: the connection broke, or the peer was silent for too long.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._header = bytearray(FRAME_HEADER.size)
        self.fileno = sock.fileno

    def send_frames(
        self, pieces: Pieces, *, but_last: bool = False, moved: Callable[[int], None] | None = None
    ) -> None:
        """Sends what `pieces` has left, from where it lies; an upload ends early where the peer has something to say.

        Args:
            but_last: leave the last frame.
            moved: hears from this thread how many bytes of the object are out.
        """
        while not (but_last and (pieces.is_last or self.is_spoken_to())):
            piece = pieces.next()
            if piece is None:
                return
            self.write(piece[0])
            self.write(piece[1])
            if moved is not None:
                moved(pieces.sent_bytes)

    def take_frames(self, slot: RoomySlot, moved: Callable[[int], None] = lambda received: None) -> None:
        """Takes frames until `slot` is complete, each to its place.

        Raises:
            BadFrame, TooLarge: of a frame; what came before is kept.
        """
        while not slot.complete:
            self.read(memoryview(self._header))
            slot.read(self._header, self.read)
            moved(slot.received_bytes)

    def answer(self, outcome: Outcome, received: int) -> None:
        """Says GO or DONE, and how much of the object is there."""
        self.write(encode_answer(outcome, received))

    def hear(self) -> tuple[Outcome, int]:
        """The answer of the server.

        Raises:
            RemoteError: it refuses, as its own error.
            Malformed: it is no answer.
        """
        head = bytearray(_ANSWER.size)
        self.read(memoryview(head))
        outcome, received, length = _ANSWER.unpack(head)
        if outcome not in tuple(Outcome) or length > _MOST_DETAIL_BYTES:
            raise Malformed("the server's answer on the bulk line is none", field="outcome", value=outcome)
        detail = bytearray(length)
        self.read(memoryview(detail))
        if outcome == Outcome.REFUSED:
            raise from_detail(ErrorDetail.FromString(bytes(detail)))
        return Outcome(outcome), received

    def read(self, into: memoryview) -> None:
        """Fills `into`."""
        filled, receive = 0, self._socket.recv_into
        try:
            while filled < into.nbytes:
                came = receive(into[filled:])
                if came == 0:
                    raise LineBroke("the bulk line was closed by its other end; try again")
                filled += came
        except OSError as error:
            raise _broken(error) from None

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        try:
            for start in range(0, view.nbytes, _WRITE_BYTES):
                self._socket.sendall(view[start : start + _WRITE_BYTES])
        except OSError as error:
            raise _broken(error) from None

    def stop(self) -> None:
        """Ends the connection; a thread that reads or writes here finds it broken."""
        with suppress(OSError):
            socket.socket.shutdown(
                self._socket, socket.SHUT_RDWR
            )  # that of SSLSocket would drop its state under the thread

    def close(self) -> None:
        with suppress(OSError):
            self._socket.close()

    def is_spoken_to(self) -> bool:
        """Whether the other end has said something, or ended the connection."""
        pending = isinstance(self._socket, ssl.SSLSocket) and self._socket.pending() > 0
        waiting = select.poll()  # select itself knows no descriptor beyond 1023
        waiting.register(self._socket, select.POLLIN)
        return pending or bool(waiting.poll(0))


def _broken(error: OSError) -> LineBroke:
    what = (
        "its other end was silent" if isinstance(error, TimeoutError) else (error.strerror or str(error) or "it ended")
    )
    return LineBroke(f"the bulk line broke: {what}; try again")


async def work_on(line: Line, work: Callable[[], T], pool: Executor | None = None) -> T:
    """What `work` gives, which moves bytes on `line` in a thread; whoever is cancelled here ends the line."""
    working = asyncio.get_running_loop().run_in_executor(pool, work)
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        line.stop()
        await settle(working)
        raise


def tune(sock: socket.socket) -> None:
    """No waiting to fill packets, and a peer that is gone without a word is found out."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, seconds in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), seconds)


# --- TLS ------------------------------------------------------------------------------------------------------------


def client_context(identity: Identity) -> ssl.SSLContext:
    """TLS towards the identity's server: its own CA alone is believed, and the server has the name of every server."""
    context = _context(ssl.PROTOCOL_TLS_CLIENT, identity.ca_pem, identity.private_key_pem, identity.certificate_pem)
    assert context.check_hostname  # against SERVER_NAME
    return context


def server_context(shown: ServerCertificate) -> ssl.SSLContext:
    """TLS of a server: every caller shows a certificate of the federation's CA. No session outlives its connection."""
    context = _context(ssl.PROTOCOL_TLS_SERVER, shown.ca_pem, shown.private_key_pem, shown.certificate_pem)
    context.verify_mode = ssl.CERT_REQUIRED
    context.num_tickets = 0
    return context


def _context(protocol: int, ca_pem: bytes, key_pem: bytes, certificate_pem: bytes) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(cadata=ca_pem.decode())
    with _as_file(key_pem + certificate_pem) as path:
        context.load_cert_chain(path)
    return context


@contextmanager
def _as_file(pem: bytes) -> Iterator[str]:
    """A path under which OpenSSL, which reads nothing else, finds a private key: memory where the system has that."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("pem", os.MFD_CLOEXEC)
        try:
            os.write(descriptor, pem)
            yield f"/proc/self/fd/{descriptor}"
        finally:
            os.close(descriptor)
    else:
        with tempfile.NamedTemporaryFile() as file:  # mode 0600
            file.write(pem)
            file.flush()
            yield file.name
