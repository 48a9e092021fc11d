"""A server from start to end: folder, store, coordinator, two ports, and an orderly way down.

Order of the start: what can refuse comes first (settings, folder lock, database, keys, ports), then the runs go on,
then the doors open. SIGTERM or Ctrl-C ends it in order; a second one at once. Nothing depends on the order: a server
that is killed goes on from its journal.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import grpc
import grpc.aio

from atoll.server import bulk
from atoll.server.admin import AdminService
from atoll.server.authority import Authority
from atoll.server.bulk import BulkPort
from atoll.server.control_service import ControlService
from atoll.server.coordinator import Coordinator
from atoll.server.database import FolderLock
from atoll.server.enrolment import EnrolmentService, RenewalService
from atoll.server.evaluator import Evaluator
from atoll.server.expiry import watch_certificates
from atoll.server.first_operator import renew_operator
from atoll.server.runs_service import RunsService
from atoll.server.security import Gate, as_stranger, by_certificate, by_claim, verifier
from atoll.server.settings import ServerFolder, ServerSettings, load_settings, parse_address
from atoll.server.steps import Observer, unobserved
from atoll.server.store import Store
from atoll.server.transfer_methods import TransferMethods
from atoll.server.upstream import Upstream
from atoll.transport.credentials import server_credentials, server_options
from atoll.transport.grpc_carrier import transfer_handlers
from atoll.transport.mallopt import tune_malloc
from atoll.wire import admin_pb2_grpc, control_pb2_grpc, enrolment_pb2_grpc, runs_pb2_grpc
from atoll.wire.errors import ConfigError, LocalError, PortInUse

log = logging.getLogger(__name__)


class Membership(Protocol):
    """This server as a site of an upper federation (client/region.py)."""

    def start(self) -> None: ...

    async def stop(self) -> None: ...


Join = Callable[[Path, Upstream], Membership]  # from the home of the membership, not started yet


def run_server(folder: Path, on_step: Observer = unobserved, join: Join | None = None) -> None:
    """Runs the server in `folder` until SIGTERM or Ctrl-C; prints one line when it is ready.

    Args:
        join: makes the agent towards an upper server, where the settings have [upstream].

    Raises:
        ConfigError: the settings cannot be used.
        LocalError: the folder, the database, a key or a port cannot be used; says which, and what to do.
    """
    settings = load_settings(folder)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    tune_malloc()
    _allow_many_files()
    with _opened(ServerFolder(root=folder.resolve()), settings) as (store, authority):
        asyncio.run(_serve(ServerFolder(root=folder.resolve()), settings, store, authority, on_step, join))


@contextmanager
def _opened(place: ServerFolder, settings: ServerSettings) -> Iterator[tuple[Store, Authority]]:
    """The folder for this process alone, its store and its keys."""
    lock = FolderLock(place.lock_path)
    try:
        store = Store.open(place.database_url(settings))
        try:
            authority = Authority.load(place.authority)
            if authority.federation != settings.federation:
                raise ConfigError(
                    f'{place.settings_path}: federation = "{settings.federation}", and the keys in {place.authority} '
                    f'are those of "{authority.federation}"; the name cannot be changed',
                    key="federation",
                    value=settings.federation,
                    bound=authority.federation,
                )
            renew_operator(place.operator, address=settings.address, store=store, authority=authority)
            yield store, authority
        finally:
            store.close()
    finally:
        lock.release()


async def _serve(
    place: ServerFolder,
    settings: ServerSettings,
    store: Store,
    authority: Authority,
    on_step: Observer,
    join: Join | None,
) -> None:
    server = Server(place=place, settings=settings, store=store, authority=authority, on_step=on_step, join=join)
    end = asyncio.Event()
    kill = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: kill.set() if end.is_set() else end.set())
    await server.start()
    print(server.ready_line, flush=True)
    await end.wait()
    log.info("going down: transfers and streams end in order; a second signal ends them at once")
    drain = asyncio.create_task(server.drain())
    killed = asyncio.create_task(kill.wait())
    await asyncio.wait({drain, killed}, return_when=asyncio.FIRST_COMPLETED)
    if not drain.done():
        log.warning("ended at once by a second signal")
        drain.cancel()
    killed.cancel()
    await asyncio.gather(drain, killed, return_exceptions=True)


class Server:
    """The two ports and all that answers on them."""

    def __init__(
        self,
        *,
        place: ServerFolder,
        settings: ServerSettings,
        store: Store,
        authority: Authority,
        on_step: Observer = unobserved,
        join: Join | None = None,
    ) -> None:
        """Raises ConfigError or IdentityError where the home of [upstream] cannot be used."""
        self._settings, self._store, self._authority = settings, store, authority
        evaluator = Evaluator(settings=settings, folder=place, store=store) if settings.apps else None
        self.coordinator = Coordinator(
            settings=settings, folder=place, store=store, evaluator=evaluator, on_step=on_step
        )
        self._membership: Membership | None = None
        if settings.upstream is not None:
            if join is None:
                raise ConfigError("[upstream]: this server was started without an agent", key="upstream")
            upstream = Upstream(settings.upstream, self.coordinator, store)
            self._membership = join(place.root / settings.upstream.home, upstream)
        self._members: grpc.aio.Server | None = None
        self._newcomers: grpc.aio.Server | None = None
        self._watch: asyncio.Task[None] | None = None  # over members' certificates
        self._bulk: BulkPort | None = None
        self.port = self.enrolment_port = self.bulk_port = 0

    @property
    def ready_line(self) -> str:
        mode = "PLAIN TEXT" if self._settings.plaintext else "mutual TLS"
        host, enrolment_host = (parse_address(a)[0] for a in (self._settings.listen, self._settings.enrolment_listen))
        return (
            f"federation {self._settings.federation} is ready at {host}:{self.port} ({mode}), "
            f"enrolment at {enrolment_host}:{self.enrolment_port}"
        )

    async def start(self) -> None:
        """Takes the ports, goes on with the open runs, then lets callers in.

        Raises:
            PortInUse: another process listens there.
            LocalError: the address is not this machine's, or needs rights that this process has not.
        """
        for key in ("listen", "enrolment_listen"):
            check_bind(getattr(self._settings, key), key)  # gRPC would not say why, and log on its own
        identify = by_claim if self._settings.plaintext else by_certificate(self._store, self._settings.federation)
        self._members = grpc.aio.server(interceptors=[Gate(identify)], options=server_options())
        self._newcomers = grpc.aio.server(interceptors=[Gate(as_stranger)], options=server_options(for_strangers=True))
        credentials = None if self._settings.plaintext else self._credentials(require_client=True)
        self.port = self._bind(self._members, "listen", credentials)
        self.enrolment_port = self._bind(self._newcomers, "enrolment_listen", self._credentials(require_client=False))
        if self._settings.bulk != "off":
            self.bulk_port = self._bind_bulk(self._settings.bulk)
        self._add_services(self._members, self._newcomers)
        await self.coordinator.start()
        await self._members.start()
        await self._newcomers.start()
        if self._bulk is not None:
            self._bulk.start()
        self._watch = asyncio.create_task(watch_certificates(self._store), name="certificates")
        if self._membership is not None:
            self._membership.start()

    async def drain(self) -> None:
        """Lets nobody in any more, gives transfers and other calls `limits.drain_s`, ends streams in order, and stops."""
        if self._watch is not None:
            self._watch.cancel()
        if self._membership is not None:
            await self._membership.stop()
        servers = [server for server in (self._newcomers, self._members) if server is not None]
        stopping = [asyncio.create_task(server.stop(self._settings.limits.drain_s)) for server in servers]
        await asyncio.sleep(0)  # the stops begin first, or a site whose stream ends would come straight back
        if self._bulk is not None:
            self._bulk.shut()
        await self.coordinator.drain()
        if self._bulk is not None:
            await self._bulk.stop()
        await asyncio.gather(*stopping)

    def _credentials(self, *, require_client: bool) -> grpc.ServerCredentials:
        return server_credentials(self._authority.server_certificate, require_client_certificate=require_client)

    def _bind(self, server: grpc.aio.Server, key: str, credentials: grpc.ServerCredentials | None) -> int:
        address = getattr(self._settings, key)
        try:
            if credentials is None:
                port = server.add_insecure_port(address)
            else:
                port = server.add_secure_port(address, credentials)
        except RuntimeError:
            port = 0
        if not port:  # taken since the check
            check_bind(address, key)
            raise _in_use(f"{key} = {address}")
        return port

    def _bind_bulk(self, address: str) -> int:
        check_bind(address, "bulk")
        plaintext = self._settings.plaintext
        self._bulk = BulkPort(
            self.coordinator.transfers,
            admit=bulk.by_claim if plaintext else bulk.by_certificate(verifier(self._store, self._settings.federation)),
            certificate=None if plaintext else self._authority.server_certificate,
            threads=self._settings.limits.max_uploads + self._settings.limits.max_downloads,
        )
        try:
            return self._bulk.bind(parse_address(address))
        except OSError as error:
            raise _bind_error(error, f"bulk = {address}") from None

    def _add_services(self, members: grpc.aio.Server, newcomers: grpc.aio.Server) -> None:
        runs, transfers = self.coordinator.runs, self.coordinator.transfers
        enrolment = EnrolmentService(store=self._store, authority=self._authority)
        renewal = RenewalService(store=self._store, authority=self._authority)
        admin = AdminService(
            settings=self._settings, store=self._store, authority=self._authority, floor=self.coordinator
        )
        enrolment_pb2_grpc.add_EnrolmentServicer_to_server(enrolment, newcomers)
        enrolment_pb2_grpc.add_RenewalServicer_to_server(renewal, members)
        admin_pb2_grpc.add_AdminServicer_to_server(admin, members)
        control_pb2_grpc.add_ControlServicer_to_server(ControlService(self.coordinator, self.bulk_port), members)
        runs_pb2_grpc.add_RunsServicer_to_server(RunsService(runs), members)

        methods = TransferMethods(transfers, runs.sink)
        members.add_generic_rpc_handlers((transfer_handlers(methods.upload, methods.download),))


def _allow_many_files() -> None:
    """As many as this process may have: a site takes one, and so does an update that a reducer keeps."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def check_bind(address: str, key: str) -> None:
    """Tries an address without listening on it; `key` names the setting in errors.

    Raises:
        PortInUse: another process listens there.
        LocalError: it is not this machine's, or needs rights that this process has not.
    """
    host, port = parse_address(address)
    try:
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
    except OSError as error:
        raise _bind_error(error, f"{key} = {address}") from None


def _bind_error(error: OSError, at: str) -> LocalError:
    match error.errno:
        case errno.EADDRINUSE:
            return _in_use(at)
        case errno.EACCES:
            return LocalError(f"{at}: this user may not take that port; choose one above 1023")
        case errno.EADDRNOTAVAIL:
            return LocalError(f"{at}: this machine does not have that address; use 0.0.0.0 for all that it has")
        case _:
            return LocalError(f"{at}: cannot listen there: {error.strerror}; check the address")


def _in_use(at: str) -> PortInUse:
    return PortInUse(f"{at}: another process listens there; end it, or choose another port in server.toml")
