"""The model versions of a simulated run, in memory: in full for the server, and as the sites get them.

Buffers of versions that nobody needs any more are used for the next ones.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from atoll.aggregation.by_round import ByRound
from atoll.aggregation.download import Download
from atoll.aggregation.layout import UpdateLayout
from atoll.aggregation.optimizer_state import OptimizerState
from atoll.aggregation.server_optimizers import ServerOptimizer
from atoll.server.models import RunModels
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


class Versions(RunModels):
    """What the pipeline takes for the versions on a server's disk.

    `folder` is used by reducers that keep all updates of a round, and by nothing else.
    """

    def __init__(self, folder: Path, run: str, manifest: Manifest, downloads: ByRound[Download | None]) -> None:
        super().__init__(folder, run, manifest, downloads)
        self._layout_of = manifest
        self._whole: dict[_Form, bytearray] = {}
        self._metadata: dict[_Form, dict[str, str]] = {}
        self._optimizers: dict[_Form, OptimizerState] = {}
        self._at_sites: dict[_Form, ModelFile] = {}
        self._free: list[bytearray] = []

    def open(self, version: int, branch: int | None = None) -> ModelFile:
        """The version in full. Raises Unknown where it was never committed, or pruned."""
        if (version, branch) not in self._whole:
            raise Unknown(
                f"model version {version} is not kept any more", run=self._run, field="version", value=version
            )
        return self._file(self._whole[version, branch], self._metadata[version, branch])

    @contextmanager
    def create(
        self, version: int, metadata: dict[str, str], manifest: Manifest | None = None, branch: int | None = None
    ) -> Iterator[memoryview]:
        """Bytes of a new version to be filled; of the run's manifest, since tensors alone are simulated."""
        if manifest is not None:
            raise ValueError("a simulated version has the manifest of its run")
        data = self._free.pop() if self._free else bytearray(self._layout_of.num_bytes)
        yield memoryview(data)
        self._whole[version, branch], self._metadata[version, branch] = data, metadata

    def at_sites(self, version: int, branch: int | None = None) -> ModelFile:
        """The version as sites begin with it and judge it: what the codec of downloads leaves of it; made once."""
        if (version, branch) not in self._at_sites:
            whole = self.open(version, branch)
            codec = self.download_of(version)
            self._at_sites[version, branch] = whole if codec is None else self._decoded(codec, version, branch)
        return self._at_sites[version, branch]

    def bytes_of(self, version: int) -> int:
        """Length of a version on its way to a site."""
        codec = self.download_of(version)
        return self._layout_of.num_bytes if codec is None else codec.num_bytes

    def named(self, path: str) -> ModelFile:
        """The version that `site_path` or `server_path` gave this path."""
        version, form, *branch = path.split(".")
        if form == "server":
            return self.open(int(version))
        return self.at_sites(int(version), int(branch[0]) if branch else None)

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
            self._at_sites.pop(form, None)
            self._optimizers.pop(form, None)
            self._metadata.pop(form)
            self._free.append(self._whole.pop(form))

    def _decoded(self, codec: Download, version: int, branch: int | None) -> ModelFile:
        payload, data = bytearray(codec.num_bytes), bytearray(self._layout_of.num_bytes)
        codec.write(self._whole[version, branch], version, payload)
        codec.read(payload, data)
        return self._file(data, {})

    def _file(self, data: bytearray, metadata: dict[str, str]) -> ModelFile:
        view = memoryview(data).toreadonly()
        return ModelFile(manifest=self._layout_of, data_offset=0, num_bytes=len(data), map=view, metadata=metadata)
