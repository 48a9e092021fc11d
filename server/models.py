"""The committed versions of one run on disk: `<version>.safetensors`, and the server optimizer's state beside each.

Invariant: a file under its final name is whole (written, fsynced, renamed). Which versions count is for the database
to say: a file that no commit names is overwritten by the next attempt at that version.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

from atoll.aggregation.by_round import ByRound
from atoll.aggregation.download import Download
from atoll.aggregation.layout import UpdateLayout
from atoll.aggregation.optimizer_state import OptimizerState
from atoll.aggregation.server_optimizers import ServerOptimizer
from atoll.cluster.update_file import create_update
from atoll.transport.durable import disk_errors, sync_file, sync_folder
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a site fetches: a version, or so many bytes of it."""

    version: int
    first_byte: int = 0
    part_bytes: int = 0  # 0: all of it

    def of(self, whole: Outgoing) -> Outgoing:
        """That of a whole version. Raises Malformed where the version has no such bytes."""
        if not self.part_bytes and not self.first_byte:
            return whole
        if not 0 < self.part_bytes <= whole.num_bytes - self.first_byte:
            raise Malformed(
                f"bytes {self.first_byte} to {self.first_byte + self.part_bytes} of a version of {whole.num_bytes}; update "
                "the site's software",
                field="part_bytes",
                value=self.part_bytes,
                bound=f"1 to {whole.num_bytes - self.first_byte}",
            )
        offset = whole.data_offset + self.first_byte
        return replace(whole, data_offset=offset, num_bytes=self.part_bytes)


class RunModels:
    """Model versions of one run."""

    def __init__(
        self, folder: Path, run: str, manifest: Manifest, downloads: ByRound[Download | None] | None = None
    ) -> None:
        self._folder = folder / run
        self._run = run
        self.manifest = manifest
        self._downloads: ByRound[Download | None] = downloads or ByRound.always(None)
        self._encoding = threading.Lock()

    def prepare(self) -> None:
        """Make the folder, without what a killed process left half made, or made and never synced."""
        self._folder.mkdir(parents=True, exist_ok=True)
        remove_drafts(self._folder)
        for path in [*self._folder.glob("*.download"), *self._folder.glob("*.draft")]:
            path.unlink(missing_ok=True)

    def path(self, version: int, branch: int | None = None) -> Path:
        """Of a version, or of the form that a group has of it."""
        return self._folder / f"{version}{_of(branch)}.safetensors"

    def optimizer_path(self, version: int, branch: int | None = None) -> Path:
        """State of the server optimizer that belongs to `version`."""
        return self._folder / f"{version}{_of(branch)}.optimizer.safetensors"

    def save_optimizer(self, version: int, state: OptimizerState, branch: int | None = None) -> None:
        """Keep the state of the server optimizer that belongs to `version`, durably.

        Raises:
            DiskFull: no room.
        """
        state.save(self.optimizer_path(version, branch))

    def load_optimizer(
        self, version: int, optimizer: ServerOptimizer, layout: UpdateLayout, branch: int | None = None
    ) -> OptimizerState:
        """The state that `save_optimizer` kept. Raises LocalError where the file is missing, damaged, or of another."""
        return OptimizerState.load(self.optimizer_path(version, branch), optimizer, layout)

    @property
    def spool(self) -> Path:
        """Where a reducer keeps updates until the version is made."""
        return self._folder / "spool"

    def has(self, version: int) -> bool:
        return self.path(version).exists()

    def open(self, version: int, branch: int | None = None) -> ModelFile:
        """The version's file, mapped for reading.

        Raises:
            Unknown: it was never committed, or retention has removed it.
        """
        if not self.path(version, branch).exists():
            raise Unknown(
                f"run {self._run} has no model version {version} on disk: only the newest are kept, and version 0",
                run=self._run,
                field="version",
                value=version,
            )
        return open_model(self.path(version, branch))

    def manifest_of(self, version: int) -> bytes:
        """What the version's file holds, serialised. Blocks. Raises Unknown as `open` does."""
        with self.open(version) as model:
            return model.manifest.encode()

    def stored(self, version: int, branch: int | None = None) -> Outgoing:
        """The version in full. Blocks. Raises Unknown as `open` does."""
        with self.open(version, branch) as model:
            path = self.path(version, branch)
            return Outgoing(path=path, data_offset=model.data_offset, num_bytes=model.num_bytes)

    def download_of(self, version: int) -> Download | None:
        """What makes the version smaller on its way: that of the round which begins with it."""
        return self._downloads.at(version + 1)

    def outgoing(self, version: int, branch: int | None = None) -> Outgoing:
        """The version as it goes to sites: its file, or the one that the run's codec of downloads makes of it. Blocks.

        Raises:
            Unknown: it was never committed, or retention has removed it.
            DiskFull: no room for the encoded file.
            BadUpdate: the codec cannot write a value of the model.
        """
        download = self.download_of(version)
        if download is None:
            return self.stored(version, branch)
        with self.open(version, branch) as model:
            path = self._folder / f"{version}{_of(branch)}.download"
            with self._encoding:
                if not path.exists():
                    draft = path.with_suffix(".draft")
                    with create_update(draft, download.num_bytes) as out:
                        download.write(model.map, version, out)
                    draft.replace(path)  # not synced: it can be made again
            return Outgoing(path=path, data_offset=0, num_bytes=download.num_bytes)

    def create(
        self, version: int, metadata: dict[str, str], manifest: Manifest | None = None, branch: int | None = None
    ) -> AbstractContextManager[memoryview]:
        """Bytes of a new version to be filled; under its name and durable when the block ends without an error.

        Args:
            manifest: of this version, where it is not the run's: lists of payloads grow.
            branch: the group whose form of the version it is.

        Raises:
            DiskFull: no room; nothing is left behind.
        """
        return create(
            self.path(version, branch),
            manifest or self.manifest,
            {"atoll.run": self._run, "atoll.version": str(version)} | metadata,
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


def place_file(source: Path, path: Path) -> None:
    """The file `source` under the name `path` too, durably; nothing where that is there. Blocks.

    A link where that can be, so that the file is once on the disk and once in the page cache: neither is written again.

    Raises:
        DiskFull, LocalError: it cannot be placed there.
    """
    if path.exists():
        return
    with disk_errors(path):
        sync_file(source)  # an agent that fetched it does not, since it can fetch it again
        try:
            os.link(source, path)
        except OSError:  # two file systems, or one without links
            draft = path.with_suffix(".draft")
            shutil.copyfile(source, draft)
            sync_file(draft)
            os.replace(draft, path)
        sync_folder(path.parent)


def _of(branch: int | None) -> str:
    return "" if branch is None else f".group-{branch}"
