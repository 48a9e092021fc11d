"""The gRPC edge of the control stream: one Attach a site, one reader and one writer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

from atoll.server.coordinator import Coordinator
from atoll.server.security import current_caller
from atoll.server.sessions import Session
from atoll.transport.hello import choose, make_welcome
from atoll.wire import control_pb2 as pb
from atoll.wire.errors import Malformed, RemoteError

HELLO_PATIENCE_S = 30.0  # a site says hello at once; whoever does not is holding a stream for nothing


class ControlService:
    """Servicer of atoll.wire.Control."""

    def __init__(self, coordinator: Coordinator, bulk_port: int = 0) -> None:
        """`bulk_port`: where sites may bring and fetch granted bytes beside gRPC; 0: nowhere."""
        self._coordinator, self._bulk_port = coordinator, bulk_port

    async def Attach(self, requests: AsyncIterator[pb.SiteMessage], context: Any) -> AsyncIterator[pb.ServerMessage]:
        """The stream of one site, from Hello to its end.

        Raises:
            Malformed: the first message is no Hello, or a later one is out of place.
            Incompatible: no protocol version in common.
            Stale: the site attached anew.
        """
        site = current_caller.get().name
        hello = await self._hello(site, requests)
        limits = self._coordinator.settings.limits
        yield pb.ServerMessage(
            welcome=make_welcome(
                choose(hello),
                federation=self._coordinator.settings.federation,
                heartbeat_s=max(1, round(limits.heartbeat_s)),
                lease_s=max(2, round(limits.lease_s)),
                max_frame_bytes=limits.max_frame_bytes,
                bulk_port=self._bulk_port,
            )
        )
        session = Session(site, hello)
        await self._coordinator.attach(session)
        reader = asyncio.create_task(self._read(session, requests))
        try:
            while (message := await session.next()) is not None:
                yield message
        finally:
            reader.cancel()
            with suppress(asyncio.CancelledError):
                await reader
            self._coordinator.detach(session)

    async def _hello(self, site: str, requests: AsyncIterator[pb.SiteMessage]) -> pb.Hello:
        try:
            async with asyncio.timeout(HELLO_PATIENCE_S):
                first = await anext(aiter(requests))
        except (TimeoutError, StopAsyncIteration):
            raise Malformed(f"{site} opened a stream and did not say hello", site=site, field="hello") from None
        if first.WhichOneof("body") != "hello":
            raise Malformed(f"the first message of {site} is no hello", site=site, field="hello")
        return first.hello

    async def _read(self, session: Session, requests: AsyncIterator[pb.SiteMessage]) -> None:
        """Hand on what the site says, until it stops or says something that makes no sense."""
        try:
            async for message in requests:
                await self._coordinator.hear(session, message)
        except RemoteError as error:
            session.end(error)
        finally:
            session.end()
