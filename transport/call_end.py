"""How a call that sends a stream really ended.

A write into a call that the peer has just ended fails, and grpc.aio then puts "INTERNAL: Internal error from Core" in
the place of the peer's own status, before or after that has come (grpc/grpc issue 36066, open in grpcio 1.85). A site
would never learn why it was refused. Here the peer's status is kept, whichever came first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio

from atoll.wire.errors import RemoteError, Unavailable, from_rpc

_OVERWRITTEN = (grpc.StatusCode.INTERNAL, "Internal error from Core")
_STATUS_WAIT_S = 5.0  # the peer's status comes with the failure of a write, or never


class CallEnd:
    """Watches one `grpc.aio` call with a stream of requests and a single response; create it with the call."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._first: grpc.aio.AioRpcError | None = None
        call.add_done_callback(self._keep_first)

    async def error(self) -> RemoteError:
        """The peer's own error, once the call has failed; Unavailable where the connection broke, or the peer ended the
        call without one."""
        with suppress(grpc.aio.AioRpcError, grpc.aio.InternalError, TimeoutError):
            async with asyncio.timeout(_STATUS_WAIT_S):
                await self._call
        for status in (self._first, _status_of(self._call)):
            if status is not None and (status.code(), status.details()) != _OVERWRITTEN:
                break
        else:
            return Unavailable("the connection broke while sending; try again")
        if status.code() is grpc.StatusCode.OK:
            return Unavailable("the peer ended the call before all was sent; try again")
        return from_rpc(status)

    def _keep_first(self, call: Any) -> None:
        self._first = _status_of(call)


def _status_of(call: Any) -> grpc.aio.AioRpcError:
    """The status of a call that is done, as it stands now."""
    none = grpc.aio.Metadata()
    trailing = _at_once(call.trailing_metadata()) or none
    return grpc.aio.AioRpcError(_at_once(call.code()), none, trailing, _at_once(call.details()))


def _at_once(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """What a coroutine gives that has nothing to wait for, as those of a call that is done."""
    try:
        coroutine.send(None)
    except StopIteration as finished:
        return finished.value
    coroutine.close()
    raise RuntimeError("the call is not done")
