"""The server's bulk port: granted bytes over connections of their own (transport/bulk.py).

One task a connection waits on the event loop; a thread works on it only while a granted transfer moves, so there are
no more threads than grants. What a stranger can cost is one of MOST_STRANGERS places for HANDSHAKE_S, and nothing is
allocated for a site before its grant is known. Whoever finds no place here goes over gRPC.

Invariant: a request is let through as a gRPC call is: by the certificate of the connection, looked up anew each time.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import ssl
from collections import defaultdict
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

from atoll.server.security import Caller, Verify, as_remote, current_caller
from atoll.server.transfers import Sink, Transfers
from atoll.transport.bulk import (
    GREETING,
    REQUEST_BYTES,
    SILENCE_S,
    Kind,
    Line,
    LineBroke,
    Outcome,
    Request,
    encode_answer,
    server_context,
    tune,
    work_on,
)
from atoll.transport.credentials import ServerCertificate
from atoll.transport.member_certificate import read_certificate
from atoll.transport.transfer import Moved, held
from atoll.wire.errors import AtollError, NotAllowed, Stale, Stranger, Unavailable, to_detail
from atoll.wire.names import check_site_name
from atoll.wire.transfer_pb2 import TransferStatus

_log = logging.getLogger(__name__)

MOST_STRANGERS = 64  # connections before their first request is let through
MOST_PER_MEMBER = 4  # connections of one site: one each way, and as many that it has lost
STRANGE_S = 15.0  # from connection to handshake to first request
REQUEST_S = 10.0  # from the first byte of a later request to its last
IDLE_S = 900.0  # between two transfers; the next one takes a new connection then
FAREWELL_S = 2.0  # for a sender to hear why its upload is refused
_BACKLOG = 256

Admit = Callable[[socket.socket, str], Awaitable[Caller]]  # the caller, by connection and claimed name


class BulkPort:
    """Listens from `start` to `stop`.

    Args:
        admit: who a caller is, by its socket and what a request claims; asked for each request.
        certificate: what to show now, asked for each connection; None in plain text.
        threads: transfers that move at once.
    """

    def __init__(
        self,
        transfers: Transfers,
        *,
        admit: Admit,
        certificate: Callable[[], ServerCertificate] | None,
        threads: int,
    ) -> None:
        self._transfers, self._admit, self._certificate = transfers, admit, certificate
        self._pool = ThreadPoolExecutor(threads, "bulk")
        self._shown: tuple[ServerCertificate, ssl.SSLContext] | None = None
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._num_strangers = 0
        self._lines: dict[str, dict[asyncio.Task[None], bool]] = defaultdict(dict)  # by member: whether idle
        self._moving: set[str] = set()  # grants in use

    def bind(self, address: tuple[str, int]) -> int:
        """Takes the port, and gives its number; callers wait until `start`. Raises OSError."""
        family, _, _, _, where = socket.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        self._listener = socket.create_server(where[:2], family=family, backlog=_BACKLOG)
        self._listener.setblocking(False)
        port: int = self._listener.getsockname()[1]
        return port

    def start(self) -> None:
        """Lets callers in."""
        assert self._listener is not None  # `bind` comes first
        self._accepting = asyncio.create_task(self._accept(self._listener), name="bulk port")

    def shut(self) -> None:
        """Lets nobody in any more; connections go on."""
        if self._accepting is not None:
            self._accepting.cancel()
        elif self._listener is not None:
            self._listener.close()

    async def stop(self) -> None:
        """Ends all connections."""
        self.shut()
        for connection in self._connections:
            connection.cancel()
        if self._connections:
            await asyncio.wait(self._connections)
        self._pool.shutdown(wait=False)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with listener:
            while True:
                try:
                    sock, _ = await loop.sock_accept(listener)
                except OSError as error:  # too many open files: those that are open may end
                    _log.error("the bulk port takes no connection now: %s", error.strerror)
                    await asyncio.sleep(1.0)
                    continue
                if self._num_strangers >= MOST_STRANGERS:
                    sock.close()
                    continue
                self._num_strangers += 1
                connection = asyncio.create_task(self._serve(sock))
                self._connections.add(connection)
                connection.add_done_callback(self._connections.discard)

    # --- one connection ---------------------------------------------------------------------------------------------

    async def _serve(self, sock: socket.socket) -> None:
        """A connection from its first byte to its last."""
        member = ""
        try:
            try:
                async with asyncio.timeout(STRANGE_S):
                    sock = await self._shaken(sock)
                    await _write(sock, GREETING)
                    request = Request.decode(await _read(sock, REQUEST_BYTES))
                    caller = await self._admit(sock, request.name)
                    _require_site(caller)
            finally:
                self._num_strangers -= 1
            member = f"{caller.role} {caller.name}"
            self._take_place(member)
            while True:
                current_caller.set(caller)
                self._lines[member][_this_task()] = False
                await self._answer(sock, request)
                self._lines[member][_this_task()] = True
                request = await self._request(sock)
                caller = await self._admit(sock, request.name)
        except (OSError, TimeoutError, LineBroke) as error:
            _log.debug("a bulk line of %s ended: %s", member or "a stranger", error)
        except AtollError as error:
            await _refuse(sock, error, member)
        except asyncio.CancelledError:
            pass  # the port is being shut, or the member has newer lines
        except Exception:  # noqa: BLE001  the edge of the process: logged with its trace
            _log.exception("a bulk line of %s failed", member or "a stranger")
        finally:
            if member:
                self._lines[member].pop(_this_task(), None)
                if not self._lines[member]:
                    del self._lines[member]
            sock.close()

    def _take_place(self, member: str) -> None:
        """One more connection of a member; the oldest one that moves nothing gives way. Raises Unavailable."""
        lines = self._lines[member]
        if len(lines) >= MOST_PER_MEMBER:
            idle = next((line for line, is_idle in lines.items() if is_idle), None)
            if idle is None:
                raise Unavailable(f"{member} has {MOST_PER_MEMBER} bulk lines in use", bound=MOST_PER_MEMBER)
            idle.cancel()
            del lines[idle]
        lines[_this_task()] = False

    async def _shaken(self, sock: socket.socket) -> socket.socket:
        sock.setblocking(False)
        tune(sock)
        if self._certificate is None:
            return sock
        context = await asyncio.to_thread(self._context, self._certificate)  # it may make a new certificate
        wrapped = context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        await _when_ready(wrapped, wrapped.do_handshake)
        return wrapped

    def _context(self, certificate: Callable[[], ServerCertificate]) -> ssl.SSLContext:
        try:
            shown = certificate()
        except AtollError as error:
            _log.error("no new server certificate, the old one stays in use: %s", error)
            if self._shown is None:
                raise
            return self._shown[1]
        if self._shown is None or self._shown[0] != shown:
            self._shown = shown, server_context(shown)
        return self._shown[1]

    async def _request(self, sock: socket.socket) -> Request:
        async with asyncio.timeout(IDLE_S):
            data = await _read(sock, 1)
        async with asyncio.timeout(REQUEST_S):
            data += await _read(sock, REQUEST_BYTES - 1)
        return Request.decode(data)

    # --- one transfer -----------------------------------------------------------------------------------------------

    async def _answer(self, sock: socket.socket, request: Request) -> None:
        """Does what is asked. What raises after GO ends the connection."""
        if request.grant in self._moving:
            raise Stale("this grant is in use on another line; ask again and wait for a new one", field="grant")
        self._moving.add(request.grant)
        line = Line(sock)
        sock.settimeout(SILENCE_S)
        done = b""
        try:
            if request.kind is Kind.UP:
                status = await self._up(line, request)
                done = encode_answer(Outcome.DONE, status.received_bytes)
            else:
                await self._down(line, request)
        finally:
            self._moving.discard(request.grant)
            sock.setblocking(False)
        async with asyncio.timeout(SILENCE_S):
            await _write(sock, done)  # from here: the grant is over, and its thread may be another's already

    async def _up(self, line: Line, request: Request) -> TransferStatus:
        async def receive(slot: Any, moved: Moved) -> TransferStatus:
            tell = _on_loop(moved)

            def work() -> None:
                line.answer(Outcome.GO, slot.received_bytes)
                line.take_frames(slot, tell)

            await work_on(line, work, self._pool)
            return held(slot)

        return await self._transfers.upload(request.grant, receive, _no_models)

    async def _down(self, line: Line, request: Request) -> None:
        async with self._transfers.sending(request.grant, request.offset) as (pieces, moved):
            tell = _on_loop(moved)

            def work() -> None:
                line.answer(Outcome.GO, request.offset)
                line.send_frames(pieces, moved=tell)

            await work_on(line, work, self._pool)


def _on_loop(moved: Moved) -> Moved:
    """`moved` for a thread: it is called on the event loop of whoever asks here."""
    loop = asyncio.get_running_loop()

    def tell(position: int) -> None:
        loop.call_soon_threadsafe(moved, position)

    return tell


def _require_site(caller: Caller) -> None:
    """People's grants are not counted as those of sites are, and their transfers are few: they go over gRPC."""
    if caller.role != "site":
        raise NotAllowed(
            f"bulk lines are for sites, not for {caller.role} {caller.name}: use gRPC",
            field="role",
            value=caller.role,
            bound="site",
        )


def _no_models(run: str) -> Sink:
    raise NotAllowed("sites bring no version 0", run=run)


def _this_task() -> asyncio.Task[None]:
    task = asyncio.current_task()
    assert task is not None
    return task


async def _refuse(sock: socket.socket, error: AtollError, member: str) -> None:
    """Tells why, and hears out what was on its way, for a connection that is closed over unread bytes is reset, and
    the reason with it."""
    refusal = as_remote(error)
    _log.warning(
        "a bulk line of %s is refused: %s: %s", member or "a stranger", type(refusal).__name__, refusal.message
    )
    sock.setblocking(False)
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(FAREWELL_S):
            detail = to_detail(refusal).SerializeToString()
            await _write(sock, encode_answer(Outcome.REFUSED, 0, detail))
            while await _read_some(sock):
                pass


async def _when_ready(sock: socket.socket, work: Callable[[], Any]) -> Any:
    """What `work` gives on a socket without blocking."""
    while True:
        try:
            return work()
        except (ssl.SSLWantReadError, BlockingIOError):
            await _ready(sock, for_reading=True)
        except ssl.SSLWantWriteError:
            await _ready(sock, for_reading=False)


def _set(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


async def _ready(sock: socket.socket, *, for_reading: bool) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    add, remove = (loop.add_reader, loop.remove_reader) if for_reading else (loop.add_writer, loop.remove_writer)
    descriptor = sock.fileno()
    add(descriptor, _set, ready)
    try:
        await ready
    finally:
        remove(descriptor)


async def _read(sock: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        data += await _read_some(sock, num_bytes - len(data)) or _ended()
    return data


async def _read_some(sock: socket.socket, num_bytes: int = 1 << 16) -> bytes:
    data: bytes = await _when_ready(sock, partial(sock.recv, num_bytes))
    return data


async def _write(sock: socket.socket, data: bytes) -> None:
    while data:
        data = data[await _when_ready(sock, partial(sock.send, data)) :]


def _ended() -> bytes:
    raise LineBroke("it was closed")


# --- who is there ---------------------------------------------------------------------------------------------------


def by_certificate(verify: Verify) -> Admit:
    """The name in the certificate that the connection began with, when the directory stands by it now."""

    async def admit(sock: socket.socket, claimed: str) -> Caller:
        der = sock.getpeercert(binary_form=True) if isinstance(sock, ssl.SSLSocket) else None
        if not der:
            raise Stranger("the caller shows no certificate: join the federation first")
        return await verify(read_certificate(ssl.DER_cert_to_PEM_cert(der).encode()))

    return admit


async def by_claim(sock: socket.socket, claimed: str) -> Caller:
    """For a server with the plaintext flag: the site that the caller says it is, from this machine only."""
    if not ipaddress.ip_address(sock.getpeername()[0]).is_loopback:
        raise Stranger("plain text is for the server's own machine alone: remove the plaintext flag at both ends")
    return Caller(name=check_site_name(claimed, "name"), role="site")
