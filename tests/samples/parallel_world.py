"""A world of up to four processes that try one layout after the other, started once for many tests.

The processes are forked from one that has loaded torch, and meet anew for each case, so that a case of two, three and
four of them costs milliseconds.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from samples.parallel_models import Spread
from torch import Tensor

from atoll.aggregation.rules import NoRule
from atoll.cluster.app import build_app, build_model
from atoll.cluster.batches import Work, batches
from atoll.cluster.local_loop import train_locally
from atoll.cluster.parallel.dims import ParallelDims
from atoll.cluster.parallel.layouts import Layout, spread
from atoll.cluster.parallel.streams import average_buffers, load_slices, whole_tensors, writes
from atoll.wire.parallel_section import ParallelSection
from atoll.wire.tensors import state_of

SEED, BATCH, STEPS = 3, 7, 5  # 7 examples: shares differ in length, and the fourth batch of 26 has 5
WORK = Work(num_epochs=None, num_steps=STEPS, batch_size=BATCH, shuffle=True, max_weight=10**6)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A layout to try."""

    section: Mapping[str, Any]
    app: Mapping[str, Any] = field(default_factory=dict)
    steps: int = STEPS
    broken: bool = False  # the last rank's loss counts twice
    meta: bool = False  # the model is made without values, which then come from a file


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What a site's processes have come to together."""

    tensors: Mapping[str, Tensor]
    loss: float
    weight: int


def alone(case: Case) -> Trained:
    """The same training in one process, without a layout."""
    app = build_app(Spread, case.app, {})
    model = build_model(app, SEED)
    dataset = app.data("train")
    outcome = train_locally(
        app, model, app.optimizer(model.parameters()), dataset,
        work=_work(case), rule=NoRule(NoRule.Options()), seed=SEED, device=torch.device("cpu"),
    )  # fmt: skip
    loss = outcome.metrics["loss"]
    return Trained(
        tensors={name: tensor.detach() for name, (tensor, _) in state_of(model).items()},
        loss=loss[0] / loss[1],
        weight=outcome.weight,
    )


def layout_of(case: Case) -> tuple[Spread, Layout]:
    """The case's layout with version 0 in it, in a process of its world."""
    section = ParallelSection.model_validate(case.section)
    dims = ParallelDims.of(section, device_type="cpu")
    app = build_app(Spread, case.app, {})
    whole = build_model(app, SEED)
    sources = {name: tensor.detach().clone() for name, (tensor, _) in state_of(whole).items()}
    if case.meta:
        with torch.device("meta"):
            whole = app.model()
    example = next(batches(app, app.data("train"), _work(case), SEED))
    layout = spread(app, whole, dims, section, device=torch.device("cpu"), example=example)
    load_slices(layout.model, sources)
    return app, layout


def train(case: Case) -> Trained:
    """The case in one process of its world; the tensors that this process writes."""
    app, layout = layout_of(case)
    if case.broken and dist.get_rank() == dist.get_world_size() - 1:
        right: Any = app.loss
        vars(app)["loss"] = lambda output, batch: right(output, batch) * 2
    outcome = train_locally(
        app, layout.model, layout.optimizer(app), app.data("train"),
        work=_work(case), rule=NoRule(NoRule.Options()), seed=SEED, device=torch.device("cpu"), step=layout.step,
    )  # fmt: skip
    average_buffers(layout.model, layout.dims)
    names = list(state_of(build_model(app, SEED)))
    tensors = {
        name: tensor.clone()
        for number, (name, tensor) in enumerate(whole_tensors(layout.model, names))
        if writes(layout.dims, number)
    }
    loss = outcome.metrics["loss"]
    return Trained(tensors=tensors, loss=loss[0] / loss[1], weight=outcome.weight)


class World:
    """Four processes."""

    def __init__(self, num_processes: int = 4) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["samples.parallel_world"])
        self._folder = tempfile.TemporaryDirectory(prefix="atoll-world-")
        self._ends: list[Connection] = []
        self._processes = []
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

    def train(self, case: Case, num_processes: int) -> Trained:
        """The case's outcome, put together from what each process writes; every tensor is written once."""
        parts: Sequence[Trained] = self.run(train, num_processes, case)
        tensors: dict[str, Tensor] = {}
        for one in parts:
            assert not tensors.keys() & one.tensors.keys()
            tensors |= one.tensors
        assert len({(one.loss, one.weight) for one in parts}) == 1
        return Trained(tensors=tensors, loss=parts[0].loss, weight=parts[0].weight)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *reason: object) -> None:
        for end in self._ends:
            end.close()
        for process in self._processes:
            process.join(5)
            process.kill()
        self._folder.cleanup()


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
        except (Exception, SystemExit):
            answer = (False, f"rank {rank}: {traceback.format_exc()}")
        end.send(answer)


def _work(case: Case) -> Work:
    return Work(num_epochs=None, num_steps=case.steps, batch_size=BATCH, shuffle=True, max_weight=10**6)
