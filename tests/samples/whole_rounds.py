"""Rounds of a run in this process: sites train by their sessions, versions come by the server's pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from samples.bench import Bench
from torch import Tensor

from atoll.aggregation.schedule import Branching
from atoll.aggregation.schedules.hierarchical import HierarchicalState
from atoll.aggregation.strategy import resolve
from atoll.cluster.messages import Train, Trained
from atoll.cluster.open_session import open_session
from atoll.cluster.run_session import RunSession
from atoll.server.models import RunModels
from atoll.server.pipeline import Pipeline
from atoll.server.round import Round, Update
from atoll.wire.model_file import open_model
from atoll.wire.tensors import views


@dataclass(slots=True)
class Rounds:
    """A run whose rounds all sites of a bench take part in."""

    bench: Bench
    sites: tuple[str, ...]
    groups: dict[str, int] = field(default_factory=dict)  # of sites, where the schedule has groups
    sessions: dict[str, RunSession] = field(init=False)
    models: RunModels = field(init=False)
    pipeline: Pipeline = field(init=False)
    version: int = 0

    def __post_init__(self) -> None:
        self.start_again()
        with open_model(self.bench.base) as base, self.models.create(0, {}) as out:
            out[:] = base.map

    def start_again(self) -> None:
        """As after a restart of all processes: what is not on a disk is gone."""
        self.sessions = {site: open_session(self.bench.prepare(site)) for site in self.sites}
        manifest = next(iter(self.sessions.values())).manifest
        self.models = RunModels(self.bench.folder / "server", "run-1", manifest)
        self.models.prepare()
        strategy = resolve(self.bench.job)
        self.pipeline = Pipeline(
            run="run-1", strategy=strategy, seed=self.bench.job.job.seed, manifest=manifest, models=self.models
        )

    def train(self, site: str, round_: int) -> tuple[Trained, bytes]:
        """A site's update of a round from the newest version."""
        out = self.bench.folder / f"update-{site}-{round_}"
        out.unlink(missing_ok=True)
        request = Train(
            key=f"{site}/{round_}",
            round=round_,
            base_version=self.version,
            base_path=str(self.models.path(self.version, self.branch(site))),
            out_path=str(out),
        )
        return self.sessions[site].train(request, lambda done, total: None), out.read_bytes()

    def branch(self, site: str) -> int | None:
        """Whose form of the newest version a site gets."""
        schedule = resolve(self.bench.job).schedule
        if not isinstance(schedule, Branching):
            return None
        homes = tuple(sorted(self.groups.items()))
        return schedule.branch(HierarchicalState(groups=(), homes=homes), site, self.version)

    def play(self, *, without: tuple[str, ...] = ()) -> None:
        """One round, and its version."""
        number = self.version + 1
        sites = [site for site in self.sites if site not in without]
        trained = {site: self.train(site, number) for site in sites}
        most = max(result.weight for result, _ in trained.values())
        round_ = Round(number=number, base_version=self.version, asked=dict.fromkeys(sites, 1), max_weight=most)
        for site, group in self.groups.items():
            round_ = round_.grouped((site,), group, trained[site][0].weight)
        for site, (result, _) in trained.items():
            update = Update(task=site, attempt=1, weight=result.weight, metrics=result.metrics)
            round_ = round_.accepted(site, update)
        self.pipeline.open_round(round_)
        for site, (result, payload) in trained.items():
            self.pipeline.check(round_, site, result.weight, memoryview(payload), result.metrics)
            self.pipeline.fold(round_, site, result.weight, memoryview(payload))
        self.version = self.pipeline.make_version(round_.closed(tuple(sites)), self.version).version
        self.pipeline.drop(number)

    def tensors(self, version: int | None = None, branch: int | None = None) -> Mapping[str, Tensor]:
        """Those of a version, the newest unless told."""
        return tensors_of(self.models.path(self.version if version is None else version, branch))


def tensors_of(path: Path) -> Mapping[str, Tensor]:
    """Those of a model file, copied."""
    with open_model(path) as model:
        found = views(model.manifest, model.map, writable=False)
        return {name: tensor.clone() for name, tensor in found.items()}


def require_same_bits(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, wanted[name]), f"{name}: off by {(tensor - wanted[name]).abs().max().item():g}"
