"""A worker's session of a site that shares its process with all others: nothing is opened, looked up or copied twice.

It does what `cluster/run_session.py` does, in the same order and with the same bytes. What differs is where versions and
updates lie (in memory that stays mapped), and that what the sites have in common is worked out once (`Shared`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from atoll.cluster.app import App
from atoll.cluster.messages import Evaluate, Train
from atoll.cluster.pairing import Pairing
from atoll.cluster.run_session import RunSession
from atoll.cluster.site_state import Kept, SiteState
from atoll.simulations import shared_memory
from atoll.wire.manifest import Manifest
from atoll.wire.model_file import ModelFile
from atoll.wire.tensors import state_of, views

Bases = Callable[[str], ModelFile]  # a version by the text that stands for its path


@dataclass(slots=True, kw_only=True)
class Shared:
    """What all sites of a process have in common beside the model: where its tensors, versions and updates are."""

    bases: Bases
    tensors: Mapping[str, Tensor]  # of the model, by name
    places: Sequence[Tensor]  # those that a version fills
    names: Sequence[str]  # theirs
    base: ModelFile | None = None  # what was loaded last,
    sources: Mapping[str, Tensor] = field(default_factory=dict)  # its tensors by name,
    filling: Sequence[Tensor] = ()  # and those that go into `places`
    rooms: dict[Path, memoryview] = field(default_factory=dict)  # for updates

    @classmethod
    def of(cls, model: nn.Module, manifest: Manifest, bases: Bases) -> Shared:
        """Of a model that stays the same object, with the same tensors."""
        tensors = {name: tensor.detach() for name, (tensor, _) in state_of(model).items()}
        names = [name for name in tensors if name in manifest]
        return cls(bases=bases, tensors=tensors, places=[tensors[name] for name in names], names=names)

    def views(self, base: ModelFile, manifest: Manifest) -> Mapping[str, Tensor]:
        """The tensors of a version, by name."""
        if self.base is not base:
            sources = views(manifest, base.map, writable=False)
            self.base, self.sources, self.filling = base, sources, [sources[name] for name in self.names]
        return self.sources

    def room(self, path: Path, num_bytes: int) -> memoryview:
        """The first bytes of the file at `path`, which is there and long enough."""
        if path not in self.rooms:
            self.rooms[path] = memoryview(shared_memory.attach(path))
        return self.rooms[path][:num_bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeanSession(RunSession):
    """A session that finds everything in memory."""

    shared: Shared

    restores: ClassVar[bool] = False  # the run does it once

    @classmethod
    def like(cls, session: RunSession, shared: Shared) -> LeanSession:
        """The same session, made lean."""
        return cls(**{one.name: getattr(session, one.name) for one in fields(RunSession)}, shared=shared)

    def at_site(
        self, site: str, app: App, folder: Path, secret: bytes, train: Dataset[Any], test: Dataset[Any] | None
    ) -> LeanSession:
        """The session of another site with the same app: its own data, secret and state."""
        assert self.training is not None  # sessions of sites train
        carried = self.carried_over
        return replace(
            self,
            site=site,
            app=app,
            state=SiteState(folder),
            pairing=Pairing(rule=self.strategy.rule, state=SiteState(folder / "rule")),
            carried_over=None if carried is None else carried.at(folder / "carried"),
            training=self.training.at_site(app, self.strategy, train, secret),
            test_data=test,
        )

    @contextmanager
    def _open_base(self, request: Train | Evaluate, *, mixes: bool = True) -> Iterator[ModelFile]:
        assert not request.mix  # gossip is refused
        yield self.shared.bases(Path(request.base_path).name)

    def _room(self, path: Path, num_bytes: int) -> AbstractContextManager[memoryview]:
        return nullcontext(self.shared.room(path, num_bytes))

    def _views(self, base: ModelFile) -> Mapping[str, Tensor]:
        return self.shared.views(base, self.manifest)

    def _tensors(self) -> Mapping[str, Tensor]:
        return self.shared.tensors

    def _crc32(self, out: memoryview) -> int:
        return 0  # the update goes nowhere

    def _load(self, base: ModelFile, kept: Kept) -> None:
        if self.transient or self.layout.absent:
            RunSession._load(self, base, kept)
            return
        self.shared.views(base, self.manifest)
        with torch.no_grad():
            torch._foreach_copy_(  # pyright: ignore[reportPrivateImportUsage]  # as torch's own optimizers do
                list(self.shared.places), list(self.shared.filling)
            )
