"""How a server comes to be: the federation's key, the CA, the first operator, and a `server.toml` that explains itself.

Invariant: the offline key never lies below the server's folder, and a call that fails leaves no file behind.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from pydantic import ValidationError

from atoll.server.authority import Authority, init_federation
from atoll.server.database import without_password
from atoll.server.first_operator import admit_operator
from atoll.server.settings import ServerFolder, ServerSettings, database_of, parse_address
from atoll.server.store import Store
from atoll.transport.credentials import is_loopback
from atoll.transport.identity import Clock, make_private_folder, utc_now
from atoll.wire.errors import ConfigError, LocalError
from atoll.wire.explain import explain

_STARTER = """\
# Settings of an Atoll server, read when it starts: atoll server run {folder}
# What is commented out shows the default; to change a key of a table, uncomment the table's [name] as well.

# Name of the federation. It stands in every certificate and on the member list: fixed for ever.
federation = "{federation}"

# Where sites and people reach this server; goes into each token. Tokens made before keep the old address.
address           = "{address}"
enrolment_address = "{enrolment_address}"

# Where it listens: mutual TLS for everything, and server-side TLS for those who join with a token.
listen           = "{listen}"
enrolment_listen = "{enrolment_listen}"

# Where models and updates travel beside gRPC, for half the CPU time: mutual TLS as on `listen` (docs/protocol.md). Sites that
# cannot reach this port use `listen` for all. "off": nobody does.
bulk = "{bulk}"

# Development on one machine only: no TLS, callers are believed. Loopback addresses only, and sites must say the same.
{plaintext}

# "sqlite": a file in this folder. Or "postgresql://user@host/name" (needs: pip install "atoll[server]"). A URL with a
# password belongs into the environment variable ATOLL_DATABASE, which wins over this line.
database = "{database}"

# [limits]
# heartbeat_s     = 15           # seconds between heartbeats of a site
# lease_s         = 45           # silence after which a site is taken for gone; at least two heartbeats
# max_uploads     = 2            # updates received at once; each takes a staging slot of one update on disk
# max_downloads   = 2            # model downloads at once
# min_bytes_per_s = 32768        # a transfer slower than this over 30 s gives way to the next
# max_frame_bytes = 4194304      # bytes of one frame on the wire; at most 4 MiB
# max_model_bytes = 68719476736  # bytes of a model that a researcher may submit
# max_open_runs   = 64           # runs queued and running at once
# keep_versions   = 3            # newest model versions of a run that stay on disk, beside version 0
# drain_s         = 30           # seconds that transfers and other calls have to end on SIGTERM

# This server as one site of another federation, for all sites of its own: a tree (docs/trees.md).
# [upstream]
# home      = "upstream"         # folder made by: atoll site join TOKEN --home {folder}/upstream; its policy.toml counts
# min_sites = 2                  # own sites without which this region takes no part in a run
# quorum    = 2                  # updates that suffice at the deadline of a round; absent: all
# deadline_share = 0.9           # of the upper deadline of a round; the rest is for the sum's way up

# Evaluation on data of the server's own, for jobs with evaluation.server = true. It runs in a process without keys.
# The server evaluates only with apps that are installed and named here.
# [evaluation]
# device    = "cpu"              # or "auto", "cuda", "cuda:1"
# timeout_s = 600                # seconds for one evaluation

# [apps.fashion]                 # as named in the job
# distribution = "atoll-examples"
# entry_point  = "fashion"       # in the group "atoll.apps"
#
# [data.fashion]                 # as named in the job; the whole table goes to the app
# test = "/srv/fashion/test.npz"

# Who hears what happens to runs (docs/control.md): a kind that is installed here, with its options.
# [callbacks.audit]
# kind = "json_lines"
# path = "/var/log/atoll/runs.jsonl"
"""


def init_server(
    folder: Path,
    *,
    federation: str,
    key_folder: Path,
    address: str,
    enrolment_address: str | None = None,
    listen: str | None = None,
    enrolment_listen: str | None = None,
    database: str | None = None,
    plaintext: bool = False,
    clock: Clock = utc_now,
    environment: Mapping[str, str] | None = None,
) -> Path:
    """Makes a server in `folder` and the federation's offline key in `key_folder`; returns the operator's folder.

    Args:
        address: host:port under which sites and people reach the server.
        enrolment_address: the same for newcomers; the next port where None.
        listen: host:port to bind; all interfaces and the port of `address` where None.
        enrolment_listen: the same for newcomers.
        database: "sqlite" or a URL; where None, that of ATOLL_DATABASE or else "sqlite". server.toml names it without
            its password.

    Raises:
        ConfigError: a value cannot be used, or one of the folders is in use.
        LocalError: a file or the database cannot be written. Nothing is left behind.
    """
    place = ServerFolder(root=folder)
    values = _values(
        federation=federation,
        address=address,
        enrolment_address=enrolment_address,
        listen=listen,
        enrolment_listen=enrolment_listen,
        database=database or database_of(environment) or "sqlite",
        plaintext=plaintext,
    )
    settings = _checked(values, place)
    if place.settings_path.exists():
        raise ConfigError(f"{folder} already holds a server: choose another folder", key="folder", value=str(folder))
    if key_folder.resolve().is_relative_to(folder.resolve()):
        raise ConfigError(
            f"the federation's key must lie apart from the server's data, and {key_folder} is inside {folder}: "
            "choose a folder that can be taken off this machine",
            key="key_folder",
            value=str(key_folder),
        )
    with _undone_on_failure(folder), _undone_on_failure(key_folder):
        make_private_folder(folder)
        hosts = sorted({parse_address(settings.address)[0], parse_address(settings.enrolment_address)[0]})
        init_federation(place.authority, key_folder, federation, hosts, clock=clock)
        _fill(place, settings, clock)
        _write_settings(place, values | {"database": without_password(settings.database)})
    return place.operator


def _fill(place: ServerFolder, settings: ServerSettings, clock: Clock) -> None:
    store = Store.open(place.database_url(settings))
    try:
        if store.members():
            raise ConfigError(
                "database: it holds the state of another server already; name an empty one", key="database"
            )
        authority = Authority.load(place.authority, clock=clock)
        admit_operator(place.operator, address=settings.address, store=store, authority=authority, clock=clock)
    finally:
        store.close()


def _values(
    *,
    federation: str,
    address: str,
    enrolment_address: str | None,
    listen: str | None,
    enrolment_listen: str | None,
    database: str,
    plaintext: bool,
) -> dict[str, str | bool]:
    try:
        host, port = parse_address(address)
        enrolment_address = enrolment_address or f"{_bracketed(host)}:{port + 1}"
        _, enrolment_port = parse_address(enrolment_address)
    except ValueError as error:
        raise ConfigError(f"address {address!r}: {error}", key="address", value=address) from None
    interface = "127.0.0.1" if plaintext else "0.0.0.0"
    listen = listen or f"{interface}:{port}"
    return {
        "federation": federation,
        "address": address,
        "enrolment_address": enrolment_address,
        "listen": listen,
        "enrolment_listen": enrolment_listen or f"{interface}:{enrolment_port}",
        "bulk": _bulk_beside(listen),
        "database": database,
        "plaintext": plaintext,
    }


def _bulk_beside(listen: str) -> str:
    """Two ports on, for the next one is that of newcomers; on loopback any free one, since nobody has to open it."""
    try:
        host, port = parse_address(listen)
    except ValueError:
        return "off"  # the check of the settings says what is wrong
    beside = 0 if is_loopback(listen) or not 0 < port <= 65533 else port + 2
    return f"{_bracketed(host)}:{beside}"


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _checked(values: dict[str, str | bool], place: ServerFolder) -> ServerSettings:
    try:
        return ServerSettings.model_validate(values)
    except ValidationError as error:
        raise explain(error, ServerSettings, str(place.root)) from None


def _write_settings(place: ServerFolder, values: dict[str, str | bool]) -> None:
    shown = {key: str(value).replace("\\", "\\\\").replace('"', '\\"') for key, value in values.items()}
    shown["plaintext"] = "plaintext = true" if values["plaintext"] else "# plaintext = false"
    try:
        place.settings_path.write_text(_STARTER.format(folder=place.root, **shown))
    except OSError as error:
        raise LocalError(f"{place.settings_path}: cannot be written: {error.strerror}") from None


@contextmanager
def _undone_on_failure(folder: Path) -> Iterator[None]:
    """Removes what appears in `folder` while the block runs, where it raises."""
    existed = folder.exists()
    before = set(folder.iterdir()) if existed else set()
    try:
        yield
    except BaseException:
        for path in set(folder.iterdir()) - before if folder.exists() else ():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        if not existed and folder.exists():
            folder.rmdir()
        raise
