"""A connection to the database, its durability, and its faults as Atoll's errors.

Invariant: when a write transaction has returned, its rows survive the loss of power. SQLite runs in WAL mode with
synchronous=FULL (an fsync a commit); PostgreSQL with synchronous_commit=on. Fails where the disk lies about fsync.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, insert, inspect, select
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError

from atoll.server.tables import SCHEMA_VERSION, metadata, schema
from atoll.wire.errors import ConfigError, DiskFull, LocalError
from atoll.wire.room import NO_ROOM

BUSY_TIMEOUT_MS = 10_000  # a backup that reads the file holds a write back for moments, not for longer
_ADVISORY_LOCK = int.from_bytes(b"atoll")  # one server a PostgreSQL database
_SQLSTATE_DISK_FULL = "53100"


class FolderLock:
    """Holds a folder for one server process; the kernel lets go of it when the process ends, however it ends."""

    def __init__(self, path: Path) -> None:
        """Takes the lock file `path`.

        Raises:
            LocalError: another process holds it; names its pid.
        """
        self._path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.read(self._file, 32).decode(errors="replace").strip() or "unknown"
            os.close(self._file)
            raise LocalError(
                f"{path.parent}: a server with pid {pid} works on this folder; stop it first (kill -TERM {pid}), "
                "or give this one a folder of its own"
            ) from None
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Gives the folder up. The file stays: removing it would let two processes lock two files of one name."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class Database:
    """One engine, safe to use from many threads."""

    def __init__(self, engine: Engine, place: str) -> None:
        self._engine = engine
        self._place = place  # for messages: a path, or a URL without its password
        self._write_lock = threading.Lock()  # one writer at a time: SQLite has no queue of its own, only a timeout
        self._exclusive: Connection | None = None

    @classmethod
    def open(cls, url: str) -> Database:
        """The database behind `url`, with its tables made where they are not.

        Raises:
            ConfigError: the URL or its driver cannot be used.
            LocalError: it cannot be reached, was written by a newer Atoll, or another server uses it.
            DiskFull: there is no room for its first page.
        """
        database = cls(_engine(url), _place(url))
        try:
            database._claim()
            database._prepare()
        except BaseException:
            database.close()
            raise
        return database

    @property
    def place(self) -> str:
        return self._place

    def close(self) -> None:
        if self._exclusive is not None:
            self._exclusive.close()
            self._exclusive = None
        self._engine.dispose()

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A transaction that sees one moment and changes nothing."""
        with self._explained(), self._engine.begin() as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A transaction that is durable when the block has ended, or left nothing where it raised."""
        with self._write_lock, self._explained(), self._engine.connect() as connection:
            connection = connection.execution_options(atoll_write=True)
            with connection.begin():
                yield connection

    def _claim(self) -> None:
        """One server a PostgreSQL database: the lock of a session, which ends with its process.

        It guards against a mistake at the start, no more: a restart of PostgreSQL lets go of it.
        """
        if self._engine.dialect.name != "postgresql":
            return
        with self._explained():
            connection = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
            self._exclusive = connection
            if not connection.exec_driver_sql(f"SELECT pg_try_advisory_lock({_ADVISORY_LOCK})").scalar():
                raise LocalError(f"{self._place}: another server uses this database; stop it, or name another database")

    def _prepare(self) -> None:
        with self.write() as connection:
            if not inspect(connection).has_table(schema.name):
                metadata.create_all(connection)
                connection.execute(insert(schema).values(version=SCHEMA_VERSION))
                return
            found = connection.execute(select(schema.c.version)).scalar_one()
        if found > SCHEMA_VERSION:
            raise LocalError(
                f"{self._place}: its schema is version {found} and this Atoll knows up to {SCHEMA_VERSION}: a newer "
                "server wrote it. Install that version again, or restore the backup from before the upgrade"
            )

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except DBAPIError as error:
            raise _explain(error, self._place) from error


def without_password(database: str) -> str:
    """The database as a settings file may name it: "sqlite", or its URL without the password."""
    return database if database == "sqlite" else _parsed(database)._replace(password=None).render_as_string()


def _place(url: str) -> str:
    parsed = make_url(url)
    return parsed.database or url if parsed.get_backend_name() == "sqlite" else parsed.render_as_string()


def _parsed(url: str) -> URL:
    try:
        return make_url(url)
    except ArgumentError:
        raise ConfigError("database: not a URL; wanted postgresql://user@host/name or sqlite", key="database") from None


def _engine(url: str) -> Engine:
    parsed = _parsed(url)
    backend = parsed.get_backend_name()
    if backend == "sqlite":
        engine = create_engine(parsed, connect_args={"timeout": BUSY_TIMEOUT_MS / 1000})
        event.listen(engine, "connect", _set_up_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
        return engine
    try:
        return create_engine(
            parsed.set(drivername="postgresql+psycopg"),
            connect_args={"options": "-c synchronous_commit=on", "connect_timeout": 10},
            pool_pre_ping=True,  # a restarted database must not cost a run
        )
    except (NoSuchModuleError, ModuleNotFoundError) as error:
        raise ConfigError(
            f'database = {backend}: its driver is not installed ({error}); pip install "atoll[server]"', key="database"
        ) from None


def _set_up_sqlite(connection: Any, _: object) -> None:
    connection.isolation_level = None  # transactions are begun below: the driver's own begin comes too late for reads
    for pragma in (
        "journal_mode=WAL",
        "synchronous=FULL",
        "foreign_keys=ON",
        f"busy_timeout={BUSY_TIMEOUT_MS}",
    ):
        connection.execute(f"PRAGMA {pragma}").close()


def _begin_sqlite(connection: Connection) -> None:
    # IMMEDIATE: a transaction that turns from reading to writing midway can fail without waiting.
    writes = connection.get_execution_options().get("atoll_write", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _explain(error: DBAPIError, place: str) -> LocalError:
    cause = error.orig
    text = str(cause).strip().splitlines()[0] if str(cause).strip() else type(cause).__name__
    full = "database or disk is full" in text or getattr(cause, "sqlstate", None) == _SQLSTATE_DISK_FULL
    # A quota or a file size limit ends a write with EFBIG or EDQUOT, which SQLite reports as an input/output error.
    if full or ("disk I/O error" in text and _is_out_of_room(place)):
        return DiskFull(
            f"{place}: no room on the disk ({text}); nothing of this change was kept. Free space there "
            "(old runs lie in models/): runs try again by themselves, and a new start goes on from the journal"
        )
    if "database is locked" in text:
        return LocalError(
            f"{place}: locked by another program for over {BUSY_TIMEOUT_MS // 1000} s; close what has it open"
        )
    if "unable to open database file" in text or "readonly database" in text:
        return LocalError(f"{place}: {text}; check that folder and file exist and belong to the user of the server")
    return LocalError(f"{place}: the database failed: {text}; what was not confirmed was not kept")


def _is_out_of_room(place: str) -> bool:
    """Whether a few bytes more beside the database do not fit either."""
    probe = Path(f"{place}.probe")
    sizes = [path.stat().st_size for path in (Path(place), Path(f"{place}-wal")) if path.exists()]
    try:
        descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.pwrite(descriptor, bytes(4096), max(sizes, default=0))
        finally:
            os.close(descriptor)
            probe.unlink(missing_ok=True)
    except OSError as error:
        return error.errno in NO_ROOM
    return False
