"""The promises that only a file on a disk can break: loss of power, a second server, no room."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, event

from atoll.server.database import Database, FolderLock
from atoll.server.store import Store
from atoll.wire.errors import ConfigError, DiskFull, LocalError

PREPARE = """
import sys
from datetime import UTC, datetime
from atoll.server.records import RunRow
from atoll.server.store import Store

store = Store.open("sqlite:///" + sys.argv[1])
row = RunRow(
    run="01RUN", name="digits", job=b"{}", app_hash="", submitted_by="ada", crc32=0, status="running", reason=None,
    submitted_at=datetime.now(UTC),
)
store.create_run(row, manifest=b"m", request="r1")
"""

WRITE_WITHOUT_END = (
    PREPARE
    + """
for number in range(1_000_000):
    store.append("01RUN", [b"%d" % number, b"second of %d" % number])
    print(number, flush=True)
"""
)

WRITE_UNTIL_FULL = (
    PREPARE
    + """
import resource
from pathlib import Path
from atoll.wire.errors import DiskFull

resource.setrlimit(resource.RLIMIT_FSIZE, (256 << 10, resource.RLIM_INFINITY))
number = 0
try:
    while number < 10_000:
        store.append("01RUN", [bytes(1000)])
        number += 1
except DiskFull as error:
    print(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert len(store.events("01RUN")) == number, (len(store.events("01RUN")), number)
    store.append("01RUN", [b"room again"])
    assert len(store.events("01RUN")) == number + 1
"""
)


def start(script: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", "-c", script, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_what_was_confirmed_survives_kill_9(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite"
    writer = start(WRITE_WITHOUT_END, str(path))
    assert writer.stdout is not None
    confirmed = [int(writer.stdout.readline()) for _ in range(50)]
    writer.send_signal(signal.SIGKILL)
    confirmed += [int(line) for line in writer.communicate()[0].splitlines()]
    store = Store.open(f"sqlite:///{path}")
    events = store.events("01RUN")
    store.close()
    assert len(events) % 2 == 0  # an append is whole or not there
    written = [number for number in range(len(events) // 2)]
    assert events == [e for n in written for e in (b"%d" % n, b"second of %d" % n)]
    assert confirmed == list(range(len(confirmed)))
    assert len(written) >= len(confirmed)


def test_sqlite_is_asked_to_be_durable(tmp_path: Path) -> None:
    """A kill of the process leaves the page cache alone; only these settings carry over a loss of power."""
    database = Database.open(f"sqlite:///{tmp_path / 'state.sqlite'}")
    with database.read() as connection:
        found = {
            name: connection.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("journal_mode", "synchronous", "foreign_keys")
        }
    database.close()
    assert found == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1}


def test_a_file_size_limit_is_a_full_disk_and_loses_nothing(tmp_path: Path) -> None:
    writer = start(WRITE_UNTIL_FULL, str(tmp_path / "state.sqlite"))
    out, err = writer.communicate(timeout=60)
    assert writer.returncode == 0, err
    assert "no room on the disk" in out
    assert "Free space there" in out


@contextmanager
def at_most_pages(count: int) -> Iterator[None]:
    """SQLite's own limit, which fails as a full file system does: SQLITE_FULL."""

    def limit(connection: Any, _: object) -> None:
        connection.execute(f"PRAGMA max_page_count={count}")

    event.listen(Engine, "connect", limit)
    try:
        yield
    finally:
        event.remove(Engine, "connect", limit)


def test_a_full_file_system_at_the_first_start(tmp_path: Path) -> None:
    with at_most_pages(2), pytest.raises(DiskFull, match=r"no room on the disk \(database or disk is full\)"):
        Store.open(f"sqlite:///{tmp_path / 'state.sqlite'}")


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="unable to open database file; check that folder and file exist"):
        Store.open(f"sqlite:///{tmp_path / 'nowhere' / 'state.sqlite'}")


def test_not_a_database(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite"
    path.write_bytes(b"not a database at all" * 100)
    with pytest.raises(LocalError, match="file is not a database"):
        Store.open(f"sqlite:///{path}")


def test_not_a_url() -> None:
    with pytest.raises(ConfigError, match="not a URL"):
        Store.open("nonsense")


def test_a_postgresql_that_is_not_there() -> None:
    with pytest.raises(LocalError, match=r"postgresql://atoll:\*\*\*@127.0.0.1:1/atoll: the database failed") as caught:
        Store.open("postgresql://atoll:secret@127.0.0.1:1/atoll")
    assert "secret" not in str(caught.value)


def test_a_reader_does_not_stop_a_writer(tmp_path: Path) -> None:
    """A backup that reads the file while the server writes."""
    path = tmp_path / "state.sqlite"
    store = Store.open(f"sqlite:///{path}")
    with sqlite3.connect(path) as backup:
        backup.execute("BEGIN")
        backup.execute("SELECT * FROM runs").fetchall()
        store.save_member_list(1, b"list")
    store.close()


def test_two_servers_on_one_folder(tmp_path: Path) -> None:
    holder = start(
        "import sys; from pathlib import Path; from atoll.server.database import FolderLock\n"
        "lock = FolderLock(Path(sys.argv[1])); print('held', flush=True); input()",
        str(tmp_path / "server.lock"),
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(LocalError, match=rf"a server with pid {holder.pid} works on this folder; stop it first"):
        FolderLock(tmp_path / "server.lock")
    holder.kill()
    holder.communicate()
    lock = FolderLock(tmp_path / "server.lock")
    assert (tmp_path / "server.lock").read_text().strip().isdigit()
    lock.release()
    lock.release()
    FolderLock(tmp_path / "server.lock").release()
