"""The engine that simulates sites one after the other in this process: one model and one optimizer for all of them.

A site's round is that of a worker (`cluster/run_session.py`), with its base version and its update in memory that is
used again and again; what differs from site to site is its name, its examples, its state and its secret of rounding.
So the bytes of its update are those of a deployment with the same seeds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atoll.cluster.app import App
from atoll.cluster.batches import Work, plan_work
from atoll.cluster.local_loop import Outcome
from atoll.cluster.messages import Evaluate, Prepare, Train
from atoll.cluster.registry import MEND_APP, failure_of
from atoll.cluster.rounding_secret import reproducible_secret
from atoll.cluster.run_session import RunSession, assemble
from atoll.cluster.site_state import Kept
from atoll.simulations.site_states import SiteStates
from atoll.simulations.sites import Sites
from atoll.wire.errors import AppFailed, AtollError, RemoteError
from atoll.wire.job import Job
from atoll.wire.model_file import ModelFile
from atoll.wire.tensors import state_of, views

Metrics = Mapping[str, tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _LeanSession(RunSession):
    """A session that knows its model's tensors, and those of the version that was loaded last."""

    places: Mapping[str, Tensor]
    recent: dict[int, tuple[ModelFile, list[Tensor]]] = field(default_factory=dict)

    def _load(self, base: ModelFile, kept: Kept) -> None:
        if self.transient or self.layout.absent:
            RunSession._load(self, base, kept)
            return
        known = self.recent.get(0)
        if known is None or known[0] is not base:
            sources = views(self.manifest, base.map, writable=False)
            self.recent[0] = known = (base, [sources[name] for name in self.places])
        with torch.no_grad():
            torch._foreach_copy_(list(self.places.values()), known[1])


class SequentialEngine:
    """Trains and judges at one site at a time."""

    def __init__(self, job: Job, sites: Sites, *, device: torch.device, folder: Path, seed: int) -> None:
        """
        Args:
            folder: for states of sites that do not fit into memory.
            seed: of the sites' secrets of rounding, as `[reproducible]` of site.toml has it.

        Raises:
            AppFailed: the app or its data cannot be used; names the site.
            ConfigError, BadManifest: as they say.
        """
        self._job, self._sites, self._seed = job, sites, seed
        self._states = SiteStates(folder)
        self._works: dict[str, Work] = {}
        self._session = self._first_session(sites.names[0], device)
        self._out = bytearray(self._session.layout.num_bytes)

    @property
    def first(self) -> RunSession:
        """The session of the first site: strategy, manifest and layout are those of all, the model is version 0."""
        return self._session

    def work(self, site: str) -> Work:
        """What a round asks of a site.

        Raises:
            AppFailed: it has no examples; names it.
        """
        if site not in self._works:
            dataset = self._sites.data(site, "train")
            try:
                if dataset is None:
                    raise AppFailed('data("train") is None: this site has nothing to train on', field="data.train")
                self._works[site] = plan_work(self._app(site), dataset, self._job.strategy.work)
            except AppFailed as error:
                raise _placed(error, site) from None
        return self._works[site]

    def train(self, site: str, request: Train, base: ModelFile) -> tuple[Outcome, memoryview]:
        """One round of a site: what it came to, and its update, which the next call overwrites.

        Raises:
            RemoteError: the update cannot be made or sent; a deployment would lose the task.
        """
        session = self._at(site)
        out = memoryview(self._out)
        try:
            return session.train_into(out, base, request, _ignore), out
        except AtollError:
            raise
        except Exception as error:  # whatever the user's code raises
            raise self._failed(error, site, request.round, "train") from error

    def evaluate(self, site: str, request: Evaluate, base: ModelFile) -> Metrics:
        """Metric sums of a version on a site's test data; empty where it has none."""
        session = replace(self._at(site), test_data=self._sites.data(site, "test"))
        return self._judge(session, site, request, base)

    def evaluate_at_server(self, request: Evaluate, base: ModelFile) -> Metrics:
        """The same on the server's."""
        state = self._states.of("")  # the server has none
        session = replace(self._session, training=None, test_data=self._sites.server_data(), state=state)
        return self._judge(session, "server", request, base)

    def close(self) -> None:
        """Forget what sites have kept."""
        self._states.remove()

    def _judge(self, session: RunSession, place: str, request: Evaluate, base: ModelFile) -> Metrics:
        if session.test_data is None:
            return {}
        try:
            return session.evaluate_on(base, request, _ignore)
        except AtollError:
            raise
        except Exception as error:
            raise self._failed(error, place, request.round, "evaluate") from error

    def _first_session(self, site: str, device: torch.device) -> _LeanSession:
        request = Prepare(
            run="",
            site=site,
            app_name=self._job.job.app,
            distribution="",
            entry_point="",
            app_hash="",
            data={},
            job="",
            manifest_path="",
            state_folder="",
            rounding_seed_hex=self._secret(site).hex(),
        )
        try:
            session = assemble(
                request,
                self._job,
                self._sites.app(site),
                device,
                state=self._states.of(site),
                data=lambda split: self._sites.data(site, split),
            )
        except RemoteError as error:
            raise _placed(error, site) from None
        places = {name: tensor for name, (tensor, _) in state_of(session.model).items()}
        fields = {name: getattr(session, name) for name in RunSession.__dataclass_fields__}
        return _LeanSession(**fields, places=places)

    def _at(self, site: str) -> RunSession:
        training = self._session.training
        assert training is not None  # the first session was asked to train
        dataset = self._sites.data(site, "train")
        assert dataset is not None  # `work` was asked for when the site joined
        return replace(
            self._session,
            site=site,
            app=self._app(site),
            state=self._states.of(site),
            training=replace(training, dataset=dataset, work=self.work(site), secret=self._secret(site)),
        )

    def _app(self, site: str) -> App:
        """The site's app, with what `model()` and `optimizer()` have left in the one that they were called of."""
        app = self._sites.app(site)
        if app is not self._session.app:
            own: dict[str, Any] = vars(app)
            for name, value in vars(self._session.app).items():
                own.setdefault(name, value)
        return app

    def _secret(self, site: str) -> bytes:
        return reproducible_secret(self._seed, self._job.job.seed, site)

    def _failed(self, error: Exception, site: str, round: int, doing: str) -> AppFailed:
        failure = failure_of(error, f"app failed to {doing} at {site}, round {round}", advice=MEND_APP)
        failure.site, failure.round = site, round
        return failure


def _placed(error: RemoteError, site: str) -> RemoteError:
    """The error of a site that cannot take part, naming it."""
    return type(error)(
        f"{site}: {error.message}", site=site, field=error.field, value=error.value, bound=error.bound
    )


def _ignore(done: int, total: int) -> None:
    pass
