"""The engine that simulates sites one after the other in this process: one model for all of them.

Each site has a worker's session (`cluster/run_session.py`), so all that a rule, a codec or an app keeps at a site is
kept as in a deployment; the sessions share the model, and find versions and updates in memory. So the bytes of an
update are those of a deployment with the same seeds.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from atoll.cluster.app import App
from atoll.cluster.messages import Evaluate, Part, Prepare, Train, Trained
from atoll.cluster.open_session import Loaded, open_session
from atoll.cluster.registry import MEND_APP, failure_of
from atoll.cluster.rounding_secret import reproducible_secret
from atoll.cluster.run_session import RunSession
from atoll.cluster.site_state import Kept
from atoll.simulations.sites import Sites
from atoll.wire.errors import AppFailed, AtollError, RemoteError
from atoll.wire.job import Job
from atoll.wire.manifest import Manifest
from atoll.wire.model_file import ModelFile
from atoll.wire.tensors import state_of, views

Metrics = Mapping[str, tuple[float, float]]
Bases = Callable[[str], ModelFile]  # a version by the text that stands for its path


@dataclass(frozen=True, slots=True, kw_only=True)
class _LeanSession(RunSession):
    """A session that finds versions in memory, and knows its model's tensors and those of the version loaded last."""

    bases: Bases
    places: Mapping[str, Tensor]
    recent: dict[str, Any] = field(default_factory=dict)

    @contextmanager
    def _open_base(self, path: Path, mix: Sequence[Part] = ()) -> Iterator[ModelFile]:
        assert not mix  # gossip is refused
        yield self.bases(path.name)

    def _load(self, base: ModelFile, kept: Kept) -> None:
        if self.transient or self.layout.absent:
            RunSession._load(self, base, kept)
            return
        if self.recent.get("base") is not base:
            sources = views(self.manifest, base.map, writable=False)
            self.recent.update(base=base, sources=[sources[name] for name in self.places])
        with torch.no_grad():
            torch._foreach_copy_(  # pyright: ignore[reportPrivateImportUsage]  # as torch's own optimizers do
                list(self.places.values()), self.recent["sources"]
            )


class SequentialEngine:
    """Trains and judges at one site at a time."""

    def __init__(
        self,
        job: Job,
        sites: Sites,
        *,
        app: App,
        model: nn.Module,
        manifest: Manifest,
        bases: Bases,
        folder: Path,
        seed: int,
    ) -> None:
        """
        Args:
            app, model: of all sites; the model is on its device and holds version 0.
            folder: for what sites keep from round to round, and for the update of the present one.
            seed: of the sites' secrets of rounding, as `[reproducible]` of site.toml has it.

        Raises:
            AppFailed: the app or a site's data cannot be used; names the site.
            ConfigError: the job cannot be used.
        """
        self._job, self._sites, self._seed, self._folder = job, sites, seed, folder
        self._app, self._model, self._bases = app, model, bases
        self._places = {name: tensor for name, (tensor, _) in state_of(model).items() if name in manifest}
        self._recent: dict[str, Any] = {}
        self._manifest_path, self._out_path = folder / "manifest", folder / "update"
        self._manifest_path.write_bytes(manifest.encode())
        # All sessions are opened while the model is new: they remember what of it belongs to no version.
        self._sessions = {site: self._open(site) for site in sites.names}
        self._server: RunSession | None = None
        if job.evaluation.server:
            self._server = self._opened("server", app, {"test": sites.server_data()}, training=False)

    @property
    def fragments(self) -> Sequence[tuple[int, int]]:
        """Bytes of a version's data that rounds exchange in turns; none where all moves."""
        return next(iter(self._sessions.values())).prepared().fragments

    def max_weight(self, site: str) -> int:
        """What a site promises of its updates."""
        return self._sessions[site].prepared().max_weight

    def num_steps(self, site: str) -> int:
        """Optimizer steps of a site's round."""
        training = self._sessions[site].training
        return training.work.num_steps if training else 0

    def train(self, site: str, request: Train) -> tuple[Trained, memoryview]:
        """One round of a site: what it came to, and its update, which the next call overwrites.

        Raises:
            RemoteError: the update cannot be made or sent; a deployment would lose the task.
        """
        session = self._sessions[site].at(request.round)
        assert session is not None  # a job whose app changes on its way is refused
        self._sessions[site] = session
        try:
            trained = session.train(request, _ignore)
        except AtollError:
            raise
        except Exception as error:  # whatever the user's code raises
            raise _failed(error, site, request.round, "train") from error
        finally:
            if session.training is not None:
                session.training.optimizer.torch.state.clear()  # a round begins with what was kept, or with nothing
        return trained, self._written(trained.num_bytes)

    def evaluate(self, site: str, request: Evaluate) -> Metrics:
        """Metric sums of a version on a site's test data; empty where it has none."""
        return _judge(self._sessions[site], request)

    def evaluate_at_server(self, request: Evaluate) -> Metrics:
        """The same on the server's."""
        assert self._server is not None  # the plan evaluates at the server only where the job says so
        return _judge(self._server, request)

    @property
    def out_path(self) -> str:
        """The file that updates are written into."""
        return str(self._out_path)

    def _open(self, site: str) -> RunSession:
        try:
            return self._opened(site, self._app_at(site), None, training=True)
        except RemoteError as error:
            text = f"{site}: {error.message}"
            raise type(error)(text, site=site, field=error.field, value=error.value, bound=error.bound) from None

    def _opened(self, site: str, app: App, data: Mapping[str, Any] | None, *, training: bool) -> RunSession:
        read = data.get if data is not None else lambda split: self._sites.data(site, split)
        request = Prepare(
            run="",
            site=site,
            app_name=self._job.job.code,
            distribution="",
            entry_point="",
            app_hash="",
            data={},
            job=self._job.canonical().decode(),
            manifest_path=str(self._manifest_path),
            state_folder=str(self._folder / "sites" / site),
            rounding_seed_hex=reproducible_secret(self._seed, self._job.job.seed, site).hex(),
            training=training,
            encoded=training,
        )
        session = open_session(request, loaded=Loaded(app=_reading(app, read), model=self._model))
        fields = {name: getattr(session, name) for name in RunSession.__dataclass_fields__}
        return _LeanSession(**fields, bases=self._bases, places=self._places, recent=self._recent)

    def _app_at(self, site: str) -> App:
        """The site's app, with what `model()` has left in the one that it was called of."""
        app = self._sites.app(site)
        for name, value in vars(self._app).items():
            vars(app).setdefault(name, value)
        return app

    def _written(self, num_bytes: int) -> memoryview:
        """The update that was written last: fragments differ in length, and one that fails takes the file with it."""
        with self._out_path.open("rb") as file:
            return memoryview(mmap.mmap(file.fileno(), num_bytes, access=mmap.ACCESS_READ))


def _reading(app: App, data: Callable[[str], Any]) -> App:
    """The app with other data: a copy that shares everything else."""
    other = object.__new__(type(app))
    vars(other).update(vars(app), data=data)
    return other


def _judge(session: RunSession, request: Evaluate) -> Metrics:
    try:
        return session.evaluate(request, _ignore).metrics
    except AtollError:
        raise
    except Exception as error:
        raise _failed(error, session.site, request.round, "evaluate") from error


def _failed(error: Exception, site: str, round: int, doing: str) -> AppFailed:
    failure = failure_of(error, f"app failed to {doing} at {site}, round {round}", advice=MEND_APP)
    failure.site, failure.round = site, round
    return failure


def _ignore(done: int, total: int) -> None:
    pass
