"""What a worker keeps loaded over the rounds of a run, and what it does with it: train and evaluate.

App, model, optimizer and data are loaded once. A base version is copied from its mapped file into the model's own
tensors; the update is encoded straight into the mapped file that will be sent. What a round leaves for the next one
is on the disk (`SiteState`) and nowhere else, so a worker that was killed and started again writes the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from atoll.aggregation.by_round import ByRound
from atoll.aggregation.download import Download
from atoll.aggregation.encode import encode_update
from atoll.aggregation.fragments import Fragments
from atoll.aggregation.lanes import factors_in
from atoll.aggregation.layout import UpdateLayout
from atoll.aggregation.mixing import distance
from atoll.aggregation.rounding import Rounding, rounding_key
from atoll.aggregation.rules.rule import LocalRule, Watching
from atoll.aggregation.schedule import Asynchronous
from atoll.aggregation.stages import Strategies
from atoll.aggregation.strategy import Strategy
from atoll.cluster import personal
from atoll.cluster.app import App
from atoll.cluster.batches import plan_work
from atoll.cluster.carried_over import CarriedOver, RoundCarried
from atoll.cluster.evaluate import evaluate
from atoll.cluster.local_loop import train_locally
from atoll.cluster.masking import mask_by_strategy
from atoll.cluster.messages import Evaluate, Evaluated, Mask, Masked, Prepared, Train, Trained
from atoll.cluster.mixed_model import CONSENSUS, mixed_model, write_model
from atoll.cluster.own_model import OwnModel
from atoll.cluster.pairing import Pairing
from atoll.cluster.personal import PersonalWork
from atoll.cluster.seeds import training_seed
from atoll.cluster.site_state import Kept, SiteState, joined
from atoll.cluster.training import Training
from atoll.cluster.update_file import create_update
from atoll.wire.checksum import crc32_of
from atoll.wire.errors import NotAllowed
from atoll.wire.job import Job
from atoll.wire.manifest import Manifest
from atoll.wire.model_file import ModelFile, map_file, open_model
from atoll.wire.tensors import load_state, state_of, views

OnStep = Callable[[int, int], None]
_LOCAL = "local/"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSession:
    """One run at one site, loaded. Made by `open_session`."""

    run: str
    site: str
    whole: Job
    job: Job  # as it is in the rounds that this is opened for
    stages: Strategies
    strategy: Strategy
    manifest: Manifest
    exchanged: ByRound[Fragments]
    fragments: Fragments  # of the rounds that this is opened for
    device: torch.device
    app: App
    model: nn.Module
    downloads: ByRound[Download | None]  # how the rounds' base versions come, where a codec makes them smaller
    transient: Mapping[str, Tensor]  # non-persistent buffers as they were when the model was new
    state: SiteState
    pairing: Pairing
    carried_over: CarriedOver | None  # where the codec has feedback
    own_model: OwnModel
    training: Training | None
    test_data: Dataset[Any] | None

    restores: ClassVar[bool] = True
    """Whether random generators go on after a training as if nothing had been drawn."""

    @property
    def layout(self) -> UpdateLayout:
        """Of all that travels, in one round or in turns."""
        return self.fragments.whole

    def prepared(self) -> Prepared:
        """What the agent wants to know before it accepts the run."""
        return Prepared(
            max_weight=self.training.max_weight if self.training else 0,
            update_bytes=max(f.layout.num_bytes for one in self.exchanged for f in one.all) if self.training else 0,
            device=str(self.device),
            download_bytes=[
                (begin - 1, download.num_bytes if download else 0)
                for begin, download in self.downloads.stages
                if any(self.downloads)
            ],
            fragments=[(f.start, f.stop) for f in self.fragments.all] if self.fragments.count > 1 else [],
            sums_stale=isinstance(self.strategy.schedule, Asynchronous),
        )

    def at(self, round_: int) -> RunSession | None:
        """The session of a round; None where `[app]` has other values then, so that it is to be opened anew.

        Raises:
            AppFailed: the data is no good for the round's work.
        """
        job = self.whole.at(round_)
        if job.app != self.job.app:
            return None
        if job.strategy == self.job.strategy:
            return self
        strategy, training = self.stages.at(round_), self.training
        if training is not None:
            work = plan_work(self.app, training.dataset, strategy.work)
            training = replace(training, work=work)
            if isinstance(strategy.rule, Watching):
                strategy.rule.watch(training.optimizer.torch)
        fragments = self.exchanged.at(round_)
        return replace(
            self,
            job=job,
            strategy=strategy,
            fragments=fragments,
            own_model=OwnModel(fragments, strategy.exchange.alpha),
            training=training,
            pairing=Pairing(rule=strategy.rule, state=self.pairing.state),
        )

    def train(self, request: Train, on_step: OnStep) -> Trained:
        """One round: load the base, train, write the update.

        Raises:
            BadUpdate: the loss or a difference is not finite, or beyond the declared bound, with what is carried over.
            AppFailed, DiskFull, LocalError, Malformed: as they say.
        """
        training = self._require_training()
        if request.gives == "mixed":
            return self._collected(request, training)
        work = training.work_of(request, self.app, self.strategy)
        whole = request.gives == "model"
        # The room is taken before the work is done: a full disk costs no training.
        layout = self.fragments.of_round(request.round).layout
        num_bytes = self.manifest.num_bytes if whole else layout.num_bytes
        room = self._room(Path(request.out_path), num_bytes)
        carry = self.carried_over
        carried_over = carry.begin(request.round, request.counted_round) if carry else nullcontext()
        with self._open_base(request) as base, room as out, carried_over as carried:
            kept = self.state.load(request.round)
            self._load(base, kept)
            self.pairing.resume(request.counted_round, self._views(base))
            self.own_model.begin(self._tensors(), kept, request.round)
            training.optimizer.begin_round(kept)
            outcome = train_locally(
                self.app,
                self.model,
                training.optimizer.torch,
                training.dataset,
                work=work,
                rule=self.strategy.rule,
                seed=training_seed(self.job.job.seed, self.site, request.round),
                device=self.device,
                on_step=on_step,
                restores=self.restores,
            )
            if carried is not None:
                carried.weigh(outcome.weight)
            crc32 = self._write_model(out) if whole else self._write_update(request.round, base, training, out, carried)
            self.pairing.settle(request.round, request.counted_round, self.layout, out)
            leaves = self._leaves(request.round, training)
            metrics, own = self._train_personal(request.round, base, kept, training, on_step)
        if leaves.values or leaves.tensors or own:
            self.state.save(request.round, Kept(tensors={**leaves.tensors, **own}, values=leaves.values))
        return Trained(
            key=request.key,
            weight=outcome.weight,
            metrics={**outcome.metrics, **metrics},
            num_bytes=num_bytes,
            crc32=crc32,
            num_values=layout.num_values,
            num_factors=len(factors_in(layout, self.strategy.lanes)),
        )

    def mask(self, request: Mask, on_step: OnStep) -> Masked:
        """The masked input of a session, from an update that `train` has written. Raises as `mask_update` does."""
        layout, secret = self.fragments.of_round(request.round).layout, self._require_training().secret
        return mask_by_strategy(self.strategy, layout, request, secret, on_slice=lambda: on_step(0, 0))

    def _collected(self, request: Train, training: Training) -> Trained:
        """The difference of the site's own model to the base version; each site's counts the same."""
        with (
            self._open_base(request, mixes=False) as base,
            self._room(Path(request.out_path), self.layout.num_bytes) as out,
        ):
            own = mixed_model(self.layout, request.mix)
            tensors = views(self.manifest, own.map, writable=False)
            crc32 = self._write_update(request.round, base, training, out, trained=tensors)
        return Trained(key=request.key, weight=1, metrics={}, num_bytes=self.layout.num_bytes, crc32=crc32)

    def evaluate(self, request: Evaluate, on_step: OnStep) -> Evaluated:
        """Metric sums of a version on this machine's test data.

        Raises:
            BadUpdate: a metric is not finite.
        """
        metrics: dict[str, tuple[float, float]] = {}
        with self._open_base(request, mixes=False) as base:
            if request.mix:
                mixed = mixed_model(self.layout, request.mix)
                metrics[CONSENSUS] = distance(self.layout, mixed.map, base.map), 1.0
            if self.test_data is None:
                return Evaluated(key=request.key, metrics=metrics)
            kept = self.state.load(request.round + 1)
            self._load(base, kept)
        found = evaluate(self.app, self.model, self.test_data, device=self.device, on_batch=lambda: on_step(0, 0))
        metrics = {**found, **metrics}
        if self._make_personal(request.round, kept, on_step):
            own = evaluate(self.app, self.model, self.test_data, device=self.device, on_batch=lambda: on_step(0, 0))
            metrics |= personal.named(own)
        return Evaluated(key=request.key, metrics=metrics)

    def forget(self, round_: int) -> None:
        """Drop what a round has left: it was trained, and is not to have been. The one before it may be done again."""
        self.state.forget(round_)
        self.pairing.state.forget(round_)
        if self.carried_over is not None:
            self.carried_over.forget(round_)

    def _require_training(self) -> Training:
        if self.training is None:
            raise NotAllowed("this worker was prepared for evaluation only", site=self.site, run=self.run)
        return self.training

    @contextmanager
    def _open_base(self, request: Train | Evaluate, *, mixes: bool = True) -> Iterator[ModelFile]:
        """The base version, mapped, or decoded into memory where it came by a codec; what is mixed, where that counts."""
        if mixes and request.mix:
            yield mixed_model(self.layout, request.mix)
            return
        path, download = Path(request.base_path), self.downloads.at(request.base_version + 1)
        if download is None:
            with open_model(path) as base:
                yield base
            return
        data = bytearray(self.manifest.num_bytes)
        with map_file(path) as payload:
            download.read(payload, data)
        view = memoryview(data).toreadonly()
        yield ModelFile(manifest=self.manifest, data_offset=0, num_bytes=len(data), map=view, metadata={})

    def _room(self, path: Path, num_bytes: int) -> AbstractContextManager[memoryview]:
        """Where an update of so many bytes is written."""
        return create_update(path, num_bytes)

    def _views(self, base: ModelFile) -> Mapping[str, Tensor]:
        """The tensors of a version, by name; nothing may write to them."""
        return views(self.manifest, base.map, writable=False)

    def _crc32(self, out: memoryview) -> int:
        """Of an update that is written, for its way to the server."""
        return crc32_of(out)

    def _load(self, base: ModelFile, kept: Kept) -> None:
        """The base version's tensors, and in place of its local ones those that this site has kept.

        Buffers that are no part of the state start anew, as they would after a restart of the worker.
        """
        self.manifest.require_same(base.manifest)
        load_state(self.manifest, base.map, self.model)
        tensors = state_of(self.model)
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                if name in self.transient:
                    buffer.copy_(self.transient[name])
            for spec in self.layout.absent:
                if (own := kept.tensors.get(_LOCAL + spec.name)) is not None:
                    tensors[spec.name][0].copy_(own)

    def _write_model(self, out: memoryview) -> int:
        """Write the model itself into `out`; its crc32."""
        write_model(self.layout, self._tensors(), out)
        return crc32_of(out)

    def _write_update(
        self,
        round: int,
        base: ModelFile,
        training: Training,
        out: memoryview,
        carried: RoundCarried | None = None,
        trained: Mapping[str, Tensor] | None = None,
    ) -> int:
        """Encode the difference to the base into `out`, of the model or of `trained`; its crc32."""
        rounding = Rounding(rounding_key(training.secret, round))
        encode_update(
            self.fragments.of_round(round).layout,
            self._views(base),
            self._tensors() if trained is None else trained,
            out,
            rounding=rounding,
            bound=self.strategy.bound,
            differences=self.pairing.differences(),
            carried=carried.carried if carried is not None else None,
        )
        return self._crc32(out)

    def _leaves(self, round: int, training: Training) -> Kept:
        """What the round leaves for the next one, beside its personal model: copies where that one is yet to come."""
        tensors = self._tensors()
        local = Kept(tensors={_LOCAL + spec.name: tensors[spec.name] for spec in self.layout.absent})
        kept = joined((local, training.optimizer.end_round(), self.own_model.kept(tensors, round)))
        if training.personal is None:
            return kept
        return replace(kept, tensors={name: tensor.clone() for name, tensor in kept.tensors.items()})

    def _train_personal(
        self, round: int, base: ModelFile, kept: Kept, training: Training, on_step: OnStep
    ) -> tuple[dict[str, tuple[float, float]], dict[str, Tensor]]:
        """Metrics and tensors of the personal model after a round; nothing where the site keeps none."""
        own = training.personal
        if own is None or not own.kind.keeps:
            return {}, {}
        self._load(base, kept)
        personal.put(self.model, kept)
        at_site = {spec.name for spec in self.layout.absent}
        shared = views(self.manifest, base.map, writable=False)
        anchor = {name: tensor for name, tensor in shared.items() if name not in at_site}
        metrics = self._learn(training, own, own.kind.rule(anchor), round, on_step)
        return personal.named(metrics), personal.taken(self.model)

    def _make_personal(self, round: int, kept: Kept, on_step: OnStep) -> bool:
        """Puts the personal model of a version, whose tensors are in the model, there; False where there is none."""
        training = self.training
        if training is None or training.personal is None:
            return False
        own = training.personal
        if own.kind.keeps:
            return personal.put(self.model, kept)
        self._learn(training, own, own.kind.rule({}), round, on_step)
        return True

    def _learn(
        self, training: Training, own: PersonalWork, rule: LocalRule, round: int, on_step: OnStep
    ) -> Mapping[str, tuple[float, float]]:
        """Trains what is in the model as the site's own, with a fresh optimizer; the metrics of it."""
        training.optimizer.begin_round(Kept())
        outcome = train_locally(
            self.app,
            self.model,
            training.optimizer.torch,
            training.dataset,
            work=own.work,
            rule=rule,
            seed=personal.personal_seed(self.job.job.seed, self.site, round),
            device=self.device,
            on_step=on_step,
            restores=self.restores,
        )
        return outcome.metrics

    def _tensors(self) -> Mapping[str, Tensor]:
        """Those of the model, by the names of the manifest."""
        return {name: tensor.detach() for name, (tensor, _) in state_of(self.model).items()}
