"""A run at a site of several processes: each of them holds one of these, and they do every request together.

As `RunSession`, but the model is spread by a layout: parameters come in slice by slice, and the update's tensors go out
in turns into the one file that all processes map. What a round leaves for the next one is not kept here, so
`require_spreadable` refuses the jobs that need it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

from atoll.aggregation.encode import begin_update, encode_tensor
from atoll.aggregation.lanes import factors_in
from atoll.aggregation.layout import MeanEntry, RawEntry, UpdateLayout
from atoll.aggregation.rounding import Rounding, rounding_key
from atoll.aggregation.schedule import Asynchronous
from atoll.aggregation.stages import Strategies
from atoll.aggregation.strategy import Strategy, resolve
from atoll.cluster.app import App
from atoll.cluster.batches import Work, plan_work
from atoll.cluster.local_loop import Outcome, train_locally
from atoll.cluster.masking import mask_by_strategy
from atoll.cluster.messages import Evaluate, Evaluated, Mask, Masked, Prepared, Train, Trained
from atoll.cluster.parallel.judging import judge
from atoll.cluster.parallel.layouts import Layout
from atoll.cluster.parallel.pipeline import Stages
from atoll.cluster.parallel.streams import average_buffers, load_slices, whole_tensors, writes
from atoll.cluster.parallel.votes import GivingUp, agree
from atoll.cluster.seeds import training_seed
from atoll.cluster.update_file import create_update
from atoll.wire.checksum import crc32_of
from atoll.wire.errors import AtollError, Malformed, NotAllowed
from atoll.wire.job import Job
from atoll.wire.manifest import Manifest
from atoll.wire.model_file import open_model
from atoll.wire.tensors import views

OnStep = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpreadTraining:
    """What a site needs beyond the model to train it."""

    dataset: Dataset[Any]
    work: Work
    max_weight: int  # of an update in any round of the run, as promised
    secret: bytes  # of the randomness of rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class SpreadSession:
    """One run in one process of a site. Made by `open_spread`."""

    run: str
    site: str
    whole: Job
    job: Job  # as it is in the rounds that this is opened for
    strategy: Strategy
    manifest: Manifest
    updates: UpdateLayout
    device: torch.device
    app: App
    layout: Layout
    transient: Mapping[str, Tensor]  # non-persistent buffers as they were when the model was new
    training: SpreadTraining | None
    test_data: Dataset[Any] | None
    judged: tuple[nn.Module, Stages] | None  # of a pipeline: the model that evaluates, and its stages

    def prepared(self) -> Prepared:
        """What the agent wants to know before it accepts the run."""
        return Prepared(
            max_weight=self.training.max_weight if self.training else 0,
            update_bytes=self._largest_update() if self.training else 0,
            device=str(self.device),
            sums_stale=isinstance(self.strategy.schedule, Asynchronous),
        )

    def _largest_update(self) -> int:
        return max(fragments.whole.num_bytes for fragments in Strategies(self.whole).fragments(self.manifest))

    def at(self, round_: int) -> SpreadSession | None:
        """The session of a round; None where `[app]` has other values then, so that it is to be opened anew.

        Raises:
            AppFailed: the data is no good for the round's work.
        """
        job = self.whole.at(round_)
        if job.app != self.job.app:
            return None
        if job.strategy == self.job.strategy:
            return self
        strategy, training = resolve(job), self.training
        if training is not None:
            training = replace(training, work=plan_work(self.app, training.dataset, strategy.work))
        updates = strategy.fragments(self.manifest).whole
        return replace(self, job=job, strategy=strategy, updates=updates, training=training)

    def train(self, request: Train, on_step: OnStep) -> Trained:
        """One round: load the base, train, write this process's tensors of the update.

        Raises:
            BadUpdate: the loss or a difference is not finite, or beyond the declared bound; on all processes alike.
            AppFailed, DiskFull, LocalError, Malformed, Stale: as they say.
        """
        training = self.training
        if training is None:
            raise NotAllowed("this worker was prepared for evaluation only", site=self.site, run=self.run)
        if request.config or request.mix or request.gives != "update":
            text = (
                "the task asks for other work than the job, or for a mixture, which [parallel] does not do; remove it"
            )
            raise Malformed(text, field="config")
        num_bytes = self.updates.num_bytes
        with self._room(Path(request.out_path)) as out, open_model(Path(request.base_path)) as base:
            self.manifest.require_same(base.manifest)
            sources = views(self.manifest, base.map, writable=False)
            self._load(self.layout.model, sources)
            outcome = self._learn(training, request.round, on_step)
            average_buffers(self.layout.model, self.layout.dims)
            self._write(training, request.round, sources, out)
            crc32 = crc32_of(out) if _is_first() else 0
        return Trained(
            key=request.key,
            weight=outcome.weight,
            metrics=dict(outcome.metrics),
            num_bytes=num_bytes,
            crc32=crc32,
            num_values=self.updates.num_values,
            num_factors=len(factors_in(self.updates, self.strategy.lanes)),
        )

    def mask(self, request: Mask, on_step: OnStep) -> Masked:
        """The masked input of a session, from an update that all processes have written: work of one of them."""
        if self.training is None:
            raise NotAllowed("this worker was prepared for evaluation only", site=self.site, run=self.run)
        secret = self.training.secret
        return mask_by_strategy(self.strategy, self.updates, request, secret, on_slice=lambda: on_step(0, 0))

    def evaluate(self, request: Evaluate, on_step: OnStep) -> Evaluated:
        """Metric sums of a version on this machine's test data, the same on every process.

        Raises:
            BadUpdate: a metric is not finite.
        """
        if self.test_data is None:
            return Evaluated(key=request.key, metrics={})
        model, stages = self.judged or (self.layout.model, None)
        with open_model(Path(request.base_path)) as base:
            self.manifest.require_same(base.manifest)
            self._load(model, views(self.manifest, base.map, writable=False))
        giving_up = GivingUp(on_step)
        found = judge(
            self.app,
            model,
            self.layout.step,
            self.test_data,
            device=self.device,
            stages=stages,
            on_batch=lambda: giving_up(0, 0),
        )
        giving_up.end()
        return Evaluated(key=request.key, metrics=dict(found))

    def _learn(self, training: SpreadTraining, round: int, on_step: OnStep) -> Outcome:
        giving_up = GivingUp(on_step)
        outcome = train_locally(
            self.app,
            self.layout.model,
            self.layout.optimizer(self.app),
            training.dataset,
            work=training.work,
            rule=self.strategy.rule,
            seed=training_seed(self.job.job.seed, self.site, round),
            device=self.device,
            on_step=giving_up,
            step=self.layout.step,
        )
        giving_up.end()
        return outcome

    def _load(self, model: nn.Module, sources: Mapping[str, Tensor]) -> None:
        load_slices(model, sources, frozen={one.name for one in self.manifest.frozen})
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if name in self.transient:
                    buffer.copy_(self.transient[name])

    def _write(self, training: SpreadTraining, round: int, base: Mapping[str, Tensor], out: memoryview) -> None:
        """This process's tensors, encoded. All go through to the end, and agree on how it went."""
        every: tuple[MeanEntry | RawEntry, ...] = (*self.updates.means, *self.updates.raws)
        entries = {entry.spec.name: entry for entry in every}
        rounding = Rounding(rounding_key(training.secret, round))
        names = [spec.name for spec in self.manifest if spec.name in entries]
        error: AtollError | None = None
        for number, (name, tensor) in enumerate(whole_tensors(self.layout.model, names)):
            if error is not None or not writes(self.layout.dims, number):
                continue
            try:
                encode_tensor(entries[name], base, {name: tensor}, out, rounding=rounding, bound=self.strategy.bound)
            except AtollError as found:
                error = found
        agree(error)

    @contextmanager
    def _room(self, path: Path) -> Iterator[memoryview]:
        """The update's file, mapped; the first process makes it, before the work is done."""
        with ExitStack() as stack:
            made: memoryview | None = None
            error: AtollError | None = None
            if _is_first():
                try:
                    made = stack.enter_context(create_update(path, self.updates.num_bytes))
                    begin_update(self.updates, made)
                except AtollError as found:
                    error = found
            agree(error)
            yield made if made is not None else stack.enter_context(create_update(path, self.updates.num_bytes))


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0
