"""How a site reaches its server: mutual TLS with its own certificate, or plain text on loopback where both ends ask.

What goes wrong on the way is turned into words that an administrator can act on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import grpc
import grpc.aio

from atoll.client.home import SiteHome
from atoll.client.settings import SiteSettings
from atoll.transport.bulk_carrier import BulkCarrier
from atoll.transport.credentials import (
    explain_connection_error,
    explain_unavailable,
    open_channel,
    open_plaintext_channel,
    proxy_of,
    require_loopback,
)
from atoll.transport.grpc_carrier import GrpcCarrier
from atoll.transport.hello import BULK
from atoll.transport.identity import Identity, holds_identity, how_to_rejoin, load_identity
from atoll.wire.control_pb2 import Welcome
from atoll.wire.errors import AtollError, ConfigError, IdentityError, Unavailable, from_rpc

ROLE = "site"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A site's name and server, and the identity that proves the name; None in plain text."""

    site: str
    address: str  # host:port
    identity: Identity | None

    def open(self) -> grpc.aio.Channel:
        """A channel to the server. Connects on first use."""
        if self.identity is None:
            return open_plaintext_channel(self.address, name=self.site, role=ROLE)
        return open_channel(self.identity)

    def bulk(self, welcome: Welcome, channel: grpc.aio.Channel, tell: Callable[[str], None]) -> BulkCarrier | None:
        """What carries granted bytes beside gRPC, where the server that said `welcome` has a port for them.

        Args:
            tell: hears how they travel, in words; again when that changes.
        """
        if BULK not in welcome.features or not 1 <= welcome.bulk_port <= 65535:
            tell("gRPC: the server has no bulk port")
            return None
        if (proxy := proxy_of(self.address)) is not None:
            _log.info("models and updates go over gRPC: bulk lines do not pass the proxy %s", proxy)
            tell(f"gRPC: bulk lines do not pass the proxy {proxy}")
            return None
        host = self.address.rpartition(":")[0].removeprefix("[").removesuffix("]")
        return BulkCarrier(
            (host, welcome.bulk_port),
            name=self.site,
            identity=self.identity,
            instead=GrpcCarrier(channel),
            tell=tell,
        )

    def explain(self, error: grpc.RpcError | grpc.aio.AioRpcError) -> AtollError:
        """What a failed call means: the server's own words, or what the broken connection says."""
        if self.identity is not None:
            return explain_connection_error(error, self.identity)
        refusal = from_rpc(error)
        if not isinstance(refusal, Unavailable):
            return refusal
        who, rejoin = f"{ROLE} {self.site}", how_to_rejoin(ROLE, self.site)
        return explain_unavailable(refusal, address=self.address, who=who, rejoin=rejoin)

    def renewed(self, identity: Identity) -> Link:
        """The same with a new certificate."""
        return replace(self, identity=replace(identity, address=self.address))


def find_link(settings: SiteSettings, home: SiteHome) -> Link:
    """The way to the server that settings and identity name.

    Raises:
        ConfigError: they do not fit each other, or plain text would leave this machine.
        IdentityError: the identity is missing, expired or unreadable.
    """
    site = settings.site
    if site.plaintext:
        if site.server is None:
            raise ConfigError(f"{home.settings}: site.server is missing; plain text needs it", key="site.server")
        require_loopback(site.server)
        return Link(site=site.name, address=site.server, identity=None)
    if not holds_identity(home.identity):
        raise IdentityError(
            f"{home.root} holds no identity: join with the token that the federation's operator gives you "
            f"(atoll site join TOKEN --home {home.root})"
        )
    identity = load_identity(home.identity)
    if (identity.role, identity.name) != (ROLE, site.name):
        raise ConfigError(
            f"{home.settings}: site.name is {site.name!r}, the identity beside it is that of {identity.role} "
            f"{identity.name!r}; write that name",
            key="site.name",
            value=site.name,
            bound=identity.name,
        )
    address = site.server or identity.address
    return Link(site=site.name, address=address, identity=replace(identity, address=address))
