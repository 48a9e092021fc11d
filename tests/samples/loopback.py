"""A federation on loopback: the real store, CA and gate behind two TLS ports, and handlers that say who calls."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from atoll.server.authority import Authority, init_federation
from atoll.server.enrolment import EnrolmentService, RenewalService
from atoll.server.security import Gate, as_stranger, by_certificate, current_caller
from atoll.server.store import Store
from atoll.transport.credentials import server_credentials, server_options
from atoll.transport.enrolment import encode_token, enrol, enrolment_request, secret_sha256
from atoll.transport.identity import ROLES, Identity, fingerprint, private_pem, utc_now
from atoll.transport.members import FederationKey
from atoll.wire import admin_pb2, control_pb2, enrolment_pb2, enrolment_pb2_grpc, runs_pb2

NAME = "isles"
SERVICES = [
    file.DESCRIPTOR.services_by_name[name]
    for file, names in (
        (enrolment_pb2, ("Renewal",)),
        (control_pb2, ("Control",)),
        (runs_pb2, ("Runs",)),
        (admin_pb2, ("Admin",)),
    )
    for name in names
]


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now = utc_now()

    def __call__(self) -> datetime:
        return self.now


def kinds_of_methods() -> dict[str, tuple[bool, bool]]:
    """Full path of every member's method: (streams requests, streams answers)."""
    kinds = {
        f"/{service.full_name}/{method.name}": (method.client_streaming, method.server_streaming)
        for service in SERVICES
        for method in service.methods
    }
    return kinds | {"/atoll.wire.Transfer/Upload": (True, False), "/atoll.wire.Transfer/Download": (False, True)}


class WhoAmI(grpc.GenericRpcHandler):
    """Every method, and two that are in no table; each answers with the caller's role and name. Bytes in and out."""

    def __init__(self, answer: Callable[[str], bytes] | None = None) -> None:
        self._kinds = kinds_of_methods() | {
            "/atoll.wire.Runs/Forgotten": (False, False),
            "/atoll.wire.Runs/ForgottenStream": (True, True),
        }
        self.answer = answer or self._who
        self.own: dict[str, Any] = {}  # handlers of a test's own, by method

    @staticmethod
    def _who(method: str) -> bytes:
        caller = current_caller.get()
        return f"{caller.role} {caller.name}".encode()

    def service(self, handler_call_details: Any) -> Any:
        method = handler_call_details.method
        if method not in self._kinds or method == "/atoll.wire.Renewal/Renew":
            return None
        takes, gives = self._kinds[method]

        async def one(request: Any, context: Any) -> bytes:
            return self.answer(method)

        async def many(request: Any, context: Any) -> AsyncIterator[bytes]:
            yield self.answer(method)
            yield self.answer(method)

        kind = f"{'stream' if takes else 'unary'}_{'stream' if gives else 'unary'}_rpc_method_handler"
        return getattr(grpc, kind)(self.own.get(method, many if gives else one))


class Federation:
    """One server of the federation "isles", its folders below `root`."""

    def __init__(self, root: Path, clock: Clock, ca_clock: Clock) -> None:
        self.root, self.clock = root, clock
        self.key: FederationKey = init_federation(root / "ca", root / "offline", NAME, ["127.0.0.1"], clock=ca_clock)
        self.authority = Authority.load(root / "ca", clock=ca_clock)
        self.store = Store.open(f"sqlite:///{root / 'state.sqlite'}")
        self.handlers = WhoAmI()
        self.port = self.enrolment_port = 0
        self._servers: list[grpc.aio.Server] = []

    async def start(self) -> None:
        """Opens both ports."""
        members = Gate(by_certificate(self.store, NAME, self.clock))
        main = grpc.aio.server(interceptors=(members,), options=server_options())
        renewal = RenewalService(store=self.store, authority=self.authority, clock=self.clock)
        enrolment_pb2_grpc.add_RenewalServicer_to_server(renewal, main)
        main.add_generic_rpc_handlers((self.handlers,))
        self.port = main.add_secure_port("127.0.0.1:0", self.credentials(require_client_certificate=True))
        door = grpc.aio.server(interceptors=(Gate(as_stranger),), options=server_options(for_strangers=True))
        newcomers = EnrolmentService(store=self.store, authority=self.authority, clock=self.clock)
        enrolment_pb2_grpc.add_EnrolmentServicer_to_server(newcomers, door)
        door.add_generic_rpc_handlers((self.handlers,))
        self.enrolment_port = door.add_secure_port("127.0.0.1:0", self.credentials(require_client_certificate=False))
        self._servers = [main, door]
        for server in self._servers:
            await server.start()

    def credentials(self, *, require_client_certificate: bool) -> grpc.ServerCredentials:
        """What a port of this federation's server is opened with."""
        source = self.authority.server_certificate
        return server_credentials(source, require_client_certificate=require_client_certificate)

    async def stop(self) -> None:
        """Closes ports and store."""
        for server in self._servers:
            await server.stop(0)
        self.store.close()

    def ticket(self, name: str, role: str, valid: timedelta = timedelta(hours=1)) -> enrolment_pb2.EnrolmentToken:
        """A token that the store knows."""
        secret, expires = secrets.token_bytes(32), self.clock() + valid
        self.store.invite(name, role, "St Mary" if role == "site" else "", secret_sha256(secret), expires)
        return enrolment_pb2.EnrolmentToken(
            federation=NAME,
            name=name,
            role=role,
            address=f"127.0.0.1:{self.port}",
            enrolment_address=f"127.0.0.1:{self.enrolment_port}",
            secret=secret,
            federation_fingerprint=fingerprint(self.authority.federation_public_key),
            ca_certificate=self.authority.ca_der,
            expires_at_unix_s=int(expires.timestamp()),
        )

    async def join(self, name: str, role: str = "site") -> Identity:
        """A member that enrolled over the wire; its folder is `root`/`name`."""
        token = encode_token(self.ticket(name, role))
        return await asyncio.to_thread(enrol, token, self.root / name, roles=ROLES)


async def call(channel: grpc.aio.Channel, method: str) -> bytes:
    """The first answer of `method`, whatever its kind."""
    takes, gives = kinds_of_methods().get(method, (False, False))
    request: Any = iter([b"request"]) if takes else b"request"
    multicallable: Any = getattr(channel, f"{'stream' if takes else 'unary'}_{'stream' if gives else 'unary'}")(method)
    calling = multicallable(request, timeout=20)
    if not gives:
        return bytes(await calling)
    answers = [bytes(answer) async for answer in calling]
    return answers[0]


def certified(federation: Federation, identity: Identity, *, name: str) -> Identity:
    """`identity` with a certificate of the real CA for `name` that no directory recorded."""
    key = ec.generate_private_key(ec.SECP256R1())
    issued = federation.authority.issue(enrolment_request(name, b"", key, None).csr, name=name, role="site")
    return replace(
        identity,
        name=name,
        certificate_pem=x509.load_der_x509_certificate(issued.certificate_der).public_bytes(Encoding.PEM),
        private_key_pem=private_pem(key),
        expires_at=issued.expires_at,
    )
