"""The model versions of a simulated run: in full for the server, and as the sites get them.

They are in memory that an engine's processes share. Buffers of versions that nobody needs any more are used for the
next ones.
"""

from __future__ import annotations

import mmap
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from atoll.aggregation.by_round import ByRound
from atoll.aggregation.download import Download
from atoll.aggregation.layout import UpdateLayout
from atoll.aggregation.optimizer_state import OptimizerState
from atoll.aggregation.server_optimizers import ServerOptimizer
from atoll.server.models import RunModels
from atoll.simulations import shared_memory
from atoll.wire.errors import Unknown
from atoll.wire.manifest import Manifest
from atoll.wire.model_file import ModelFile

_Form = tuple[int, int | None]  # a version, and the group whose form of it is meant; None: the one of all


def site_path(version: int, branch: int | None = None) -> str:
    """What stands for the path of a version as sites get it, or of the form that a group has of it."""
    return f"{version}.site" if branch is None else f"{version}.site.{branch}"


def server_path(version: int) -> str:
    """The same of a version in full."""
    return f"{version}.server"


@dataclass(frozen=True, slots=True)
class _Buffer:
    """Room for one version, and the name of its file."""

    name: str
    data: mmap.mmap


class Versions(RunModels):
    """What the pipeline takes for the versions on a server's disk.

    `folder` is for the buffers, and for reducers that keep all updates of a round.
    """

    def __init__(self, folder: Path, run: str, manifest: Manifest, downloads: ByRound[Download | None]) -> None:
        super().__init__(folder, run, manifest, downloads)
        self._layout_of = manifest
        self._whole: dict[_Form, _Buffer] = {}
        self._metadata: dict[_Form, dict[str, str]] = {}
        self._optimizers: dict[_Form, OptimizerState] = {}
        self._decoded: dict[_Form, _Buffer] = {}  # as sites get them, where a codec changes them
        self._free: list[_Buffer] = []
        self._num_buffers = 0
        self._files: dict[str, ModelFile] = {}  # by name of the buffer
        self._lent: dict[str, str] = {}  # in another process than the server's: buffers by path

    def open(self, version: int, branch: int | None = None) -> ModelFile:
        """The version in full. Raises Unknown where it was never committed, or pruned."""
        if (version, branch) not in self._whole:
            raise Unknown(
                f"model version {version} is not kept any more", run=self._run, field="version", value=version
            )
        return self._file(self._whole[version, branch].data, self._metadata[version, branch])

    @contextmanager
    def create(
        self, version: int, metadata: dict[str, str], manifest: Manifest | None = None, branch: int | None = None
    ) -> Iterator[memoryview]:
        """Bytes of a new version to be filled; of the run's manifest, since tensors alone are simulated."""
        if manifest is not None:
            raise ValueError("a simulated version has the manifest of its run")
        buffer = self._room()
        yield memoryview(buffer.data)
        self._whole[version, branch], self._metadata[version, branch] = buffer, metadata

    def bytes_of(self, version: int) -> int:
        """Length of a version on its way to a site."""
        codec = self.download_of(version)
        return self._layout_of.num_bytes if codec is None else codec.num_bytes

    def named(self, path: str) -> ModelFile:
        """The version that `site_path` or `server_path` gave this path; the same object for the same buffer."""
        name = self._lent.get(path) or self.buffer_of(path)
        if name not in self._files:
            self._files[name] = self._file(shared_memory.attach(self._folder / name), {})
        return self._files[name]

    def buffer_of(self, path: str) -> str:
        """The buffer that holds what `path` stands for, decoded where sites get it by a codec; made once.

        Raises:
            Unknown: the version was never committed, or is pruned.
        """
        version, kind, *branch = path.split(".")
        form = int(version), int(branch[0]) if branch else None
        self.open(*form)
        codec = self.download_of(form[0])
        if kind == "server" or codec is None:
            return self._whole[form].name
        if form not in self._decoded:
            self._decoded[form] = self._decode(codec, form)
        return self._decoded[form].name

    def lend(self, path: str, buffer: str) -> None:
        """Say, in another process than the server's, which buffer a path stands for from now on."""
        self._lent[path] = buffer

    def save_optimizer(self, version: int, state: OptimizerState, branch: int | None = None) -> None:
        """Keep the state as it is, until its version is pruned."""
        self._optimizers[version, branch] = state

    def load_optimizer(
        self, version: int, optimizer: ServerOptimizer, layout: UpdateLayout, branch: int | None = None
    ) -> OptimizerState:
        """The state that `save_optimizer` kept."""
        return self._optimizers[version, branch]

    def prune(self, keep: Collection[int]) -> None:
        """Forget every version that is not in `keep`, in all its forms."""
        for form in [form for form in self._whole if form[0] not in keep]:
            self._optimizers.pop(form, None)
            self._metadata.pop(form)
            self._free.append(self._whole.pop(form))
            if form in self._decoded:
                self._free.append(self._decoded.pop(form))

    def keep(self, version: int, models: RunModels) -> list[Path]:
        """Writes a version with its optimizers' states, in all its forms, for a later process; the files.

        Raises:
            DiskFull, LocalError: they cannot be written.
        """
        paths: list[Path] = []
        for form in [form for form in self._whole if form[0] == version]:
            branch = form[1]
            with models.create(version, self._metadata[form], branch=branch) as out:
                out[:] = memoryview(self._whole[form].data)
            models.save_optimizer(version, self._optimizers[form], branch)
            paths += [models.path(version, branch), models.optimizer_path(version, branch)]
        return paths

    def take(
        self, version: int, branch: int | None, models: RunModels, optimizer: ServerOptimizer, layout: UpdateLayout
    ) -> None:
        """Takes over a form of a version that `keep` has written.

        Raises:
            LocalError: a file is damaged, or of another model or optimizer.
        """
        with models.open(version, branch) as base, self.create(version, dict(base.metadata), branch=branch) as out:
            self._layout_of.require_same(base.manifest)
            out[:] = base.map
        self.save_optimizer(version, models.load_optimizer(version, optimizer, layout, branch), branch)

    def branches(self, version: int) -> list[int | None]:
        """The forms that there are of a version."""
        return [branch for number, branch in self._whole if number == version]

    def _decode(self, codec: Download, form: _Form) -> _Buffer:
        payload, buffer = bytearray(codec.num_bytes), self._room()
        codec.write(self._whole[form].data, form[0], payload)
        codec.read(payload, buffer.data)
        return buffer

    def _room(self) -> _Buffer:
        if self._free:
            return self._free.pop()
        self._num_buffers += 1
        name = f"version-{self._num_buffers}"
        return _Buffer(name, shared_memory.make(self._folder / name, self._layout_of.num_bytes))

    def _file(self, data: mmap.mmap, metadata: dict[str, str]) -> ModelFile:
        view = memoryview(data).toreadonly()
        return ModelFile(manifest=self._layout_of, data_offset=0, num_bytes=len(data), map=view, metadata=metadata)
