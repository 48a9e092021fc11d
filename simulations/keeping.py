"""What a simulated run leaves for a later process to go on from: a folder in OUT, as the last committed round left it.

::

    options.json            what the run was started with
    events.jsonl            events of the run, and records of rounds that are done; grows at its end
    standing.json           all else, and how much of the two files that grow belongs to it
    N.safetensors ...       the version that the round made, with its optimizer's state
    sites/                  what sites keep from round to round

Invariant: `standing.json` is replaced last and at once, when all that it speaks of is durable, and before any site is
asked for something new. So a run that is killed at any moment is found as it was when a round was committed. What was
done after that is done again, with the same bytes: sites begin a round with what the round before has left.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from atoll.aggregation.schedule import Asynchronous, Committed
from atoll.aggregation.strategy import resolve
from atoll.server.events import RunEvent, decode_event, encode_event
from atoll.server.models import RunModels
from atoll.server.records import RoundRow
from atoll.simulations.results import ROUNDS_FILE, RoundResult
from atoll.simulations.standing import Standing
from atoll.simulations.versions import Versions
from atoll.transport.durable import disk_errors, sync_file, sync_folder
from atoll.wire.checksum import crc32_of
from atoll.wire.errors import ConfigError, LocalError
from atoll.wire.job import Job
from atoll.wire.runs_pb2 import RoundRecord

FOLDER = "resume"
_OPTIONS, _EVENTS, _STANDING = "options.json", "events.jsonl", "standing.json"
_SITE_FILE = re.compile(r"(\d{8})\..*safetensors")  # as sites name what a round leaves


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A run as its last committed round left it."""

    events: Sequence[RunEvent]  # after the joining of sites; the last is the commit
    rounds: Sequence[RoundResult]  # whose metrics are all in
    rows: Sequence[RoundRow]  # of all rounds; metrics of the last version are still to come
    standing: Standing
    version: int  # that the commit made,
    branches: Sequence[int | None]  # and its forms


def folder_of(out: Path) -> Path:
    """Where a run that writes into `out` keeps what it goes on from."""
    return out / FOLDER


def is_kept(out: Path) -> bool:
    """Whether a run that was interrupted can go on in `out`."""
    return (folder_of(out) / _STANDING).exists()


def hindrance(job: Job) -> ConfigError | None:
    """Why a run of this job cannot go on where it was interrupted; None where it can."""
    if job.secure_aggregation is not None:
        key, why = "privacy.secure_aggregation", "sessions are of fresh keys, which nobody keeps"
    elif isinstance(resolve(job).schedule, Asynchronous):
        key, why = "strategy.schedule", "with asynchronous rounds sites are at work while a version is made"
    else:
        return None
    return ConfigError(f"{key}: {why}, so this simulation cannot go on after an interruption; begin it anew", key=key)


def digest(text: str) -> str:
    """Of what is too long to be shown."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def options_of(job: Job, given: Mapping[str, object]) -> dict[str, str]:
    """What has to be the same when a run goes on, as texts: every value of the job, and what else it was started with."""
    found = {"torch": torch.__version__, **{key: repr(value) for key, value in given.items()}}

    def add(key: str, value: Any) -> None:
        if isinstance(value, dict) and value:
            for name, inner in value.items():
                add(f"{key}.{name}" if key else name, inner)
        else:
            found[key] = json.dumps(value)

    add("", json.loads(job.canonical()))
    return found


class Keeper:
    """Writes the folder of one run, and reads it when the run goes on."""

    def __init__(self, out: Path, options: Mapping[str, str]) -> None:
        """`options` are what the run is started with, which `options_of` gives."""
        self._options = options
        self._rounds = out / ROUNDS_FILE
        self.folder = folder_of(out)
        self.sites = self.folder / "sites"
        self._lines: list[bytes] = []  # that are not in the file yet
        self._length, self._crc32 = 0, 0  # of the file
        self._rounds_length, self._rounds_crc32 = 0, 0

    # --- beginning --------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """An empty folder for a new run; that of one before it is removed.

        Raises:
            DiskFull, LocalError: it cannot be made.
        """
        self.remove()
        with disk_errors(self.folder):
            self.sites.mkdir(parents=True)
            (self.folder / _EVENTS).touch()
        self._write(_OPTIONS, dict(self._options))

    def go_on(self) -> Kept:
        """What an interrupted run left; what was written after its last committed round is cut off.

        Raises:
            ConfigError: there is none, or an option differs; names the option with both values.
            LocalError: a file is damaged or cannot be read.
        """
        if not is_kept(self.folder.parent):
            raise ConfigError(
                f"{self.folder.parent} has no interrupted run to go on with: it has ended, or no round was committed; "
                "begin anew with --out",
                key="--resume",
                value=str(self.folder.parent),
            )
        _require_same(self._read(_OPTIONS), self._options)
        standing = self._read(_STANDING)
        self._require_whole(standing["files"])
        self._length, self._crc32 = standing["events"]
        self._rounds_length, self._rounds_crc32 = standing["rounds"]
        lines = [json.loads(line) for line in _cut(self.folder / _EVENTS, self._length, self._crc32).splitlines()]
        rounds = _cut(self._rounds, self._rounds_length, self._rounds_crc32).splitlines()
        kept = Kept(
            events=[decode_event(json.dumps(line).encode()) for line in lines if "record" not in line],
            rounds=[RoundResult.read(json.loads(line)) for line in rounds],
            rows=[*(_row(line["record"]) for line in lines if "record" in line), _row(standing["record"])],
            standing=Standing.unpack(standing["now"]),
            version=standing["version"],
            branches=standing["branches"],
        )
        for path in self._site_files(self.sites):
            if _round_of(path) > standing["round"]:
                path.unlink()
        return kept

    def forget(self, site: str, round_: int) -> None:
        """Drop what a site's round has left: its task was taken back."""
        for path in self._site_files(self.sites / site):
            if _round_of(path) == round_:
                path.unlink()

    # --- keeping ----------------------------------------------------------------------------------------------------

    def note(self, event: RunEvent) -> None:
        """An event that has changed the run; durable with the next `keep`."""
        self._lines.append(encode_event(event))

    def note_record(self, record: RoundRecord) -> None:
        """A round whose metrics are all in; durable with the next `keep`."""
        self._lines.append(json.dumps({"record": _packed(record)}).encode())

    def keep(self, event: Committed, record: RoundRecord, standing: Standing, versions: Versions) -> None:
        """Makes the run durable as it stands with the commit of a round.

        Raises:
            DiskFull, LocalError: something cannot be written; what was kept before holds.
        """
        self.note(event)
        files = versions.keep(event.version, RunModels(self.folder, "", versions.manifest))
        data = b"".join(line + b"\n" for line in self._lines)
        path = self.folder / _EVENTS
        with disk_errors(path):
            with path.open("r+b") as file:
                file.seek(self._length)
                file.write(data)
                file.truncate()
            sync_file(path)
            with self._rounds.open("rb") as rounds:
                rounds.seek(self._rounds_length)
                added = rounds.read()
            sync_file(self._rounds)
        self._lines.clear()
        self._length, self._crc32 = self._length + len(data), crc32_of(data, self._crc32)
        self._rounds_length += len(added)
        self._rounds_crc32 = crc32_of(added, self._rounds_crc32)
        names = {path.name: crc32_of(path.read_bytes()) for path in files}
        self._write(
            _STANDING,
            {
                "round": event.round,
                "version": event.version,
                "branches": versions.branches(event.version),
                "record": _packed(record),
                "now": standing.pack(),
                "events": [self._length, self._crc32],
                "rounds": [self._rounds_length, self._rounds_crc32],
                "files": names,
            },
        )
        for old in self.folder.glob("*.safetensors"):
            if old.name not in names:
                old.unlink(missing_ok=True)

    def remove(self) -> None:
        """The run is over: nothing goes on from here."""
        with disk_errors(self.folder):
            (self.folder / _STANDING).unlink(missing_ok=True)  # first: half a folder is none
            shutil.rmtree(self.folder, ignore_errors=True)

    # --- files ------------------------------------------------------------------------------------------------------

    def _write(self, name: str, body: Mapping[str, Any]) -> None:
        path = self.folder / name
        draft = path.with_suffix(".draft")
        text = json.dumps(body)
        with disk_errors(path):
            draft.write_text(json.dumps({"crc32": crc32_of(text.encode()), "body": text}))
            sync_file(draft)
            os.replace(draft, path)
            sync_folder(self.folder)

    def _read(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        try:
            whole = json.loads(path.read_text())
            if crc32_of(whole["body"].encode()) != whole["crc32"]:
                raise ValueError("its checksum is wrong")
            body: dict[str, Any] = json.loads(whole["body"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise _damaged(path, str(error)) from None
        return body

    def _require_whole(self, files: Mapping[str, int]) -> None:
        for name, crc32 in files.items():
            path = self.folder / name
            try:
                found = crc32_of(path.read_bytes())
            except OSError as error:
                raise _damaged(path, str(error.strerror)) from None
            if found != crc32:
                raise _damaged(path, "its checksum is wrong")

    def _site_files(self, folder: Path) -> list[Path]:
        return [path for path in folder.rglob("*.safetensors") if _SITE_FILE.fullmatch(path.name)]


def _packed(record: RoundRecord) -> str:
    return base64.b64encode(record.SerializeToString()).decode()


def _row(text: str) -> RoundRow:
    data = base64.b64decode(text)
    record = RoundRecord.FromString(data)
    return RoundRow(round=record.round, version=record.version, record=data, model_crc32=0, num_bytes=0)


def _round_of(path: Path) -> int:
    return int(path.name[:8])


def _cut(path: Path, length: int, crc32: int) -> bytes:
    """The first bytes of a file, which then has no others."""
    try:
        with path.open("r+b") as file:
            data = file.read(length)
            if len(data) != length or crc32_of(data) != crc32:
                raise _damaged(path, "its checksum is wrong")
            file.truncate(length)
    except OSError as error:
        raise _damaged(path, str(error.strerror)) from None
    return data


def _damaged(path: Path, why: str) -> LocalError:
    return LocalError(f"{path}: is damaged, so the run cannot go on: {why}; begin it anew with --out")


def _require_same(before: Mapping[str, str], now: Mapping[str, str]) -> None:
    for key in (*now, *(key for key in before if key not in now)):
        old, new = before.get(key, "absent"), now.get(key, "absent")
        if old != new:
            raise ConfigError(
                f"{key} is {new}, and the interrupted run had {old}: it goes on with the same options alone; take the old "
                "value, or begin anew with --out",
                key=key,
                value=new,
                bound=old,
            )
