"""The batches of one round at one site: how many steps, in which order, and how much they weigh.

Weight of an update: with epochs, the examples of one pass over the site's data, whatever the number of epochs; with
steps, the examples that the steps have seen. Both are known before the training begins (`Work.max_weight`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from atoll.cluster.app import App
from atoll.wire.errors import AppFailed
from atoll.wire.job import WorkSection


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one round asks of one site."""

    num_epochs: int | None  # None: steps are counted
    num_steps: int
    batch_size: int
    shuffle: bool
    max_weight: int  # no update weighs more


def plan_work(app: App, dataset: Dataset[Any], section: WorkSection) -> Work:
    """The work that a job's `work` table means for this dataset.

    Where the app counts examples in its own way, this passes once over the data to learn its weight.

    Raises:
        AppFailed: the dataset is empty, or has no length and the job counts epochs or wants the full batch.
    """
    if not isinstance(dataset, Sized):
        return _plan_stream(app, section)
    num_examples = len(dataset)
    if num_examples == 0:
        raise AppFailed(
            'data("train") is empty at this site; a site without examples cannot train', field="data.train", value=0,
            bound="at least 1 example",
        )  # fmt: skip
    batch_size = num_examples if section.full_batch else min(section.batch_size, num_examples)
    total, largest = _weigh(app, dataset, num_examples)
    steps_an_epoch = math.ceil(num_examples / batch_size)
    epochs = section.num_epochs
    steps = section.steps if epochs is None else epochs * steps_an_epoch
    return Work(
        num_epochs=epochs,
        num_steps=steps or 0,
        batch_size=batch_size,
        shuffle=not section.full_batch,
        max_weight=total if epochs is not None else (steps or 0) * batch_size * largest,
    )


def batches(app: App, dataset: Dataset[Any], work: Work, seed: int) -> Iterator[Any]:
    """The batches of one round, on the CPU. Every pass has another order, all of them a function of `seed`.

    Raises:
        AppFailed: the loader gives nothing.
    """
    generator = torch.Generator().manual_seed(seed)
    if work.num_epochs is None:
        yield from itertools.islice(_passes(app, dataset, work, generator, itertools.count()), work.num_steps)
    else:
        yield from _passes(app, dataset, work, generator, range(work.num_epochs))


def _passes(
    app: App, dataset: Dataset[Any], work: Work, generator: torch.Generator, passes: Iterable[int]
) -> Iterator[Any]:
    for _ in passes:
        nothing = True
        for batch in app.loader(dataset, batch_size=work.batch_size, shuffle=work.shuffle, generator=generator):
            nothing = False
            yield batch
        if nothing:
            raise AppFailed('loader() gave no batch of data("train")', field="data.train", value=0, bound="1 or more")


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on `device`; other parts, and a batch that is there already, as they are."""
    if device.type == "cpu":
        return batch
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {name: to_device(part, device) for name, part in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(part, device) for part in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(part, device) for part in batch)
    return batch


def _plan_stream(app: App, section: WorkSection) -> Work:
    if section.steps is None or section.full_batch:
        raise AppFailed(
            'data("train") has no length, so an epoch or a full batch is not defined; set work = { steps = ... }',
            field="data.train",
        )
    if _counts_its_own_way(app):
        raise AppFailed(
            'data("train") has no length and the app overrides examples(), so no weight can be promised; '
            "give the dataset a length",
            field="data.train",
        )
    return Work(
        num_epochs=None,
        num_steps=section.steps,
        batch_size=section.batch_size,
        shuffle=True,
        max_weight=section.steps * section.batch_size,
    )


def _weigh(app: App, dataset: Dataset[Any], num_examples: int) -> tuple[int, int]:
    """Weight of the whole dataset, and of its heaviest example."""
    if not _counts_its_own_way(app):
        return num_examples, 1
    singles = app.loader(dataset, batch_size=1, shuffle=False, generator=torch.Generator())
    weights = [int(app.examples(batch)) for batch in singles]
    if min(weights) < 0 or sum(weights) < 1:
        raise AppFailed("examples() must be at least 0 for each example and 1 in all", field="examples")
    return sum(weights), max(weights)


def _counts_its_own_way(app: App) -> bool:
    return type(app).examples is not App.examples
