"""A site's end of the bulk line: connections kept between transfers, and gRPC where there is no way through."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from collections.abc import Awaitable, Callable
from functools import partial

from atoll.transport.bulk import (
    GREETING,
    SILENCE_S,
    Kind,
    Line,
    LineBroke,
    Outcome,
    Request,
    client_context,
    tune,
    work_on,
)
from atoll.transport.credentials import SERVER_NAME
from atoll.transport.grpc_carrier import GrpcCarrier
from atoll.transport.identity import Identity
from atoll.transport.pieces import Pieces
from atoll.transport.transfer import RoomySlot
from atoll.wire.control_pb2 import Grant
from atoll.wire.errors import Unavailable
from atoll.wire.transfer_pb2 import TransferStatus

_log = logging.getLogger(__name__)

CONNECT_S = 10.0  # for a connection, and for the server's greeting
TRY_AGAIN_S = 600.0  # after a line could not be had: a firewall may have been opened meanwhile
BLOCKED = "cannot be reached"  # in what `tell` hears
MOST_IDLE = 2  # lines kept: one each way


class BulkCarrier:
    """`transport.transfer.Carrier` over bulk lines to one server.

    Args:
        address: host:port of the server's bulk port.
        identity: proves who this is; None in plain text, where `name` is believed.
        instead: carries what no line can be had for.
        tell: hears in words how the bytes travel, with each new line and each that could not be had.
    """

    def __init__(
        self,
        address: tuple[str, int],
        *,
        name: str,
        identity: Identity | None,
        instead: GrpcCarrier,
        tell: Callable[[str], None] = lambda way: None,
    ) -> None:
        self._address, self._identity = address, identity
        self._name = "" if identity is not None else name
        self._instead, self._tell = instead, tell
        self._idle: list[Line] = []
        self._closed = False
        self._not_before_s = 0.0

    def close(self) -> None:
        """Lets go of the lines that carry nothing; those under way end with their transfer."""
        self._closed = True
        while self._idle:
            self._idle.pop().close()

    async def send(self, grant: Grant, pieces: Pieces, before_last: Callable[[], Awaitable[None]]) -> TransferStatus:
        line = await self._begin(Request(kind=Kind.UP, grant=grant.grant, offset=grant.offset, name=self._name))
        if line is None:
            return await self._instead.send(grant, pieces, before_last)
        try:
            await work_on(line, partial(line.send_frames, pieces, but_last=True))
            if pieces.is_last and not line.is_spoken_to():
                await before_last()
            outcome, received = await work_on(line, partial(_send_last, line, pieces))
        except BaseException:
            line.close()
            raise
        self._keep(line)
        return TransferStatus(received_bytes=received, complete=outcome == Outcome.DONE)

    async def fetch(self, grant: Grant, slot: RoomySlot) -> None:
        line = await self._begin(
            Request(kind=Kind.DOWN, grant=grant.grant, offset=slot.received_bytes, name=self._name)
        )
        if line is None:
            await self._instead.fetch(grant, slot)
            return
        try:
            await work_on(line, partial(line.take_frames, slot))
        except BaseException:
            line.close()
            raise
        self._keep(line)

    async def give_back(self, grant: Grant) -> None:
        await self._instead.give_back(grant)

    async def _begin(self, request: Request) -> Line | None:
        """A line on which the server has said GO; None where none can be had.

        Raises:
            RemoteError: the server refuses.
            Unavailable: the connection broke.
        """
        while True:
            line = self._take()
            is_new = line is None
            if line is None:
                line = await self._dial()
            if line is None:
                return None
            try:
                await work_on(line, partial(_ask, line, request))
                return line
            except LineBroke:
                line.close()
                if is_new:
                    raise
            except BaseException:
                line.close()
                raise

    def _take(self) -> Line | None:
        while self._idle:
            line = self._idle.pop()
            if not line.is_spoken_to():  # the server has not ended it meanwhile
                return line
            line.close()
        return None

    def _keep(self, line: Line) -> None:
        if self._closed or len(self._idle) >= MOST_IDLE:
            line.close()
        else:
            self._idle.append(line)

    async def _dial(self) -> Line | None:
        if time.monotonic() < self._not_before_s:
            return None
        dialling = asyncio.get_running_loop().run_in_executor(None, _connect, self._address, self._identity)
        try:
            line = await asyncio.shield(dialling)
        except (OSError, Unavailable) as error:
            self._not_before_s = time.monotonic() + TRY_AGAIN_S
            trouble = _reason(error)
            host, port = self._address
            self._tell(f"gRPC: TCP port {port} of {host} {BLOCKED}: {trouble}")
            _log.warning(
                "models and updates go over gRPC, which takes about twice the CPU: the server's bulk port %s:%d cannot "
                "be reached: %s; let this machine connect to TCP port %d of %s (tried again in %.0f minutes)",
                host, port, trouble, port, host, TRY_AGAIN_S / 60,
            )  # fmt: skip
            return None
        except asyncio.CancelledError:
            dialling.add_done_callback(_hang_up)
            raise
        if self._not_before_s:
            _log.info("the server's bulk port %s:%d is reached now", *self._address)
        self._not_before_s = 0.0
        self._tell("bulk lines to TCP port {1} of {0}".format(*self._address))
        return line


def _connect(address: tuple[str, int], identity: Identity | None) -> Line:
    """A line on which the server has greeted. Blocks. Raises OSError, Unavailable."""
    sock = socket.create_connection(address, CONNECT_S)
    try:
        tune(sock)
        if identity is not None:
            sock = client_context(identity).wrap_socket(sock, server_hostname=SERVER_NAME)
        line = Line(sock)
        greeting = bytearray(len(GREETING))
        line.read(memoryview(greeting))
        if greeting != GREETING:
            raise Unavailable("it speaks something else")
        sock.settimeout(SILENCE_S)
    except BaseException:
        sock.close()
        raise
    return line


def _ask(line: Line, request: Request) -> None:
    line.write(request.encode())
    line.hear()


def _send_last(line: Line, pieces: Pieces) -> tuple[Outcome, int]:
    if not line.is_spoken_to():
        line.send_frames(pieces)
    return line.hear()


def _hang_up(dialling: asyncio.Future[Line]) -> None:
    if not dialling.cancelled() and dialling.exception() is None:
        dialling.result().close()


def _reason(error: OSError | Unavailable) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not one of this federation ({error.verify_message})"
    if isinstance(error, TimeoutError):
        return f"no answer within {CONNECT_S:.0f} s"
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return error.message
