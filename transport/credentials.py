"""TLS on both ends: what a channel trusts, what a server demands, and what a failed handshake means.

Invariant: a channel trusts the CA pinned at enrolment and nothing else (never the machine's store), and the name in
the server's certificate is the same for every server, so addresses may change without new certificates. Plain text
exists on loopback only, and both ends must ask for it.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import grpc
import grpc.aio

from atoll.transport.identity import Identity, how_to_rejoin, utc_now
from atoll.transport.plaintext import BlockingClaim, asyncio_claims
from atoll.wire.errors import AtollError, ConfigError, IdentityError, Stranger, Unavailable, from_rpc

SERVER_NAME = "server.atoll"

_log = logging.getLogger(__name__)

Options = tuple[tuple[str, str | int], ...]

# A run offer carries a manifest of up to 16 MiB and a job, a member list of 100,000 sites is about 25 MB.
MAX_MESSAGE_BYTES = 32 << 20
# A request to join is about 500 bytes, its certificate request at most 4 KiB.
STRANGER_MESSAGE_BYTES = 16 << 10
# A refusal carries up to 2,000 characters (8 KB of UTF-8, a third more in base64) beside the status text.
MAX_METADATA_BYTES = 64 << 10
# Home routers and firewalls forget a silent connection after 60 s at the earliest.
KEEPALIVE_MS = 30_000
KEEPALIVE_TIMEOUT_MS = 20_000

_SHARED: Options = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    # A ping that measures bandwidth may be under way already: no other one is sent then, and its own limit is 60 s.
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.max_pings_without_data", 0),  # 0: a stream that waits for its next task may be silent for hours
)


_PROXIES_OF_GRPC = ("grpc_proxy", "https_proxy", "http_proxy")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCertificate:
    """What a server shows and whom it believes."""

    certificate_pem: bytes
    private_key_pem: bytes = field(repr=False)
    ca_pem: bytes = field(repr=False)


def server_options(*, for_strangers: bool = False) -> Options:
    """Options of a gRPC server: limits as on channels, and pings allowed as often as channels send them.

    Args:
        for_strangers: the enrolment port. Whoever finds it may fill no more memory than a request to join takes.
    """
    limits: Options = (
        ("grpc.max_receive_message_length", STRANGER_MESSAGE_BYTES),
        ("grpc.max_concurrent_streams", 4),
        ("grpc.max_connection_age_ms", 60_000),
    )
    shared = tuple(option for option in _SHARED if option[0] not in dict(limits)) if for_strangers else _SHARED
    return (
        *shared,
        *(limits if for_strangers else ()),
        ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
        ("grpc.so_reuseport", 0),  # a second server on the port must fail, not share it
    )


def server_credentials(
    source: Callable[[], ServerCertificate], *, require_client_certificate: bool
) -> grpc.ServerCredentials:
    """TLS for a server port. `source` is asked at each handshake, so a renewed certificate needs no restart.

    Args:
        source: gives the certificate to show now; must be quick and may be called from any thread.
        require_client_certificate: False only for the enrolment port.
    """
    shown = source()
    lock = threading.Lock()

    def configuration(certificate: ServerCertificate) -> grpc.ServerCertificateConfiguration:
        pair = (certificate.private_key_pem, certificate.certificate_pem)
        return grpc.ssl_server_certificate_configuration([pair], certificate.ca_pem)

    def fetch() -> Any:  # gRPC takes None for "no change", which its type stubs leave out
        nonlocal shown
        with lock:
            try:
                certificate = source()
            except AtollError as error:
                _log.error("no new server certificate, the old one stays in use: %s", error)
                return None
            if certificate == shown:
                return None
            shown = certificate
            return configuration(certificate)

    return grpc.dynamic_ssl_server_credentials(configuration(shown), fetch, require_client_certificate)


def open_channel(identity: Identity) -> grpc.aio.Channel:
    """A mutual-TLS channel to the identity's server. Connects on first use."""
    return grpc.aio.secure_channel(identity.address, _credentials(identity), options=tls_options(identity.address))


def open_blocking_channel(identity: Identity) -> grpc.Channel:
    """As `open_channel`, for code without an event loop."""
    return grpc.secure_channel(identity.address, _credentials(identity), options=tls_options(identity.address))


def open_enrolment_channel(address: str, ca_pem: bytes) -> grpc.Channel:
    """A channel to an enrolment port: the server proves itself by the token's CA, the caller has no certificate yet."""
    credentials = grpc.ssl_channel_credentials(root_certificates=ca_pem)
    return grpc.secure_channel(address, credentials, options=tls_options(address))


def open_plaintext_channel(address: str, *, name: str, role: str) -> grpc.aio.Channel:
    """A channel without TLS for development, which claims `name` and `role` in its metadata.

    Raises:
        ConfigError: the address is not on loopback.
    """
    require_loopback(address)
    options = (*_SHARED, ("grpc.enable_http_proxy", 0))
    return grpc.aio.insecure_channel(address, options=options, interceptors=asyncio_claims(name, role))


def open_blocking_plaintext_channel(address: str, *, name: str, role: str) -> grpc.Channel:
    """As `open_plaintext_channel`, for code without an event loop. Raises ConfigError."""
    require_loopback(address)
    channel = grpc.insecure_channel(address, options=(*_SHARED, ("grpc.enable_http_proxy", 0)))
    return grpc.intercept_channel(channel, BlockingClaim(name, role))


def is_loopback(address: str) -> bool:
    """Whether "host:port" stays on this machine."""
    host = _host(address)
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def require_loopback(address: str) -> None:
    """Raises ConfigError unless "host:port" stays on this machine."""
    if not is_loopback(address):
        raise ConfigError(
            f"plain text is for this machine alone, and {address} is beyond it: remove the plaintext flag (TLS is the "
            "default) or use 127.0.0.1",
            key="plaintext",
            value=address,
            bound="127.0.0.0/8, [::1] or localhost",
        )


def tls_options(address: str, environment: Mapping[str, str] | None = None) -> Options:
    """Options of a TLS channel to `address`: limits, the server's name, and the proxy.

    gRPC itself reads `grpc_proxy`, `https_proxy`, `http_proxy`, `no_grpc_proxy` and `no_proxy` in lower case. Many
    machines set HTTPS_PROXY or NO_PROXY, so each of these is used where no lower-case name says the same. Loopback
    never goes through a proxy.
    """
    options = (*_SHARED, ("grpc.ssl_target_name_override", SERVER_NAME))
    if is_loopback(address):
        return (*options, ("grpc.enable_http_proxy", 0))
    environment = os.environ if environment is None else environment
    proxy = _unless(_PROXIES_OF_GRPC, "HTTPS_PROXY", environment)
    exceptions = _unless(("no_grpc_proxy", "no_proxy"), "NO_PROXY", environment)
    direct = [entry.strip().lstrip(".") for entry in exceptions.split(",") if entry.strip()]
    if any(entry == "*" or f".{_host(address)}".endswith(f".{entry}") for entry in direct):
        return (*options, ("grpc.enable_http_proxy", 0))
    return (*options, ("grpc.http_proxy", proxy)) if proxy else options


def proxy_of(address: str, environment: Mapping[str, str] | None = None) -> str | None:
    """The proxy through which a TLS channel to `address` goes; None where it goes straight."""
    environment = os.environ if environment is None else environment
    options = dict(tls_options(address, environment))
    if options.get("grpc.enable_http_proxy") == 0:
        return None
    if (proxy := options.get("grpc.http_proxy")) is not None:
        return str(proxy)
    return next((environment[name] for name in _PROXIES_OF_GRPC if environment.get(name)), None)


def _unless(read_by_grpc: Sequence[str], name: str, environment: Mapping[str, str]) -> str:
    """A variable that gRPC does not read; "" where one is set that it reads and that says the same."""
    return "" if any(environment.get(other) for other in read_by_grpc) else environment.get(name, "")


def _host(address: str) -> str:
    return address.rpartition(":")[0].removeprefix("[").removesuffix("]")


def _credentials(identity: Identity) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(
        root_certificates=identity.ca_pem,
        private_key=identity.private_key_pem,
        certificate_chain=identity.certificate_pem,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Meaning:
    sign: str  # what gRPC or BoringSSL prints; a regular expression
    kind: type[Stranger | Unavailable]
    text: str  # for the person who reads it: {who} is "site alpha", {at} the address


_MEANINGS = (
    _Meaning(
        sign="certificate has expired",
        kind=Stranger,
        text="the certificate of the server at {at} has expired: its operator restarts the server, which renews it, "
        "or corrects its clock",
    ),
    _Meaning(
        sign="certificate is not yet valid",
        kind=Stranger,
        text="the certificate of the server at {at} is not valid yet: the clock of this machine or of the server is "
        "wrong",
    ),
    _Meaning(
        sign="CERTIFICATE_VERIFY_FAILED",
        kind=Stranger,
        text="the server at {at} is not the one of the federation that {who} joined (its certificate comes from "
        "another CA): check the address; if the federation was set up anew, {rejoin}",
    ),
    _Meaning(
        sign="is not in peer certificate",
        kind=Stranger,
        text="the server at {at} is not an Atoll server of this federation: check the address",
    ),
    _Meaning(
        sign="WRONG_VERSION_NUMBER",
        kind=Stranger,
        text="{at} does not speak TLS: check the address and port (a server with the plaintext flag is for its own "
        "machine alone)",
    ),
    _Meaning(
        sign="Connection refused",
        kind=Unavailable,
        text="nobody listens at {at}: check the address, or wait until the server runs",
    ),
    _Meaning(
        sign="DNS resolution failed",
        kind=Unavailable,
        text="the name in {at} is not known here: check the address and this machine's DNS",
    ),
    _Meaning(
        sign="failed to connect.*(Socket closed|Connection reset)",
        kind=Unavailable,
        text="the server at {at} closed the connection of {who} before the first call: it is going down, or it does "
        "not accept this certificate (of another federation, or expired by the server's clock); if it stays so, "
        "{rejoin}",
    ),
    _Meaning(
        sign="Socket closed|Connection reset",
        kind=Unavailable,
        text="the connection to {at} broke off: the server or the network went down; trying again is right",
    ),
)


def explain_connection_error(
    error: grpc.RpcError | grpc.aio.AioRpcError, identity: Identity, *, now: datetime | None = None
) -> AtollError:
    """The error to raise for a call that failed: the peer's own words, or what the broken connection means.

    An expired certificate is an IdentityError (trying again is no use), all else is a RemoteError.
    """
    refusal = from_rpc(error)
    if not isinstance(refusal, Unavailable):
        return refusal
    who, rejoin = f"{identity.role} {identity.name}", how_to_rejoin(identity.role, identity.name)
    now = now or utc_now()
    if identity.expires_at <= now:
        return IdentityError(f"the certificate of {who} expired at {identity.expires_at:%Y-%m-%d %H:%M} UTC: {rejoin}")
    return explain_unavailable(refusal, address=identity.address, who=who, rejoin=rejoin)


def broke_off(error: Unavailable) -> bool:
    """Whether there was a connection when the call failed, so that nobody knows whether it has had its effect."""
    cause = error.__cause__
    text = (cause.details() or "") if isinstance(cause, grpc.aio.AioRpcError) else ""
    return re.search("Socket closed|Connection reset|Broken pipe|GOAWAY", text) is not None and "failed to" not in text


def explain_unavailable(refusal: Unavailable, *, address: str, who: str, rejoin: str) -> Stranger | Unavailable:
    """What a connection that never came about means, in words that say what to do."""
    for meaning in _MEANINGS:
        if re.search(meaning.sign, refusal.message):
            return meaning.kind(meaning.text.format(at=address, who=who, rejoin=rejoin))
    return refusal
