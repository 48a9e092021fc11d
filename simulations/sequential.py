"""The engine that simulates sites one after the other in this process: one model for all of them.

Each site has a worker's session (`cluster/run_session.py`), so all that a rule, a codec or an app keeps at a site is
kept as in a deployment; the sessions share the model, and find versions and updates in memory. So the bytes of an
update are those of a deployment with the same seeds.

Nothing of a site stays in the process between its rounds but its session, and of those only so many: what a site keeps
is in its folder. So memory does not grow with the number of sites, and another process with the same folder may do the
next round of any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from atoll.cluster.app import App
from atoll.cluster.messages import Evaluate, Prepare, Train, Trained
from atoll.cluster.open_session import Loaded, open_session
from atoll.cluster.registry import MEND_APP, failure_of
from atoll.cluster.rounding_secret import reproducible_secret
from atoll.simulations import shared_memory
from atoll.simulations.engine import Metrics
from atoll.simulations.lean_session import Bases, LeanSession, Shared
from atoll.simulations.sites import Sites
from atoll.wire.errors import AtollError, LocalError, RemoteError
from atoll.wire.job import Job
from atoll.wire.manifest import Manifest

NUM_SESSIONS = 4096  # of sites with one app that are kept open: a few kB each


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
        kept: Path,
        seed: int,
    ) -> None:
        """
        Args:
            app, model: of all sites; the model is on its device and holds version 0.
            bases: finds a version by the text that stands for its path.
            folder: for updates.
            kept: for what sites keep from round to round.
            seed: of the sites' secrets of rounding, as `[reproducible]` of site.toml has it.

        Raises:
            AppFailed: the app or a site's data cannot be used; names the site.
            ConfigError: the job cannot be used.
            DiskFull: there is no room for an update.
        """
        self._job, self._sites, self._seed, self._folder, self._kept = job, sites, seed, folder, kept
        self._app, self._model = app, model
        self._stages = len(job.stages) > 1
        self._shared = Shared.of(model, manifest, bases)
        self._manifest_path = folder / "manifest"
        self._manifest_path.write_bytes(manifest.encode())
        # Sessions are opened while the model is new: they remember what of it belongs to no version.
        self._first = self._open(sites.names[0])
        self._alike = all(sites.app(site) is app for site in sites.names)
        others = {} if self._alike else {site: self._open(site) for site in sites.names[1:]}
        self._counts_alike = self._alike and type(app).examples is App.examples
        self._weights: dict[int, int] = {}  # of updates, by number of examples
        self._sessions: dict[str, LeanSession] = {sites.names[0]: self._first, **others}
        self._server: LeanSession | None = None
        if job.evaluation.server:
            self._server = self._opened("server", app, {"test": sites.server_data()}.get, training=False)
        self.update_bytes = self._first.prepared().update_bytes
        self._out_path = self.make_room("update")

    name = "sequential"

    @property
    def fragments(self) -> Sequence[tuple[int, int]]:
        return self._first.prepared().fragments

    def max_weight(self, site: str) -> int:
        known = self._sessions.get(site)
        if known is None and self._counts_alike and isinstance(data := self._sites.data(site, "train"), Sized):
            # Asked of every site, and the same for all that have as many examples.
            if len(data) not in self._weights:
                self._weights[len(data)] = self._weight_of(site)
            return self._weights[len(data)]
        return self._weight_of(site)

    def _weight_of(self, site: str) -> int:
        training = self._session(site).training
        return training.max_weight if training else 0

    def num_steps(self, site: str) -> int:
        training = self._session(site).training
        return training.work.num_steps if training else 0

    def expect(self, site: str | None, request: Train | Evaluate, at_s: float) -> None:
        pass  # a task is done when it is asked for

    def withdraw(self, key: str) -> None:
        pass

    def train(self, site: str, request: Train) -> tuple[Trained, memoryview]:
        trained = self.train_into(self._out_path, site, request)
        return trained, self._shared.room(self._out_path, trained.num_bytes)

    def train_into(self, room: Path, site: str, request: Train) -> Trained:
        """The same with the update in another file, which `make_room` made."""
        session = self._at(site, request.round)
        try:
            return session.train(replace(request, out_path=str(room)), _ignore)
        except AtollError:
            raise
        except Exception as error:  # whatever the user's code raises
            raise _failed(error, site, request.round, "train") from error
        finally:
            if session.training is not None:
                session.training.optimizer.torch.state.clear()  # a round begins with what was kept, or with nothing

    def evaluate(self, site: str | None, request: Evaluate) -> Metrics:
        session = self._server if site is None else self._session(site)
        assert session is not None  # the plan evaluates at the server only where the job says so
        try:
            return session.evaluate(request, _ignore).metrics
        except AtollError:
            raise
        except Exception as error:
            raise _failed(error, session.site, request.round, "evaluate") from error

    def forget(self, site: str, round_: int) -> None:
        """Drop what a site's round has left: it is as if it had not been trained."""
        self._session(site).forget(round_)

    def make_room(self, name: str) -> Path:
        """A file for an update. Raises DiskFull."""
        path = self._folder / name
        shared_memory.make(path, self.update_bytes).close()
        return path

    def update_at(self, room: Path, num_bytes: int) -> memoryview:
        """The update that was written into a file."""
        return self._shared.room(room, num_bytes)

    def close(self) -> None:
        pass

    # --- sessions ---------------------------------------------------------------------------------------------------

    def _session(self, site: str) -> LeanSession:
        session = self._sessions.get(site)
        if session is None:
            session = self._sessions[site] = self._like_first(site)
            if len(self._sessions) > NUM_SESSIONS:
                del self._sessions[next(iter(self._sessions))]
        return session

    def _at(self, site: str, round_: int) -> LeanSession:
        session = self._session(site)
        if not self._stages:
            return session
        found = session.at(round_)
        assert isinstance(found, LeanSession)  # a job whose app changes on its way is refused
        self._sessions[site] = found
        return found

    def _like_first(self, site: str) -> LeanSession:
        """A site whose app is that of the first one, with data of its own."""
        train = self._sites.data(site, "train")
        if train is None:
            return self._open(site)  # which says what is wrong
        test = self._sites.data(site, "test") if self._job.evaluation.sites else None
        app = _reading(self._app, self._reader(site))
        secret = reproducible_secret(self._seed, self._job.job.seed, site)
        try:
            return self._first.at_site(site, app, self._state_folder(site), secret, train, test)
        except RemoteError as error:
            raise _at_site(error, site) from None

    def _open(self, site: str) -> LeanSession:
        try:
            return self._opened(site, self._app_at(site), self._reader(site), training=True)
        except RemoteError as error:
            raise _at_site(error, site) from None

    def _opened(self, site: str, app: App, read: Callable[[str], Any], *, training: bool) -> LeanSession:
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
            state_folder=str(self._state_folder(site)),
            rounding_seed_hex=reproducible_secret(self._seed, self._job.job.seed, site).hex(),
            training=training,
            encoded=training,
        )
        session = open_session(request, loaded=Loaded(app=_reading(app, read), model=self._model))
        return LeanSession.like(session, self._shared)

    def _state_folder(self, site: str) -> Path:
        return self._kept / site

    def _reader(self, site: str) -> Callable[[str], Any]:
        return lambda split: self._sites.data(site, split)

    def _app_at(self, site: str) -> App:
        """The site's app, with what `model()` has left in the one that it was called of."""
        app = self._sites.app(site)
        for name, value in vars(self._app).items():
            vars(app).setdefault(name, value)
        return app


def _reading(app: App, data: Callable[[str], Any]) -> App:
    """The app with other data: a copy that shares everything else."""
    other = object.__new__(type(app))
    vars(other).update(vars(app), data=data)
    return other


def _at_site(error: RemoteError, site: str) -> RemoteError:
    return type(error)(f"{site}: {error.message}", site=site, field=error.field, value=error.value, bound=error.bound)


def _failed(error: Exception, site: str, round: int, doing: str) -> AtollError:
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error):
        return LocalError(
            f"memory ran out while {site} was to {doing} in round {round}: {str(error)[:200]}; set fewer --processes "
            "(processes), or a smaller batch_size in strategy.work"
        )
    failure = failure_of(error, f"app failed to {doing} at {site}, round {round}", advice=MEND_APP)
    failure.site, failure.round = site, round
    return failure


def _ignore(done: int, total: int) -> None:
    pass
