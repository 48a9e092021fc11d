"""Results that a site keeps until the server has committed them.

Invariant: a result is held whole or not at all. Its payloads and its meta file are durable before one rename makes it
held, and one rename takes it away again, so a site killed at any moment finds each result once or, if the work was not
done, never. Nobody trains twice, nothing is sent half.

::

    outbox/drafts/RUN_TASK_ATTEMPT/update.payload                what a worker is writing, or what is being removed
    outbox/held/RUN_TASK_ATTEMPT/{update.payload, result}        complete results
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
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


class OutboxStep(StrEnum):
    """Where a test can stop the outbox: each step is done when it is named."""

    PAYLOADS_SYNCED = "payloads synced"
    META_WRITTEN = "meta written"
    DRAFT_SYNCED = "draft synced"
    RENAMED = "renamed"
    HELD = "held"
    OLDER_DROPPED = "older attempts dropped"
    UNHELD = "unheld"
    REMOVED = "removed"


class Outbox:
    """The results of one site, in `folder`; drafts of an earlier process are dropped when it opens.

    Any thread may call it; a call that changes something returns when the change is durable.

    Raises:
        DiskFull: from `draft` and `commit`; the result is not held then, all others are.
        LocalError: the folder cannot be read or written.
    """

    def __init__(self, folder: Path, *, on_step: Callable[[OutboxStep], None] = lambda step: None) -> None:
        self._drafts, self._held_folder = folder / "drafts", folder / "held"
        self._on_step = on_step
        self._lock = threading.RLock()
        remove_tree(self._drafts)
        private_folder(self._drafts)
        private_folder(self._held_folder)
        with disk_errors(folder):
            sync_folder(folder)
            self._results = self._read_held()
        for key in list(self._results):
            self._drop_older(key)

    def draft(self, key: TaskKey | Key, payload: str) -> Path:
        """Where to write the bytes of `payload` of a task; nothing is there yet."""
        check_payload_name(payload)
        folder = private_folder(self._drafts / _folder_name(Key.of(key)))
        path = folder / _file_name(payload)
        with disk_errors(path):
            path.unlink(missing_ok=True)
        return path

    def commit(self, result: Result) -> None:
        """Holds `result` and the payloads drafted for it.

        A key that is held already keeps what it has, since bytes of it may have left; the draft is dropped. Lower
        attempts of the same task are released.

        Raises:
            Malformed: the key or a payload name is none, or there are too many payloads.
            LocalError: a payload was not drafted, or has another size than the result says.
        """
        key = Key.of(result.key)
        with self._lock:
            if key not in self._results:
                self._hold(key, result)
            self._drop_older(key)

    def held(self) -> list[Result]:
        """Complete results that are not known to be committed, by round, then key."""
        with self._lock:
            ordered = sorted(self._results.items(), key=lambda item: (item[1].round, item[0]))
            return [result for _, result in ordered]

    def result(self, key: TaskKey | Key) -> Result | None:
        """The held result of a task, None where there is none."""
        with self._lock:
            return self._results.get(Key.of(key))

    def payload_path(self, key: TaskKey | Key, name: str) -> Path:
        """The file with the bytes of a held payload.

        Raises:
            LocalError: no such payload is held.
        """
        checked = Key.of(key)
        held = self.result(checked)
        if held is None or name not in {payload.name for payload in held.payloads}:
            raise LocalError(f"payload {name!r} of task {checked} is not in the outbox")
        return self._held_folder / _folder_name(checked) / _file_name(name)

    def release(self, key: TaskKey | Key) -> bool:
        """Drops the result of a task, held or drafted; whether one was held."""
        checked = Key.of(key)
        with self._lock:
            draft = self._drafts / _folder_name(checked)
            remove_tree(draft)
            if checked not in self._results:
                return False
            with disk_errors(self._held_folder):
                (self._held_folder / draft.name).rename(draft)
                sync_folder(self._held_folder)
            del self._results[checked]
            self._on_step(OutboxStep.UNHELD)
            remove_tree(draft)
            self._on_step(OutboxStep.REMOVED)
            return True

    def release_upto(self, run: str, round: int) -> int:
        """Drops the held results of `run` up to and with `round`; how many."""
        return self._release_where(lambda key, result: key.run == run and result.round <= round)

    def release_run(self, run: str) -> int:
        """Drops all held results of `run`; how many."""
        return self._release_where(lambda key, result: key.run == run)

    def _release_where(self, matches: Callable[[Key, Result], bool]) -> int:
        with self._lock:
            keys = [key for key, result in self._results.items() if matches(key, result)]
            return sum(self.release(key) for key in keys)

    def _drop_older(self, newest: Key) -> None:
        same_task = [key for key in self._results if (key.run, key.task) == (newest.run, newest.task)]
        for key in same_task:
            if key.attempt < newest.attempt:
                self.release(key)
        self._on_step(OutboxStep.OLDER_DROPPED)

    def _hold(self, key: Key, result: Result) -> None:
        draft = private_folder(self._drafts / _folder_name(key))
        _check_payloads(draft, key, result)
        with disk_errors(draft):
            for payload in result.payloads:
                sync_file(draft / _file_name(payload.name))
            self._on_step(OutboxStep.PAYLOADS_SYNCED)
            (draft / _META).write_bytes(result.SerializeToString())
            self._on_step(OutboxStep.META_WRITTEN)
            sync_file(draft / _META)
            sync_folder(draft)
            self._on_step(OutboxStep.DRAFT_SYNCED)
            os.rename(draft, self._held_folder / draft.name)
            self._on_step(OutboxStep.RENAMED)
            sync_folder(self._held_folder)
        kept = Result()
        kept.CopyFrom(result)
        self._results[key] = kept
        self._on_step(OutboxStep.HELD)

    def _read_held(self) -> dict[Key, Result]:
        results: dict[Key, Result] = {}
        for folder in sorted(self._held_folder.iterdir()):
            try:
                result = Result.FromString((folder / _META).read_bytes())
                key = Key.of(result.key)
                _check_payloads(folder, key, result)
            except (OSError, DecodeError, Malformed, LocalError) as fault:
                # Only a damaged disk brings this about. The site goes on: the server gives the task to it again.
                _log.error("outbox: %s is damaged and is dropped: %s", folder, fault)
                remove_tree(folder)
                continue
            results[key] = result
        return results


def _folder_name(key: Key) -> str:
    return f"{key.run}_{key.task}_{key.attempt}"


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
