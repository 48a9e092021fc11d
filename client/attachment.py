"""The one outbound stream of a site: what waits to be said, and an attachment over which it is said.

Invariant: exactly one coroutine writes to a stream, in the order in which messages were posted, and nothing but Hello
is written before the server's Welcome. Messages that follow from the site's durable state (results, fetches) are
dropped with a broken stream, since that state is told anew on the next one; the others wait for it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio

from atoll.transport.hello import check_welcome
from atoll.wire import control_pb2 as pb
from atoll.wire.control_pb2_grpc import ControlStub
from atoll.wire.errors import Malformed, Unavailable

WELCOME_TIMEOUT_S = 30.0  # a server that takes longer to say Welcome is in no state to give tasks

_Stub: Any = ControlStub  # generated code has no types

_OUTLIVE_A_STREAM = frozenset({"offer_reply", "task_failed", "leave_run"})


class Mailbox:
    """What the site has to say to its server."""

    def __init__(self) -> None:
        self._messages: deque[pb.SiteMessage] = deque()
        self._changed = asyncio.Event()
        self._stream: object | None = None  # the one that takes messages now
        self._finished = False

    def post(self, **body: Any) -> None:
        """Say one message, named by its field of SiteMessage; see the invariant for what waits without a stream."""
        message = pb.SiteMessage(**body)
        if self._stream is not None or message.WhichOneof("body") in _OUTLIVE_A_STREAM:
            self._messages.append(message)
            self._changed.set()

    def open(self) -> None:
        """From now on a new stream takes the messages."""
        self._stream, self._finished = object(), False

    def shut(self) -> None:
        """The stream is gone."""
        self._stream = None
        self._messages = deque(m for m in self._messages if m.WhichOneof("body") in _OUTLIVE_A_STREAM)
        self._changed.set()

    def finish(self) -> None:
        """End the stream after the messages so far."""
        self._finished = True
        self._changed.set()

    async def messages(self) -> AsyncIterator[pb.SiteMessage]:
        """The messages of the stream that was opened last, until `finish` or `shut`.

        gRPC asks for the next message when it has written the one before, so one that could not be written is still
        here for the next stream.
        """
        stream = self._stream
        while stream is not None and self._stream is stream:
            if self._messages:
                yield self._messages[0]
                if self._stream is stream:
                    self._messages.popleft()
            elif self._finished:
                return
            else:
                self._changed.clear()
                await self._changed.wait()


class Attachment:
    """A stream on which Hello and Welcome were said. `async for` gives the server's messages to its orderly end.

    Raises (while iterating):
        grpc.aio.AioRpcError: the stream broke, or the server ended it with an error.
    """

    def __init__(self, welcome: pb.Welcome, messages: AsyncIterator[pb.ServerMessage]) -> None:
        self.welcome = welcome
        self._messages = messages

    async def __aiter__(self) -> AsyncIterator[pb.ServerMessage]:
        async for message in self._messages:
            yield message


@asynccontextmanager
async def attach(channel: grpc.aio.Channel, hello: pb.Hello, mailbox: Mailbox) -> AsyncIterator[Attachment]:
    """An attachment whose stream lives as long as the block.

    Raises:
        grpc.aio.AioRpcError: no connection, or the server refuses.
        Unavailable: the server says nothing.
        Incompatible, Malformed: its Welcome is none that this site can go by.
    """
    welcomed = asyncio.Event()

    async def outgoing() -> AsyncIterator[pb.SiteMessage]:
        yield pb.SiteMessage(hello=hello)
        await welcomed.wait()
        async for message in mailbox.messages():
            yield message

    call = _Stub(channel).Attach(outgoing())
    messages: AsyncIterator[pb.ServerMessage] = aiter(call)
    try:
        welcome = await _welcome(messages)
        mailbox.open()
        welcomed.set()
        yield Attachment(welcome, messages)
    finally:
        mailbox.shut()
        welcomed.set()  # a writer that still waits ends
        call.cancel()


async def _welcome(messages: AsyncIterator[pb.ServerMessage]) -> pb.Welcome:
    try:
        async with asyncio.timeout(WELCOME_TIMEOUT_S):
            first = await anext(messages, None)
    except TimeoutError:
        raise Unavailable(f"the server did not answer within {WELCOME_TIMEOUT_S:.0f} s") from None
    if first is None or first.WhichOneof("body") != "welcome":
        raise Malformed("the server's first message is no Welcome: is this address that of an Atoll server?")
    check_welcome(first.welcome)
    return first.welcome
