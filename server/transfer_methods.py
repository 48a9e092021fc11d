"""The gRPC edge of transfers: the two methods that take and give raw frames."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import partial
from typing import Any

from atoll.server.transfers import Sinks, Transfers
from atoll.transport.grpc_carrier import GRANT_METADATA_KEY, frames, receive
from atoll.wire.frames import ends_at
from atoll.wire.transfer_pb2 import DownloadRequest, TransferStatus


class TransferMethods:
    """Handlers for `transport.grpc_carrier.transfer_handlers`. What they raise is told to the peer by the gate."""

    def __init__(self, transfers: Transfers, sinks: Sinks) -> None:
        self._transfers, self._sinks = transfers, sinks

    async def upload(self, requests: AsyncIterator[bytes], context: Any) -> TransferStatus:
        """Takes the frames of a granted upload. Raises as `Transfers.upload`, and BadFrame, TooLarge."""
        grant = str(dict(context.invocation_metadata()).get(GRANT_METADATA_KEY, ""))
        return await self._transfers.upload(grant, partial(receive, requests), self._sinks)

    async def download(self, request: DownloadRequest, context: Any) -> AsyncIterator[bytes]:
        """Gives the frames of a granted download. Raises as `Transfers.sending`."""
        async with (
            self._transfers.sending(request.grant, request.offset) as (pieces, moved),
            aclosing(frames(pieces)) as data,
        ):
            async for frame in data:
                yield frame
                moved(ends_at(frame))
