"""The model versions of a simulated run, in memory: in full for the server, and as the sites get them.

Buffers of versions that nobody needs any more are used for the next ones.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from atoll.aggregation.download import Download
from atoll.aggregation.optimizer_state import OptimizerState
from atoll.server.models import RunModels
from atoll.wire.errors import Unknown
from atoll.wire.manifest import Manifest
from atoll.wire.model_file import ModelFile


def site_path(version: int) -> str:
    """What stands for the path of a version as sites get it."""
    return f"{version}.site"


def server_path(version: int) -> str:
    """The same of a version in full."""
    return f"{version}.server"


class Versions(RunModels):
    """What the pipeline takes for the versions on a server's disk.

    `folder` is used by reducers that keep all updates of a round, and by nothing else.
    """

    def __init__(self, folder: Path, run: str, manifest: Manifest, download: Download | None) -> None:
        super().__init__(folder, run, manifest, download)
        self._layout_of = manifest
        self._codec = download
        self._whole: dict[int, bytearray] = {}
        self._at_sites: dict[int, ModelFile] = {}
        self._free: list[bytearray] = []

    def open(self, version: int) -> ModelFile:
        """The version in full. Raises Unknown where it was never committed, or pruned."""
        if version not in self._whole:
            raise Unknown(
                f"model version {version} is not kept any more", run=self._run, field="version", value=version
            )
        return self._file(self._whole[version])

    @contextmanager
    def create(self, version: int, metadata: dict[str, str], manifest: Manifest | None = None) -> Iterator[memoryview]:
        """Bytes of a new version to be filled; of the run's manifest, since tensors alone are simulated."""
        if manifest is not None:
            raise ValueError("a simulated version has the manifest of its run")
        data = self._free.pop() if self._free else bytearray(self._layout_of.num_bytes)
        yield memoryview(data)
        self._whole[version] = data

    def at_sites(self, version: int) -> ModelFile:
        """The version as sites begin with it and judge it: what the codec of downloads leaves of it; made once."""
        if version not in self._at_sites:
            self._at_sites[version] = self.open(version) if self._codec is None else self._decoded(self._codec, version)
        return self._at_sites[version]

    def named(self, path: str) -> ModelFile:
        """The version that `site_path` or `server_path` gave this path."""
        version, _, form = path.partition(".")
        return self.open(int(version)) if form == "server" else self.at_sites(int(version))

    def save_optimizer(self, version: int, state: OptimizerState) -> None:
        """The pipeline holds the newest state, and no run is taken up again."""

    def prune(self, keep: Collection[int]) -> None:
        """Forget every version that is not in `keep`."""
        for version in self._whole.keys() - set(keep):
            self._at_sites.pop(version, None)
            self._free.append(self._whole.pop(version))

    def _decoded(self, codec: Download, version: int) -> ModelFile:
        payload, data = bytearray(codec.num_bytes), bytearray(self._layout_of.num_bytes)
        codec.write(self._whole[version], version, payload)
        codec.read(payload, data)
        return self._file(data)

    def _file(self, data: bytearray) -> ModelFile:
        view = memoryview(data).toreadonly()
        return ModelFile(manifest=self._layout_of, data_offset=0, num_bytes=len(data), map=view, metadata={})
