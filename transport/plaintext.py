"""How a caller names itself where there is no TLS: metadata on each call, for development on loopback only.

Invariant: a server reads these keys only when it was started with the plaintext flag; behind TLS they mean nothing.
"""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio

NAME_KEY = "atoll-name"
ROLE_KEY = "atoll-role"


class _Details:
    """What a call is made with, and two entries more. gRPC reads these attributes by name."""

    def __init__(self, details: Any, name: str, role: str) -> None:
        self.method, self.timeout, self.credentials = details.method, details.timeout, details.credentials
        self.wait_for_ready = details.wait_for_ready
        self.compression = getattr(details, "compression", None)
        self.metadata = [*(details.metadata or ()), (NAME_KEY, name), (ROLE_KEY, role)]


class BlockingClaim(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """Adds the caller's name to each call of a blocking channel."""

    def __init__(self, name: str, role: str) -> None:
        self._name, self._role = name, role

    def _claim(self, continuation: Any, details: Any, request: Any) -> Any:
        return continuation(_Details(details, self._name, self._role), request)

    # Any: the four differ only in types that this class passes through.
    intercept_unary_unary: Any = _claim
    intercept_unary_stream: Any = _claim
    intercept_stream_unary: Any = _claim
    intercept_stream_stream: Any = _claim


class _Claim:
    def __init__(self, name: str, role: str) -> None:
        self._name, self._role = name, role

    async def claim(self, continuation: Any, details: Any, request: Any) -> Any:
        """Makes the call with the caller's name in its metadata."""
        metadata = grpc.aio.Metadata(*(details.metadata or ()), (NAME_KEY, self._name), (ROLE_KEY, self._role))
        return await continuation(details._replace(metadata=metadata), request)


class _UnaryUnary(_Claim, grpc.aio.UnaryUnaryClientInterceptor):
    intercept_unary_unary: Any = _Claim.claim


class _UnaryStream(_Claim, grpc.aio.UnaryStreamClientInterceptor):
    intercept_unary_stream: Any = _Claim.claim


class _StreamUnary(_Claim, grpc.aio.StreamUnaryClientInterceptor):
    intercept_stream_unary: Any = _Claim.claim


class _StreamStream(_Claim, grpc.aio.StreamStreamClientInterceptor):
    intercept_stream_stream: Any = _Claim.claim


def asyncio_claims(name: str, role: str) -> list[grpc.aio.ClientInterceptor]:
    """Interceptors that add the caller's name to each call of an asyncio channel, which wants one for each kind."""
    return [kind(name, role) for kind in (_UnaryUnary, _UnaryStream, _StreamUnary, _StreamStream)]
