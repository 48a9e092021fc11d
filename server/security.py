"""Who may call what: the one door that every call passes.

Invariant: a method without an entry in METHOD_ROLES is closed, the caller's name and role come from the TLS peer's
certificate and never from a message, and the directory is asked on every call, so a revocation counts from the next
call on. Streams that are already open are ended by whoever keeps them (`server/sessions.py`).

It fails when the online CA's key leaks: then anybody can be anybody to this server, though not on the member list.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol
from urllib.parse import unquote

import grpc
import grpc.aio

from atoll.server.records import Standing
from atoll.transport.identity import ROLES, Clock, how_to_rejoin, utc_now
from atoll.transport.member_certificate import MemberCertificate, certificate_of
from atoll.transport.plaintext import NAME_KEY, ROLE_KEY
from atoll.wire.errors import (
    METADATA_KEY,
    AtollError,
    ConfigError,
    Malformed,
    NotAllowed,
    RemoteError,
    Stranger,
    Unavailable,
    to_detail,
)
from atoll.wire.names import check_site_name

STRANGER = "stranger"  # the role of a caller on the enrolment port, who has no certificate yet

_OPERATOR = frozenset({"operator"})
_RESEARCHER = frozenset({"researcher"})
_LOOKS = frozenset({"reader", "researcher", "operator"})
_SITE = frozenset({"site"})
_EVERY_MEMBER = frozenset(ROLES)

METHOD_ROLES: Mapping[str, frozenset[str]] = {
    "/atoll.wire.Enrolment/Enrol": frozenset({STRANGER}),
    "/atoll.wire.Renewal/Renew": _EVERY_MEMBER,
    "/atoll.wire.Control/Attach": _SITE,
    "/atoll.wire.Transfer/Upload": _SITE | _RESEARCHER,  # and the grant must be the caller's
    "/atoll.wire.Transfer/Download": _SITE | _RESEARCHER,
    "/atoll.wire.Runs/Submit": _RESEARCHER,
    "/atoll.wire.Runs/List": _LOOKS,
    "/atoll.wire.Runs/Watch": _LOOKS,
    "/atoll.wire.Runs/Stop": _RESEARCHER | _OPERATOR,  # a researcher stops only own runs: the service checks
    "/atoll.wire.Runs/Model": _RESEARCHER,
    "/atoll.wire.Admin/Add": _OPERATOR,
    "/atoll.wire.Admin/PendingMembers": _OPERATOR,
    "/atoll.wire.Admin/PublishMembers": _OPERATOR,
    "/atoll.wire.Admin/Revoke": _OPERATOR,
    "/atoll.wire.Admin/Sites": _EVERY_MEMBER,  # a site sees only itself: the service checks
}

DETAILS_CHARACTERS = (
    500  # the status text is percent-encoded, up to 12 bytes a character; the whole text travels beside it
)
CLOCK_SKEW = timedelta(
    minutes=5
)  # of a call on an open connection after its certificate ran out; renewal is at half-life

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who makes the present call, as proved by TLS."""

    name: str
    role: str  # one of ROLES, or STRANGER


class Directory(Protocol):
    """Who is known. Asked once for each call, in a thread."""

    def lookup(self, role: str, name: str) -> Standing | None:
        """The standing of `name` in `role`; None where it was never added."""
        ...


current_caller: ContextVar[Caller] = ContextVar("current_caller")

Context = grpc.aio.ServicerContext[Any, Any]
Identify = Callable[[Context], Awaitable[Caller]]
Verify = Callable[[MemberCertificate], Awaitable[Caller]]


class Gate(grpc.aio.ServerInterceptor):
    """Lets a call through when its caller is known and its role may use the method; answers with typed errors.

    A handler finds the caller in `current_caller`. What it raises from the error tree reaches the peer as status and
    ErrorDetail; anything else is logged here and reaches the peer as INTERNAL with a reference, never with its text.
    """

    def __init__(self, identify: Identify) -> None:
        self._identify = identify

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None  # gRPC answers UNIMPLEMENTED
        return self._guarded(handler_call_details.method, handler)

    def _guarded(self, method: str, handler: Any) -> Any:
        """`handler` behind the check. Four kinds of handler: what it takes does not matter, what it gives does."""

        async def one(request: Any, context: Context) -> Any:
            async with self._admitted(method, context):
                return await inner(request, context)

        async def many(request: Any, context: Context) -> AsyncIterator[Any]:
            async with self._admitted(method, context):
                answers = inner(request, context)
                if not hasattr(answers, "__aiter__"):
                    await answers  # a coroutine that calls context.write itself
                    return
                async with aclosing(answers):  # its `finally` runs when the call ends, not when memory is collected
                    async for answer in answers:
                        yield answer

        takes = "stream" if handler.request_streaming else "unary"
        gives = "stream" if handler.response_streaming else "unary"
        inner = getattr(handler, f"{takes}_{gives}")
        wrap = getattr(grpc, f"{takes}_{gives}_rpc_method_handler")
        return wrap(
            many if handler.response_streaming else one,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    @asynccontextmanager
    async def _admitted(self, method: str, context: Context) -> AsyncIterator[None]:
        try:
            caller = await self._identify(context)
            if caller.role not in METHOD_ROLES.get(method, frozenset()):
                raise NotAllowed(
                    f"{method} is not for {caller.role} {caller.name}".rstrip() + ": ask the federation's operator",
                    field="role",
                    value=caller.role,
                    bound=", ".join(sorted(METHOD_ROLES.get(method, frozenset()))),
                )
            current_caller.set(caller)  # each call has a task of its own, so nothing is to be put back
            yield
        except AtollError as error:
            await _refuse(context, method, as_remote(error))
        except (grpc.aio.AbortError, asyncio.CancelledError):
            raise
        except Exception:  # noqa: BLE001  the edge of the process: logged with its trace, told to the peer without
            reference = secrets.token_hex(4)
            _log.exception("%s failed, reference %s", method, reference)
            text = f"the server failed in {method}: its operator finds reference {reference} in the server's log"
            await context.abort(grpc.StatusCode.INTERNAL, text)


def as_remote(error: AtollError) -> RemoteError:
    """The form in which an error of the tree is told to a peer; a local one keeps its details on this machine."""
    if isinstance(error, RemoteError):
        return error
    if isinstance(error, ConfigError):
        return Malformed(str(error), field=error.key, value=error.value, bound=error.bound)
    _log.error("%s: %s", type(error).__name__, error)
    return Unavailable(f"the server cannot do this now ({type(error).__name__}): its log tells the operator why")


async def _refuse(context: Context, method: str, error: RemoteError) -> None:
    _log.warning("%s from %s refused: %s: %s", method, context.peer(), type(error).__name__, error.message)
    detail = (METADATA_KEY, to_detail(error).SerializeToString())
    await context.abort(grpc.StatusCode[error.status], error.message[:DETAILS_CHARACTERS], trailing_metadata=(detail,))


async def as_stranger(context: Context) -> Caller:
    """For the enrolment port: anybody, with no name."""
    return Caller(name="", role=STRANGER)


def by_certificate(directory: Directory, federation: str, clock: Clock = utc_now) -> Identify:
    """For the mutual-TLS port: the name in the peer's certificate, when the directory stands by it."""
    verify = verifier(directory, federation, clock)

    async def identify(context: Context) -> Caller:
        return await verify(certificate_of(context))

    return identify


def verifier(directory: Directory, federation: str, clock: Clock = utc_now) -> Verify:
    """Who the holder of a certificate is, when the directory stands by it now."""

    async def verify(peer: MemberCertificate) -> Caller:
        if peer.federation != federation:
            raise Stranger(
                f"the certificate is of federation {peer.federation!r}, this is {federation!r}: check the address",
                field="federation",
                value=peer.federation,
                bound=federation,
            )
        rejoin = how_to_rejoin(peer.role, peer.name)
        if peer.expires_at + CLOCK_SKEW <= clock():
            raise Stranger(
                f"the certificate of {peer.role} {peer.name} expired at {peer.expires_at:%Y-%m-%d %H:%M} UTC: {rejoin}",
                field="certificate",
                value=peer.expires_at.isoformat(),
                bound=f"after {clock().isoformat()}",
            )
        standing = await asyncio.to_thread(directory.lookup, peer.role, peer.name)
        if standing is None:
            raise Stranger(f"no {peer.role} {peer.name} is known to federation {federation}: {rejoin}")
        if not standing.active:
            raise Stranger(f"{peer.role} {peer.name} was revoked by the operator of federation {federation}")
        if peer.serial not in standing.serials:
            raise Stranger(
                f"the certificate of {peer.role} {peer.name} was replaced by a newer one: use that, or {rejoin}",
                field="certificate",
                value=peer.serial,
            )
        return Caller(name=peer.name, role=peer.role)

    return verify


async def by_claim(context: Context) -> Caller:
    """For a server with the plaintext flag: whoever the caller says it is, from this machine only."""
    if not _from_loopback(context.peer()):
        raise Stranger("plain text is for the server's own machine alone: remove the plaintext flag at both ends")
    claims = dict(context.invocation_metadata() or ())
    name, role = str(claims.get(NAME_KEY, "")), str(claims.get(ROLE_KEY, ""))
    if role not in ROLES:
        raise Stranger(
            f"a plain-text caller names itself in metadata {NAME_KEY!r} and {ROLE_KEY!r}; the role is missing or wrong",
            field=ROLE_KEY,
            value=role,
            bound=", ".join(ROLES),
        )
    return Caller(name=check_site_name(name, NAME_KEY), role=role)


def _from_loopback(peer: str) -> bool:
    """Whether gRPC's name of a peer, such as "ipv4:127.0.0.1:5000" or "ipv6:%5B::1%5D:5000", is this machine."""
    kind, _, rest = unquote(peer).partition(":")
    if kind == "unix":
        return True
    try:
        return ipaddress.ip_address(rest.rpartition(":")[0].strip("[]")).is_loopback
    except ValueError:
        return False
