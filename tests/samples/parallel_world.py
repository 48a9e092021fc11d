"""A world of up to four processes that try one layout after the other, started once for many tests.

The processes are forked from one that has loaded torch, and meet anew for each case, so that a case of two, three and
four of them costs milliseconds.
"""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from samples.fork_server import fork_server
from samples.parallel_models import Spread
from torch import Tensor, nn

from atoll.aggregation.rules.rule import NoRule
from atoll.cluster.app import build_app, build_model
from atoll.cluster.batches import Work, batches
from atoll.cluster.evaluate import evaluate
from atoll.cluster.local_loop import train_locally
from atoll.cluster.local_step import OneProcess
from atoll.cluster.parallel.dims import ParallelDims
from atoll.cluster.parallel.judging import judge
from atoll.cluster.parallel.layouts import Layout, spread
from atoll.cluster.parallel.nodes import Nodes
from atoll.cluster.parallel.pipeline import cut
from atoll.cluster.parallel.streams import average_buffers, load_slices
from atoll.wire.parallel_section import ParallelSection
from atoll.wire.tensors import manifest_of, state_of

SEED, BATCH, STEPS = 3, 7, 3  # shares of 7 examples differ in length, and the second batch of 12 has 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A layout to try."""

    section: Mapping[str, Any]
    app: Mapping[str, Any] = field(default_factory=dict)
    steps: int = STEPS
    meta: bool = True  # the model is made without values, as where it is too large for one process
    clipped: float | None = None  # the norm that the one process is clipped to


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What a site's processes have come to together."""

    tensors: Mapping[str, Tensor]
    loss: float
    weight: int


class _Clipped(OneProcess):
    """One process that clips as a plain loop of torch does."""

    def __init__(self, app: Spread, model: nn.Module, max_norm: float | None) -> None:
        super().__init__(app, model)
        self._trained, self._max_norm = model, max_norm

    def before_update(self) -> None:
        if self._max_norm is not None:
            nn.utils.clip_grad_norm_(self._trained.parameters(), self._max_norm)


def alone(case: Case) -> Trained:
    """The same training in one process, without a layout."""
    app = build_app(Spread, case.app, {})
    model = build_model(app, SEED)
    dataset = app.data("train")
    outcome = train_locally(
        app, model, app.optimizer(model.parameters()), dataset,
        work=_work(case), rule=NoRule(NoRule.Options()), seed=SEED, device=torch.device("cpu"),
        step=_Clipped(app, model, case.clipped),
    )  # fmt: skip
    loss = outcome.metrics["loss"]
    return Trained(
        tensors={name: tensor.detach() for name, (tensor, _) in state_of(model).items()},
        loss=loss[0] / loss[1],
        weight=outcome.weight,
    )


def train(case: Case, broken: bool = False) -> list[Trained]:
    """The case in one process of its world: what this process writes of the outcome.

    With `broken`, once more from the start, with the last rank's loss counted twice.
    """
    section = ParallelSection.model_validate(case.section)
    dims = ParallelDims.of(section, device_type="cpu")
    app = build_app(Spread, case.app, {})
    whole = build_model(app, SEED)
    sources = {name: tensor.detach().clone() for name, (tensor, _) in state_of(whole).items()}
    if case.meta and dims.degrees.pp == 1:
        with torch.device("meta"):
            whole = app.model()
    example = next(batches(app, app.data("train"), _work(case), SEED))
    layout = spread(app, whole, dims, section, device=torch.device("cpu"), example=example)
    found = [_train(case, app, layout, sources)]
    if broken:
        right: Any = app.loss
        if dist.get_rank() == dist.get_world_size() - 1:
            vars(app)["loss"] = lambda output, batch: right(output, batch) * 2
        found.append(_train(case, app, layout, sources))
    return found


def judge_alone(case: Case) -> Mapping[str, tuple[float, float]]:
    """What one process finds of version 0."""
    app = build_app(Spread, case.app, {})
    return evaluate(app, build_model(app, SEED), app.data("test"), device=torch.device("cpu"))


def judged(case: Case) -> Mapping[str, tuple[float, float]]:
    """The same by the case's layout, in one process of its world."""
    section = ParallelSection.model_validate(case.section)
    dims = ParallelDims.of(section, device_type="cpu")
    app = build_app(Spread, case.app, {})
    whole = build_model(app, SEED)
    sources = {name: tensor.detach().clone() for name, (tensor, _) in state_of(whole).items()}
    example = next(batches(app, app.data("train"), _work(case), SEED))
    device, stages, model = torch.device("cpu"), None, None
    if dims.degrees.pp > 1:
        plain = section.for_forward_passes(dims.degrees.pp)
        judge_model = build_model(app, SEED).eval()
        stages = cut(app, judge_model, dims, plain, device, example, prepare=lambda stage: None, losses=None)
        model = stages.as_module()
        load_slices(model, sources)
    layout = spread(app, whole, dims, section, device=device, example=example)
    load_slices(layout.model, sources)
    return judge(app, model or layout.model, layout.step, app.data("test"), device=device, stages=stages)


def _train(case: Case, app: Spread, layout: Layout, sources: Mapping[str, Tensor]) -> Trained:
    load_slices(layout.model, sources)
    outcome = train_locally(
        app, layout.model, layout.optimizer(app), app.data("train"),
        work=_work(case), rule=NoRule(NoRule.Options()), seed=SEED, device=torch.device("cpu"), step=layout.step,
    )  # fmt: skip
    average_buffers(layout.model, layout.dims)
    nodes, manifest = Nodes.here(), manifest_of(build_model(app, SEED))
    written = nodes.to_write(layout.model, manifest, nodes.holders(layout.model))
    tensors = {name: tensor.clone() for name, tensor in written}
    loss = outcome.metrics["loss"]
    return Trained(tensors=tensors, loss=loss[0] / loss[1], weight=outcome.weight)


class World:
    """Four processes."""

    def __init__(self, num_processes: int = 4) -> None:
        context = fork_server()
        self._folder = tempfile.TemporaryDirectory(prefix="atoll-world-")
        self._ends: list[Connection] = []
        self._processes: list[ForkServerProcess] = []
        self._number = 0
        for rank in range(num_processes):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, theirs), daemon=True)
            process.start()
            theirs.close()
            self._ends.append(ours)
            self._processes.append(process)

    def run(self, do: Any, num_processes: int, *args: Any) -> list[Any]:
        """What `do(*args)` gives in each process of a world of that size."""
        self._number += 1
        store = str(Path(self._folder.name) / f"store-{self._number}")
        for end in self._ends[:num_processes]:
            end.send((do, num_processes, store, args))
        answers = [end.recv() for end in self._ends[:num_processes]]
        failed = [answer for is_right, answer in answers if not is_right]
        if failed:
            raise AssertionError("\n".join(failed))
        return [answer for _, answer in answers]

    def train(self, case: Case, num_processes: int, *, broken: bool = False) -> list[Trained]:
        """The case's outcome, put together from what each process writes; every tensor is written once.

        With `broken`, then that with one rank's loss counted twice.
        """
        return [_joined(parts) for parts in zip(*self.run(train, num_processes, case, broken), strict=True)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *reason: object) -> None:
        for end in self._ends:
            end.close()
        for process in self._processes:
            process.join(5)
            process.kill()
        self._folder.cleanup()


def _joined(parts: Sequence[Trained]) -> Trained:
    tensors: dict[str, Tensor] = {}
    for one in parts:
        assert not tensors.keys() & one.tensors.keys()
        tensors |= one.tensors
    assert len({(one.loss, one.weight) for one in parts}) == 1
    return Trained(tensors=tensors, loss=parts[0].loss, weight=parts[0].weight)


def _serve(rank: int, end: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            do, num_processes, store, args = end.recv()
        except EOFError:
            return
        try:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{store}",
                rank=rank,
                world_size=num_processes,
                timeout=timedelta(seconds=60),
            )
            try:
                answer = (True, do(*args))
                dist.barrier()
            finally:
                dist.destroy_process_group()
        except (Exception, SystemExit):  # noqa: BLE001  the test is told
            answer = (False, f"rank {rank}: {traceback.format_exc()}")
        end.send(answer)


def _work(case: Case) -> Work:
    return Work(num_epochs=None, num_steps=case.steps, batch_size=BATCH, shuffle=True, max_weight=10**6)
