"""The committed versions of one run on disk: `<version>.safetensors`, and the server optimizer's state beside each.

Invariant: a file under its final name is whole (written, fsynced, renamed). Which versions count is for the database
to say: a file that no commit names is overwritten by the next attempt at that version.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

from atoll.aggregation.download import Download
from atoll.cluster.update_file import create_update
from atoll.wire.checksum import crc32_of
from atoll.wire.errors import Malformed, Unknown
from atoll.wire.manifest import Manifest
from atoll.wire.model_file import ModelFile, create, map_file, open_model, remove_drafts


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """A part of a file that is sent."""

    path: Path
    data_offset: int
    num_bytes: int

    def crc32(self) -> int:
        """Of the bytes (zlib). Blocks."""
        with map_file(self.path) as whole:
            return crc32_of(whole[self.data_offset : self.data_offset + self.num_bytes])

    def part(self, first: int, num_bytes: int) -> Outgoing:
        """So many of its bytes, from byte `first` on. Raises Malformed where they are not all there."""
        if first + num_bytes > self.num_bytes:
            raise Malformed(
                f"bytes {first} to {first + num_bytes} of a version of {self.num_bytes} bytes",
                field="part_bytes",
                value=num_bytes,
                bound=f"1 to {self.num_bytes - first}",
            )
        return replace(self, data_offset=self.data_offset + first, num_bytes=num_bytes)


class RunModels:
    """Model versions of one run."""

    def __init__(self, folder: Path, run: str, manifest: Manifest, download: Download | None = None) -> None:
        self._folder = folder / run
        self._run = run
        self._manifest = manifest
        self._download = download
        self._encoding = threading.Lock()

    def prepare(self) -> None:
        """Make the folder, without what a killed process left half made, or made and never synced."""
        self._folder.mkdir(parents=True, exist_ok=True)
        remove_drafts(self._folder)
        for path in [*self._folder.glob("*.download"), *self._folder.glob("*.draft")]:
            path.unlink(missing_ok=True)

    def path(self, version: int) -> Path:
        return self._folder / f"{version}.safetensors"

    def optimizer_path(self, version: int) -> Path:
        """State of the server optimizer that belongs to `version`."""
        return self._folder / f"{version}.optimizer.safetensors"

    @property
    def spool(self) -> Path:
        """Where a reducer keeps updates until the version is made."""
        return self._folder / "spool"

    def has(self, version: int) -> bool:
        return self.path(version).exists()

    def open(self, version: int) -> ModelFile:
        """The version's file, mapped for reading.

        Raises:
            Unknown: it was never committed, or retention has removed it.
        """
        if not self.has(version):
            raise Unknown(
                f"run {self._run} has no model version {version} on disk: only the newest are kept, and version 0",
                run=self._run,
                field="version",
                value=version,
            )
        return open_model(self.path(version))

    def stored(self, version: int) -> Outgoing:
        """The version in full. Blocks. Raises Unknown as `open` does."""
        with self.open(version) as model:
            return Outgoing(path=self.path(version), data_offset=model.data_offset, num_bytes=model.num_bytes)

    def outgoing(self, version: int) -> Outgoing:
        """The version as it goes to sites: its file, or the one that the run's codec of downloads makes of it. Blocks.

        Raises:
            Unknown: it was never committed, or retention has removed it.
            DiskFull: no room for the encoded file.
            BadUpdate: the codec cannot write a value of the model.
        """
        if self._download is None:
            return self.stored(version)
        with self.open(version) as model:
            path = self._folder / f"{version}.download"
            with self._encoding:
                if not path.exists():
                    draft = path.with_suffix(".draft")
                    with create_update(draft, self._download.num_bytes) as out:
                        self._download.write(model.map, version, out)
                    draft.replace(path)  # not synced: it can be made again
            return Outgoing(path=path, data_offset=0, num_bytes=self._download.num_bytes)

    def create(self, version: int, metadata: dict[str, str]) -> AbstractContextManager[memoryview]:
        """Bytes of a new version to be filled; under its name and durable when the block ends without an error.

        Raises:
            DiskFull: no room; nothing is left behind.
        """
        return create(
            self.path(version), self._manifest, {"atoll.run": self._run, "atoll.version": str(version)} | metadata
        )

    def prune(self, keep: Collection[int]) -> None:
        """Remove every version that is not in `keep`, with its optimizer state and its encoded form.

        Version 0, what the run began from, stays in full: later models are compared with it.
        """
        for path in self._folder.iterdir():
            stem = path.name.split(".", 1)[0]
            if stem.isdigit() and int(stem) not in keep and path != self.path(0):
                path.unlink(missing_ok=True)

    def remove(self) -> None:
        """Forget the run's files altogether."""
        shutil.rmtree(self._folder, ignore_errors=True)
