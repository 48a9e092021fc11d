"""What the user writes: model, data, loss and optimizer. Atoll owns the loop around them.

An app is used the same way at a site, at the server (evaluation) and on the researcher's machine (first model), so
it reads paths only from `source` and hyper-parameters only from `config`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
)

from atoll.cluster.seeds import model_seed, seeded
from atoll.cluster.tensor_batches import tensor_batches
from atoll.wire.errors import AppFailed
from atoll.wire.explain import explain

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

    from atoll.cluster.opaque_app import OpaqueApp

A = TypeVar("A", bound="App | OpaqueApp")


class App(ABC):
    """One model on one kind of data: subclass it and register the class under the entry-point group `atoll.apps`.

    `config` is the job's `[app]` table as an instance of the subclass's own `Config`; a key that `Config` does not
    name is an error. `source` is the table `[data.NAME]` of the machine that the app runs on.
    """

    Config: ClassVar[type[BaseModel]] = BaseModel
    keeps_optimizer: ClassVar[bool] = False
    """False: each round begins with a fresh optimizer state (federated averaging as published). True: momentum and
    the like go on where this site's last round ended, also after a restart."""

    def __init__(self, config: Any, source: Mapping[str, Any]) -> None:
        self.config, self.source = config, source

    @abstractmethod
    def model(self) -> nn.Module:
        """A new model. Called under a seed of the job, so that random weights are the same on every machine."""

    @abstractmethod
    def data(self, split: str) -> Dataset[Any] | None:
        """This machine's examples for "train" or "test"; None where it has none of that split."""

    def inputs(self, batch: Any) -> tuple[Any, ...]:
        """What the model is called with: by default all parts of the batch but the last, which is the target."""
        return tuple(batch[:-1])

    @abstractmethod
    def loss(self, output: Any, batch: Any) -> Tensor:
        """Mean loss over the examples of the batch, a scalar."""

    @abstractmethod
    def optimizer(self, params: Iterable[nn.Parameter]) -> Optimizer:
        """The optimizer of the local steps, over `params`."""

    def scheduler(self, optimizer: Optimizer) -> LRScheduler | None:
        """A learning rate schedule of one round, stepped after every optimizer step; begins anew each round."""
        return None

    def metrics(self, output: Any, batch: Any) -> Mapping[str, tuple[Tensor | float, float]]:
        """Sum and count of each metric over the batch, such as {"accuracy": (num_correct, num_examples)}."""
        return {}

    def tensor_plan(self, model: nn.Module) -> Mapping[str, ParallelStyle]:
        """For `tp_plan = "app"` in `[parallel]`: how each module that is divided is, by its name in the model."""
        raise AppFailed(
            f'{type(self).__name__} has no tensor_plan(), which tp_plan = "app" asks for; write one, or set "auto"',
            field="parallel.tp_plan",
        )

    def features(self, batch: Any) -> Mapping[str, Tensor]:
        """What statistics over sites may count: a column of each feature, shape (B,), NaN where an example lacks it."""
        return {}

    def examples(self, batch: Any) -> int:
        """Weight of a batch: by default the length of its first tensor. Must be additive over examples."""
        return len(next(_tensors(batch)))

    def loader(
        self, dataset: Dataset[Any], *, batch_size: int, shuffle: bool, generator: torch.Generator
    ) -> Iterable[Any]:
        """Batches of one pass over the data, in an order that only `generator` decides."""
        if isinstance(dataset, IterableDataset):
            return DataLoader(dataset, batch_size=batch_size, generator=generator)
        if type(dataset) is TensorDataset:
            return tensor_batches(dataset, batch_size=batch_size, shuffle=shuffle, generator=generator)
        if isinstance(dataset, TensorDataset):  # indexed by whole batches: 20 times faster than one by one
            order = RandomSampler(dataset, generator=generator) if shuffle else SequentialSampler(dataset)
            batches = BatchSampler(order, batch_size, drop_last=False)
            return DataLoader(dataset, sampler=batches, batch_size=None, generator=generator)
        return DataLoader(dataset, batch_size=batch_size, shuffle=shuffle, generator=generator)


def build_app(kind: type[A], values: Mapping[str, Any], source: Mapping[str, Any]) -> A:
    """The app for a job's `[app]` values and a machine's `[data.NAME]` table.

    Raises:
        ConfigError: a value that the app's Config does not take, or a key that it does not know.
    """
    config = kind.Config
    if config.model_config.get("extra") is None:  # pydantic's default would ignore a misspelt key
        config = type(config.__name__, (config,), {"model_config": ConfigDict(extra="forbid")})
    try:
        return kind(config.model_validate(dict(values)), source)
    except ValidationError as error:
        raise explain(error, config, "job", below=["app"]) from None


def build_model(app: App, job_seed: int) -> nn.Module:
    """The app's model with the weights that `job_seed` gives: version 0 of a run, the same on every machine.

    Raises:
        AppFailed: `model()` returns something else than a module.
    """
    with seeded(model_seed(job_seed)):
        model = app.model()
    if not isinstance(model, nn.Module):
        raise AppFailed(
            f"{type(app).__name__}.model() returned {type(model).__name__}, wanted a torch.nn.Module", field="model"
        )
    return model


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for part in batch.values():
            yield from _tensors(part)
    elif isinstance(batch, list | tuple):
        for part in batch:
            yield from _tensors(part)
