"""Results that a site keeps until the server has committed them.

Invariant: a result is held if and only if its meta file is there, and that is written, in one rename, once its payloads
are durable. So a site killed at any moment finds each result whole or, if the work was not done, never: nobody trains
twice for nothing, nothing is sent half.

A result is `ready` before it is held: its bytes may be sent while they are on their way to the disk, all but the last
frame (docs/decisions/0006). One that is released is not synced away. A machine that loses power may find it again, says
so to the server, and is told to drop it.

::

    outbox/RUN_TASK_ATTEMPT/update.payload     what a worker writes, and what is sent
    outbox/RUN_TASK_ATTEMPT/result             makes it held
    outbox/spare                               the file of a released payload, to be written over by the next

To remove a file of gigabytes and to make room for another takes longer than to write it, and on a disk that is told of
every freed block (the mount option discard) all that is synced meanwhile waits.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum
from pathlib import Path

from google.protobuf.message import DecodeError

from atoll.transport.durable import disk_errors, private_folder, remove_tree, sync_file, sync_folder
from atoll.transport.tasks import Key
from atoll.wire.control_pb2 import Result, TaskKey
from atoll.wire.errors import LocalError, Malformed
from atoll.wire.names import check_payload_name

_log = logging.getLogger(__name__)

MAX_PAYLOADS = 16
_META = "result"  # no payload's file, since those end in ".payload"
_META_DRAFT = "result.draft"
_SPARE = "spare"


class OutboxStep(StrEnum):
    """Where a test can stop the outbox: each step is done when it is named."""

    PAYLOADS_SYNCED = "payloads synced"
    META_WRITTEN = "meta written"
    RENAMED = "renamed"
    HELD = "held"
    OLDER_DROPPED = "older attempts dropped"
    UNHELD = "unheld"
    REMOVED = "removed"


class Outbox:
    """The results of one site, in `folder`; what an earlier process left unfinished is dropped when it opens.

    Any thread may call it. Reading never waits for a disk; `commit` returns when the result is durable.

    Raises:
        DiskFull: from `draft` and `commit`; the result is not held then, all others are.
        LocalError: the folder cannot be read or written.
    """

    def __init__(self, folder: Path, *, on_step: Callable[[OutboxStep], None] = lambda step: None) -> None:
        self._folder = private_folder(folder)
        self._on_step = on_step
        self._turn = threading.RLock()  # of those that change something, for as long as the disk takes
        self._lock = threading.Lock()  # of the table, for a moment
        self._results: dict[Key, Result] = {}  # ready, and held
        self._held: set[Key] = set()
        self._attached: dict[Key, frozenset[str]] = {}
        with disk_errors(folder):
            self._read_held()
        for key in list(self._results):
            self._drop_older(key)
        with disk_errors(folder):
            (folder / _SPARE).unlink(missing_ok=True)

    def draft(self, key: TaskKey | Key, payload: str) -> Path:
        """Where to write the bytes of `payload` of a task; a file that may be there is to be written over.

        Raises:
            LocalError: the task has its result already.
        """
        check_payload_name(payload)
        checked = Key.of(key)
        if self.result(checked) is not None:
            raise LocalError(f"task {checked} has its result in the outbox already")
        path = private_folder(self._folder_of(checked)) / _file_name(payload)
        with self._turn, disk_errors(path), suppress(FileNotFoundError):
            (self._folder / _SPARE).replace(path)
        return path

    def ready(self, result: Result) -> None:
        """Shows `result`, whose payloads are drafted and whole, to those who ask; `commit` makes it durable.

        Raises:
            Malformed: the key or a payload name is none, or there are too many payloads.
            LocalError: a payload was not drafted, or has another size than the result says.
        """
        key = Key.of(result.key)
        with self._turn:
            if self.result(key) is not None:
                return  # bytes of it may have left
            _check_payloads(self._folder_of(key), key, result)
            kept = Result()
            kept.CopyFrom(result)
            with self._lock:
                self._results[key] = kept

    def commit(self, key: TaskKey | Key) -> bool:
        """Holds the result of a task that is ready. Lower attempts of the same task are released.

        Whether it is held: the server may have judged it, and had it released, before the disk had it.
        """
        checked = Key.of(key)
        with self._turn:
            found = self.result(checked)
            if found is not None and not self.is_held(checked):
                self._hold(checked, found)
            self._drop_older(checked)
            return found is not None

    def results(self) -> list[Result]:
        """Results that are ready or held and not known to be committed, by round, then key."""
        with self._lock:
            ordered = sorted(self._results.items(), key=lambda item: (item[1].round, item[0]))
        return [result for _, result in ordered]

    def result(self, key: TaskKey | Key) -> Result | None:
        """The result of a task, ready or held; None where there is none."""
        with self._lock:
            return self._results.get(Key.of(key))

    def is_held(self, key: TaskKey | Key) -> bool:
        """Whether the result of a task is durable here."""
        with self._lock:
            return Key.of(key) in self._held

    def payload_path(self, key: TaskKey | Key, name: str) -> Path:
        """The file with the bytes of a payload of a result; it stays there until the release.

        Raises:
            LocalError: there is no such payload.
        """
        checked = Key.of(key)
        result = self.result(checked)
        named = self._attached.get(checked, frozenset()) | {p.name for p in (result.payloads if result else ())}
        if result is None or name not in named:
            raise LocalError(f"payload {name!r} of task {checked} is not in the outbox")
        return self._folder_of(checked) / _file_name(name)

    def folder(self, key: TaskKey | Key) -> Path:
        """Of a task's result: what else is put there goes with it."""
        return self._folder_of(Key.of(key))

    def attach(self, key: TaskKey | Key, name: str) -> None:
        """Lets a payload of a held result be asked for that its result does not name, until this process ends.

        Raises:
            LocalError: there is no such file.
        """
        checked = Key.of(key)
        check_payload_name(name)
        if not (self._folder_of(checked) / _file_name(name)).is_file():
            raise LocalError(f"payload {name!r} of task {checked} was not written")
        self._attached[checked] = self._attached.get(checked, frozenset()) | {name}

    def release(self, key: TaskKey | Key) -> bool:
        """Drops the result of a task, or what was drafted for it; whether there was a result."""
        checked = Key.of(key)
        with self._turn:
            folder = self._folder_of(checked)
            self._attached.pop(checked, None)
            with self._lock:
                found = self._results.pop(checked, None)
                self._held.discard(checked)
            with disk_errors(folder):
                (folder / _META).unlink(missing_ok=True)
            if found is not None:
                self._on_step(OutboxStep.UNHELD)
                self._keep_spare(folder)
            remove_tree(folder)
            self._on_step(OutboxStep.REMOVED)
            return found is not None

    def release_upto(self, run: str, round: int) -> int:
        """Drops the results of `run` up to and with `round`; how many."""
        return self._release_where(lambda key, result: key.run == run and result.round <= round)

    def release_run(self, run: str) -> int:
        """Drops all results of `run`, which has ended; how many."""
        with self._turn, disk_errors(self._folder):
            released = self._release_where(lambda key, result: key.run == run)
            (self._folder / _SPARE).unlink(missing_ok=True)
            return released

    def _keep_spare(self, folder: Path) -> None:
        spare = self._folder / _SPARE
        with disk_errors(folder):
            payloads = sorted(folder.glob("*.payload"), key=lambda path: path.stat().st_size)
            if payloads and not spare.exists():
                payloads[-1].rename(spare)

    def _release_where(self, matches: Callable[[Key, Result], bool]) -> int:
        with self._turn:
            with self._lock:
                keys = [key for key, result in self._results.items() if matches(key, result)]
            return sum(self.release(key) for key in keys)

    def _drop_older(self, newest: Key) -> None:
        with self._lock:
            same_task = [key for key in self._results if (key.run, key.task) == (newest.run, newest.task)]
        for key in same_task:
            if key.attempt < newest.attempt:
                self.release(key)
        self._on_step(OutboxStep.OLDER_DROPPED)

    def _hold(self, key: Key, result: Result) -> None:
        folder = private_folder(self._folder_of(key))
        with disk_errors(folder):
            for payload in result.payloads:
                sync_file(folder / _file_name(payload.name))
            self._on_step(OutboxStep.PAYLOADS_SYNCED)
            (folder / _META_DRAFT).write_bytes(result.SerializeToString())
            sync_file(folder / _META_DRAFT)
            self._on_step(OutboxStep.META_WRITTEN)
            (folder / _META_DRAFT).rename(folder / _META)
            self._on_step(OutboxStep.RENAMED)
            sync_folder(folder)
            sync_folder(self._folder)
        with self._lock:
            self._held.add(key)
        self._on_step(OutboxStep.HELD)

    def _read_held(self) -> None:
        for folder in sorted(path for path in self._folder.iterdir() if path.is_dir()):
            if not (folder / _META).exists():
                remove_tree(folder)
                continue
            try:
                result = Result.FromString((folder / _META).read_bytes())
                key = Key.of(result.key)
                _check_payloads(folder, key, result)
            except (OSError, DecodeError, Malformed, LocalError) as fault:
                # Only a damaged disk brings this about. The site goes on: the server gives the task to it again.
                _log.error("outbox: %s is damaged and is dropped: %s", folder, fault)
                remove_tree(folder)
                continue
            self._results[key] = result
            self._held.add(key)

    def _folder_of(self, key: Key) -> Path:
        return self._folder / f"{key.run}_{key.task}_{key.attempt}"


def _file_name(payload: str) -> str:
    return f"{payload}.payload"


def _check_payloads(folder: Path, key: Key, result: Result) -> None:
    if len(result.payloads) > MAX_PAYLOADS:
        raise Malformed(
            f"result of task {key} has {len(result.payloads)} payloads, at most {MAX_PAYLOADS} are allowed",
            run=key.run,
            round=result.round,
            field="payloads",
            value=len(result.payloads),
            bound=MAX_PAYLOADS,
        )
    for payload in result.payloads:
        check_payload_name(payload.name)
        path = folder / _file_name(payload.name)
        found = path.stat().st_size if path.is_file() else None
        if found != payload.num_bytes:
            size = "was not written" if found is None else f"has {found} bytes"
            raise LocalError(f"{path}: payload of task {key} {size}, its result says {payload.num_bytes} bytes")
