"""A site that stays with its server: one stream after the other, each as long as it lasts, with jittered waits between.

What keeps a site away is logged and shown in words that an administrator can act on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Protocol

import grpc
import grpc.aio

from atoll.client.attachment import Mailbox, attach
from atoll.client.base_models import Spawn
from atoll.client.board import Board
from atoll.client.link import Link
from atoll.transport.bulk_carrier import BulkCarrier
from atoll.transport.grpc_carrier import GrpcCarrier
from atoll.transport.identity import Identity
from atoll.transport.reconnect import Backoff
from atoll.transport.transfer import Carrier
from atoll.wire import control_pb2 as pb
from atoll.wire.errors import AtollError, IdentityError, Incompatible, Malformed, NotAllowed, RemoteError, Stranger

_log = logging.getLogger(__name__)

PROVEN_AFTER_S = 30.0  # a stream that lived so long was good: the next one is tried at once

# Refusals that a person has to lift. At the first try they end the agent, so that whoever starts it sees them; an
# agent that was attached before goes on trying, since the fault may be the server's and nobody is there at night.
_FOR_A_PERSON = (Incompatible, Malformed, NotAllowed, Stranger)


class Conversation(Protocol):
    """Who speaks over the streams."""

    async def hello(self) -> pb.Hello:
        """What to say first."""
        ...

    def welcomed(self, welcome: pb.Welcome) -> None:
        """A new stream is there: say again what the last one may have lost."""
        ...

    async def take(self, message: pb.ServerMessage) -> None:
        """Act on one message."""
        ...

    def heartbeat(self) -> pb.Heartbeat:
        """What to say in between."""
        ...


class Presence:
    """The connection of one site. `stay` once; the other methods from the same event loop."""

    def __init__(
        self,
        link: Link,
        *,
        mailbox: Mailbox,
        board: Board,
        spawn: Spawn,
        backoff: Backoff,
    ) -> None:
        self._link = link
        self._mailbox = mailbox
        self._board = board
        self._spawn = spawn
        self._backoff = backoff
        self._leaving = asyncio.Event()
        self._was_attached = False
        self._channel: grpc.aio.Channel | None = None
        self._bulk: BulkCarrier | None = None
        self._stay_away_s = 0.0

    def channel(self) -> grpc.aio.Channel:
        """The channel of the present stream, for transfers; a fresh one where there is no stream yet."""
        if self._channel is None:
            self._channel = self._link.open()
        return self._channel

    def carrier(self) -> Carrier:
        """What carries granted bytes: bulk lines where the present stream's server takes them, else gRPC."""
        return self._bulk or GrpcCarrier(self.channel())

    def leave(self) -> None:
        """End the stream after what is still to be said; `stay` returns."""
        self._leaving.set()
        self._mailbox.finish()

    def stay_away(self, seconds: float) -> None:
        """Come back so much later after the present stream: the server goes down in order."""
        self._stay_away_s = seconds

    def renewed(self, identity: Identity) -> None:
        """Attach anew with a new certificate."""
        self._link = self._link.renewed(identity)
        self._mailbox.finish()

    async def stay(self, conversation: Conversation) -> AtollError | None:
        """Keep a stream open until `leave`; the refusal that ends it all, where there is one."""
        clock = asyncio.get_running_loop().time
        while not self._leaving.is_set():
            began_s, self._stay_away_s = clock(), 0.0
            self._board.connection("connecting", self._board.picture.trouble)
            reason = await self._once(conversation)
            if reason is not None and self._is_final(reason):
                self._board.connection("refused", str(reason))
                return reason
            if clock() - began_s >= PROVEN_AFTER_S:
                self._backoff.reset()
            await self._wait(str(reason or "the server ended the connection in order"))
        return None

    async def close(self) -> None:
        """Close the channel, and with it the transfers."""
        if self._bulk is not None:
            self._bulk.close()
            self._bulk = None
        if self._channel is not None:
            await self._channel.close()

    async def _once(self, conversation: Conversation) -> AtollError | None:
        """One stream; what ended it, where that was not in order."""
        try:
            await self._attached(conversation)
        except RemoteError as error:
            return error
        except (grpc.RpcError, grpc.aio.AioRpcError) as error:
            return self._link.explain(error)
        return None

    async def _attached(self, conversation: Conversation) -> None:
        await self.close()
        self._channel = self._link.open()
        async with attach(self._channel, await conversation.hello(), self._mailbox) as attachment:
            self._was_attached = True
            self._backoff.within(attachment.welcome.lease_s)
            self._board.connection("attached")
            self._bulk = self._link.bulk(attachment.welcome, self._channel, self._board.bulk)
            _log.info("attached to federation %s at %s", attachment.welcome.federation, self._link.address)
            if self._leaving.is_set():  # said while the stream was being opened
                self._mailbox.finish()
            heartbeats = self._spawn(self._beat(attachment.welcome.heartbeat_s, conversation.heartbeat))
            try:
                conversation.welcomed(attachment.welcome)
                async for message in attachment:
                    await conversation.take(message)
            finally:
                heartbeats.cancel()

    async def _beat(self, every_s: int, heartbeat: Callable[[], pb.Heartbeat]) -> None:
        while True:
            await asyncio.sleep(every_s)
            self._mailbox.post(heartbeat=heartbeat())

    def _is_final(self, reason: AtollError) -> bool:
        return isinstance(reason, IdentityError) or (not self._was_attached and isinstance(reason, _FOR_A_PERSON))

    async def _wait(self, trouble: str) -> None:
        if self._leaving.is_set():
            return
        wait_s = self._backoff.next_s(self._stay_away_s)
        self._board.connection("waiting", trouble)
        _log.warning("not connected to %s: %s; trying again in %.1f s", self._link.address, trouble, wait_s)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._leaving.wait(), wait_s)
