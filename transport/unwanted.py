"""A grant that came too late: what it is for is not wanted any more."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import grpc.aio

from atoll.transport.transfer import DOWNLOAD_METHOD
from atoll.wire.control_pb2 import Grant
from atoll.wire.transfer_pb2 import DownloadRequest


async def give_back(channel: grpc.aio.Channel, grant: Grant) -> None:
    """Ends the grant of a download that nobody wants any more, so that the server has the place for others at once.

    A call that asks for nothing ends it; where the connection is broken, the grant is void with it.
    """
    method: Any = channel.unary_stream(DOWNLOAD_METHOD, request_serializer=DownloadRequest.SerializeToString)
    with suppress(grpc.aio.AioRpcError):
        async for _ in method(DownloadRequest(grant=grant.grant, offset=grant.num_bytes)):
            break
