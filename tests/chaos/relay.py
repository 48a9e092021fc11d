"""A TCP relay between a site and its server that does to the bytes what networks do. Its faults are data.

It ends TCP on both sides and knows nothing of what it forwards; what it forwards it counts. A fault is armed once and
is over when it has struck; the shape of the link holds until another one is set. Runs in a thread of its own.
"""

from __future__ import annotations

import asyncio
import functools
import math
import random
import threading
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

Direction = Literal["up", "down"]  # up: from the site to the server

CHUNK_BYTES = 16 << 10
PACKET_BYTES = 1448  # what an Ethernet frame carries of a TCP stream


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Every connection breaks, once `after_bytes` more bytes have gone in `direction`."""

    direction: Direction = "up"
    after_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoseAnswers:
    """Once `after_bytes` more bytes have gone up, nothing comes down any more; the connections break `hold_s` later."""

    after_bytes: int
    hold_s: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Silence:
    """Half-open: the connections of now stay open and bring nothing, in either direction, for `for_s`; then they break.

    None: for ever, until an end gives up. New connections are as good as ever.
    """

    for_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Away:
    """The link is down for `for_s`: connections break, new ones are closed at once."""

    for_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The shape of the link, in each direction.

    A lost packet is what the reader of a TCP stream sees of it: all that follows waits for one more round trip.
    """

    delay_s: float = 0.0  # one way
    bytes_per_s: float = math.inf
    loss: float = 0.0  # of packets
    seed: int = 0


Fault = Cut | LoseAnswers | Silence | Away | Link
GOOD_LINK = Link()


@dataclass(slots=True, eq=False)
class _Connection:
    """One connection: two ends, and whether it still brings anything."""

    site: asyncio.StreamWriter
    server: asyncio.StreamWriter
    silent: set[Direction] = field(default_factory=set)

    def cut(self) -> None:
        """The site meets a reset; the server gets what was on its way to it, and then an end."""
        self.site.transport.abort()
        self.server.close()


class Relay:
    """Forwards what comes to `port` to another port of this machine.

    Args:
        host: where it listens.
        also: a port of the machine that is reached by its own number (the bulk port, which a server's Welcome names);
            `host` is another address than the server's then.
    """

    def __init__(self, to_port: int, *, host: str = "127.0.0.1", also: int | None = None) -> None:
        self.port = 0
        self.forwarded: dict[Direction, int] = {"up": 0, "down": 0}
        self.num_connections = 0  # so far
        self.host = host
        self._to_port, self._also = to_port, also
        self._servers: list[asyncio.Server] = []
        self._link = GOOD_LINK
        self._random = random.Random(0)
        self._armed: list[tuple[Cut | LoseAnswers, int]] = []  # with the byte count at which it strikes
        self._connections: set[_Connection] = set()
        self._refusing = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="relay", daemon=True)

    # --- from the test's thread -------------------------------------------------------------------------------------

    def start(self) -> Relay:
        """Listen; `port` is known then."""
        self._thread.start()
        self._call(self._listen())
        return self

    def close(self) -> None:
        """End everything."""
        self._call(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def do(self, fault: Fault) -> None:
        """Arm a fault, or change the link."""

        async def do() -> None:
            self._begin(fault)

        self._call(do())

    def mend(self) -> None:
        """Nothing is armed any more, and the link is good."""
        self._call(self._mend())

    @property
    def struck(self) -> bool:
        """Whether all that was armed has happened."""
        return not self._armed

    def _call(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10.0)

    # --- in the relay's thread --------------------------------------------------------------------------------------

    async def _listen(self) -> None:
        for port, to_port in ((self.port, self._to_port), *([(self._also, self._also)] if self._also else [])):
            accept = functools.partial(self._accept, to_port)
            self._servers.append(await asyncio.start_server(accept, self.host, port, limit=CHUNK_BYTES))
        self.port = self._servers[0].sockets[0].getsockname()[1]

    async def _end(self) -> None:
        for server in self._servers:
            server.close()
        for connection in list(self._connections):
            connection.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, fault: Fault) -> None:
        match fault:
            case Link():
                self._link, self._random = fault, random.Random(fault.seed)
            case Cut():
                self._armed.append((fault, self.forwarded[fault.direction] + fault.after_bytes))
                self._strike(fault.direction)
            case LoseAnswers():
                self._armed.append((fault, self.forwarded["up"] + fault.after_bytes))
                self._strike("up")
            case Silence(for_s=for_s):
                self._hush({"up", "down"}, for_s)
            case Away(for_s=for_s):
                self._refusing += 1
                for connection in list(self._connections):
                    connection.cut()
                self._loop.call_later(for_s, self._take_again)

    async def _mend(self) -> None:
        self._armed.clear()
        self._link = GOOD_LINK

    def _take_again(self) -> None:
        self._refusing -= 1

    def _strike(self, direction: Direction) -> None:
        """Do what is due at this byte count."""
        for armed in [a for a in self._armed if getattr(a[0], "direction", "up") == direction]:
            fault, at_bytes = armed
            if self.forwarded[direction] < at_bytes:
                continue
            self._armed.remove(armed)
            if isinstance(fault, LoseAnswers):
                self._hush({"down"}, fault.hold_s)
            else:
                for connection in list(self._connections):
                    connection.cut()

    def _hush(self, directions: set[Direction], for_s: float | None) -> None:
        for connection in self._connections:
            connection.silent |= directions
            if for_s is not None:
                self._loop.call_later(for_s, connection.cut)

    async def _accept(self, to_port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refusing:
            writer.transport.abort()
            return
        try:
            there, back = await asyncio.open_connection("127.0.0.1", to_port, limit=CHUNK_BYTES)
        except OSError:  # nobody listens there: the site meets what it would meet without a relay between
            writer.transport.abort()
            return
        connection = _Connection(site=writer, server=back)
        self._connections.add(connection)
        self.num_connections += 1
        ways = [
            self._loop.create_task(self._forward(connection, reader, back, "up")),
            self._loop.create_task(self._forward(connection, there, writer, "down")),
        ]
        self._tasks.update(ways)
        await asyncio.wait(ways)
        self._tasks.difference_update(ways)
        self._connections.discard(connection)

    async def _forward(
        self, connection: _Connection, source: asyncio.StreamReader, sink: asyncio.StreamWriter, direction: Direction
    ) -> None:
        """One direction of one connection: read, hold back as the link demands, write, count."""
        held: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(maxsize=64)  # 1 MiB: what is on the way
        writing = self._loop.create_task(self._deliver(connection, held, sink, direction))
        free_s = self._loop.time()  # when the line has sent what it was given
        try:
            while data := await source.read(CHUNK_BYTES):
                link = self._link
                free_s = max(self._loop.time(), free_s) + len(data) / link.bytes_per_s
                if self._random.random() > (1.0 - link.loss) ** math.ceil(len(data) / PACKET_BYTES):
                    free_s += 2 * link.delay_s
                await held.put((free_s + link.delay_s, data))
        except OSError:
            pass
        except asyncio.CancelledError:  # the relay ends: what a slow link still holds is nobody's
            writing.cancel()
            raise
        await held.put((0.0, b""))
        with suppress(OSError):
            await writing
        if direction not in connection.silent:  # of a half-open connection neither end learns anything
            sink.close()

    async def _deliver(
        self,
        connection: _Connection,
        held: asyncio.Queue[tuple[float, bytes]],
        sink: asyncio.StreamWriter,
        direction: Direction,
    ) -> None:
        while (item := await held.get())[1]:
            at_s, data = item
            if (wait_s := at_s - self._loop.time()) > 0:
                await asyncio.sleep(wait_s)
            if direction in connection.silent or sink.is_closing():
                continue
            sink.write(data)
            self.forwarded[direction] += len(data)
            with suppress(OSError):
                await sink.drain()
            self._strike(direction)
