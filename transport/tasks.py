"""What a site has taken on: the tasks it accepted and the runs it joined, durable before it says so.

A task is accepted once. Its key (run, task, attempt) stays known until the run is left or the round is committed, so a
server that sends a task again, after a lost connection or a crash on either side, never makes a site train twice.
Only the newest attempt counts: accepting it forgets the older ones.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Self

from atoll.transport.durable import private_folder
from atoll.wire.control_pb2 import RunOffer, Task, TaskKey
from atoll.wire.errors import DiskFull, LocalError, Malformed
from atoll.wire.names import check_run_id, check_task_id


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Key:
    """The hashable form of a `TaskKey`, checked."""

    run: str
    task: str
    attempt: int

    @classmethod
    def of(cls, key: TaskKey | Key) -> Key:
        """The key that a message names.

        Raises:
            Malformed: the run or the task is not named as wire/names.py wants, or the attempt is 0.
        """
        if isinstance(key, Key):
            return key
        check_run_id(key.run)
        check_task_id(key.task)
        if key.attempt < 1:
            raise Malformed(
                f"task {key.task} has attempt 0; attempts count from 1", run=key.run, field="attempt", value=0
            )
        return cls(run=key.run, task=key.task, attempt=key.attempt)

    def to_message(self) -> TaskKey:
        return TaskKey(run=self.run, task=self.task, attempt=self.attempt)

    def __str__(self) -> str:
        return f"{self.run}/{self.task}#{self.attempt}"


class TaskStep(StrEnum):
    """Where a test can stop a change of the log: it is written, and it is durable."""

    WRITTEN = "written"
    DURABLE = "durable"


_TABLES = """
CREATE TABLE IF NOT EXISTS task (
  run TEXT NOT NULL, task TEXT NOT NULL, attempt INTEGER NOT NULL, round INTEGER NOT NULL,
  open INTEGER NOT NULL, body BLOB NOT NULL, PRIMARY KEY (run, task)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS run (run TEXT PRIMARY KEY, offer BLOB NOT NULL) WITHOUT ROWID;
"""


class TaskLog:
    """The accepted tasks and joined runs of one site, in `folder`. Any thread may call it; each change is durable
    when the call returns. One process at a time may hold it.

    Raises:
        LocalError: another process holds the folder, or the file is damaged.
        DiskFull: from every method that writes; nothing has changed then.
    """

    def __init__(self, folder: Path, *, on_step: Callable[[TaskStep], None] = lambda step: None) -> None:
        self._path = private_folder(folder) / "tasks.sqlite"
        self._on_step = on_step
        self._lock = threading.Lock()
        with self._database_errors():
            self._database = sqlite3.connect(self._path, timeout=0.2, isolation_level=None, check_same_thread=False)
            # The exclusive lock ends with the process, however that ends; it also refuses a second agent here.
            self._database.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = FULL")
            self._database.executescript(_TABLES)

    def accept(self, task: Task) -> bool:
        """Whether `task` is new work, now durable; False where this attempt, or a newer one, is known.

        Raises:
            Malformed: its key is none.
        """
        key = Key.of(task.key)
        with self._change() as database:
            known = database.execute(
                "SELECT attempt FROM task WHERE run = ? AND task = ?", (key.run, key.task)
            ).fetchone()
            if known is not None and known[0] >= key.attempt:
                return False
            database.execute(
                "INSERT OR REPLACE INTO task VALUES (?, ?, ?, ?, 1, ?)",
                (key.run, key.task, key.attempt, task.round, task.SerializeToString()),
            )
        return True

    def finish(self, key: TaskKey | Key) -> bool:
        """Marks a task as done, once its result is durable elsewhere; whether it was open."""
        return self._close(Key.of(key))

    def cancel(self, key: TaskKey | Key) -> bool:
        """Marks a task as not wanted any more; whether it was open. The same attempt stays refused."""
        return self._close(Key.of(key))

    def _close(self, key: Key) -> bool:
        with self._change() as database:
            done = database.execute(
                "UPDATE task SET open = 0, body = x'' WHERE run = ? AND task = ? AND attempt = ? AND open = 1",
                (key.run, key.task, key.attempt),
            )
            return done.rowcount == 1

    def open_tasks(self) -> list[Task]:
        """Tasks accepted and neither finished nor cancelled, by round, then key."""
        rows = self._read("SELECT run, body FROM task WHERE open = 1 ORDER BY round, run, task")
        return [Task.FromString(body) for _, body in rows]

    def forget_upto(self, run: str, round: int) -> None:
        """Drops the memory of finished tasks of `run` up to and with `round`, which no server asks for any more."""
        with self._change() as database:
            database.execute("DELETE FROM task WHERE run = ? AND round <= ? AND open = 0", (run, round))

    def join(self, run: str, offer: RunOffer) -> None:
        """Keeps the offer of a run that the site takes part in; the newest offer counts."""
        check_run_id(run)
        with self._change() as database:
            database.execute("INSERT OR REPLACE INTO run VALUES (?, ?)", (run, offer.SerializeToString()))

    def leave(self, run: str) -> None:
        """Forgets a run and all its tasks."""
        with self._change() as database:
            database.execute("DELETE FROM task WHERE run = ?", (run,))
            database.execute("DELETE FROM run WHERE run = ?", (run,))

    def joined(self) -> dict[str, RunOffer]:
        """Offers of the joined runs, by run id."""
        return {run: RunOffer.FromString(offer) for run, offer in self._read("SELECT run, offer FROM run ORDER BY run")}

    def close(self) -> None:
        """Lets go of the folder."""
        with self._lock:
            self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, query: str) -> list[tuple[str, bytes]]:
        with self._lock, self._database_errors():
            return self._database.execute(query).fetchall()

    @contextmanager
    def _change(self) -> Iterator[sqlite3.Connection]:
        with self._lock, self._database_errors():
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield self._database
                self._on_step(TaskStep.WRITTEN)
                self._database.execute("COMMIT")
            finally:
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")
            self._on_step(TaskStep.DURABLE)

    @contextmanager
    def _database_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            # SQLite tells a full disk from other failed writes, but not a quota or a limit on the size of files.
            if error.sqlite_errorcode in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE):
                raise DiskFull(f"{self._path}: no room on the disk; free some, then start again") from error
            if error.sqlite_errorcode in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                raise LocalError(f"{self._path}: another agent works in this folder; stop it first") from error
            raise LocalError(f"{self._path}: {error}; move the file away to start without known tasks") from error
