"""The sites of a simulation and their examples: a training set cut by a partition, or each site's own data.

With a partition one app serves every site: its training data is loaded once and put into the order of the sites, so
that a site's examples are a slice and take no memory of their own. Test data is spread evenly, whatever the partition.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from atoll.cluster.app import App, build_app
from atoll.simulations import partition as cut
from atoll.wire.errors import AppFailed, ConfigError

Kind = Literal["iid", "dirichlet", "shards", "quantity", "classes", "natural"]
KINDS: tuple[Kind, ...] = ("iid", "dirichlet", "shards", "quantity", "classes", "natural")


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """How a training set is spread over sites; see `atoll.simulations.partition`."""

    kind: Kind = "iid"
    alpha: float = 0.5  # of dirichlet and quantity: how alike sites are
    min_examples: int = 10  # of dirichlet and quantity: that every site has
    shards_each: int = 2  # of shards: about as many labels has a site
    classes_each: int = 2  # of classes: exactly as many has a site
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise _bad("kind", self.kind, ", ".join(KINDS))
        if not 0 < self.alpha <= 1e6:
            raise _bad("alpha", self.alpha, "above 0, at most 1e6")
        if self.min_examples < 1:
            raise _bad("min_examples", self.min_examples, "1 or more")
        if not 1 <= self.shards_each <= 10_000:
            raise _bad("shards_each", self.shards_each, "1 to 10000")
        if self.classes_each < 1:
            raise _bad("classes_each", self.classes_each, "1 or more")

    def num_sites(self, dataset: Dataset[Any] | None) -> int | None:
        """How many sites the data itself has; None where it can be spread over any number.

        Raises:
            ConfigError: it should have sites, and does not say which.
        """
        return len(np.unique(groups_of(dataset))) if self.kind == "natural" and dataset is not None else None

    def indices(self, dataset: Dataset[Any], num_sites: int) -> list[NDArray[np.int64]]:
        """Places in `dataset` for each site.

        Raises:
            ConfigError: a site would be empty, no draw gives every site enough, or labels or groups are not found.
        """
        if self.kind == "iid":
            return cut.iid(np.empty(_length(dataset)), num_sites, seed=self.seed)
        if self.kind == "quantity":
            examples = np.empty(_length(dataset))
            return cut.quantity(examples, num_sites, alpha=self.alpha, min_examples=self.min_examples, seed=self.seed)
        if self.kind == "natural":
            return cut.natural(groups_of(dataset), num_sites)
        labels = labels_of(dataset)
        if self.kind == "shards":
            return cut.shards(labels, num_sites, shards_each=self.shards_each, seed=self.seed)
        if self.kind == "classes":
            return cut.classes(labels, num_sites, classes_each=self.classes_each, seed=self.seed)
        return cut.dirichlet(labels, num_sites, alpha=self.alpha, min_examples=self.min_examples, seed=self.seed)


class Sites(Protocol):
    """Names, in order, and what each site has."""

    @property
    def names(self) -> Sequence[str]: ...

    def app(self, site: str) -> App:
        """The app as it runs at a site."""
        ...

    def data(self, site: str, split: str) -> Dataset[Any] | None:
        """A site's examples; None where it has none of that split."""
        ...

    def server_data(self) -> Dataset[Any] | None:
        """The test data that a version is judged on at the server."""
        ...


class PartitionedSites:
    """Sites over the data of one app."""

    def __init__(self, app: App, whole: Dataset[Any] | None, names: Sequence[str], partition: Partition) -> None:
        """
        Args:
            whole: the app's training data.

        Raises:
            AppFailed: there is none.
            ConfigError: the data cannot be spread so.
        """
        self.names = tuple(names)
        self._app = app
        self._place = {name: place for place, name in enumerate(self.names)}
        if whole is None:
            raise AppFailed('data("train") is None: there is nothing to spread over sites', field="data.train")
        self._train = _Cut(whole, partition.indices(whole, len(self.names)))
        self._whole_test = app.data("test")
        self._test = _spread(self._whole_test, len(self.names), partition.seed)

    def app(self, site: str) -> App:
        return self._app

    def data(self, site: str, split: str) -> Dataset[Any] | None:
        part = self._train if split == "train" else self._test
        return None if part is None else part[self._place[site]]

    def server_data(self) -> Dataset[Any] | None:
        return self._whole_test


class OwnDataSites:
    """Sites with a source each, as in a deployment: one app for each, its data loaded when it is first asked for."""

    def __init__(
        self,
        kind: type[App],
        values: Mapping[str, Any],
        sources: Mapping[str, Mapping[str, Any]],
        server_source: Mapping[str, Any] | None = None,
    ) -> None:
        """
        Args:
            values: the job's table `[app]`.
            sources: the table `[data.NAME]` by site.
            server_source: the same of the server.

        Raises:
            ConfigError: the app does not take the values.
        """
        self.names = tuple(sorted(sources))
        self._apps = {name: build_app(kind, values, sources[name]) for name in self.names}
        self._server = None if server_source is None else build_app(kind, values, server_source)
        self._loaded: dict[tuple[str, str], Dataset[Any] | None] = {}

    def app(self, site: str) -> App:
        return self._apps[site]

    def data(self, site: str, split: str) -> Dataset[Any] | None:
        if (site, split) not in self._loaded:
            self._loaded[site, split] = self._apps[site].data(split)
        return self._loaded[site, split]

    def server_data(self) -> Dataset[Any] | None:
        if self._server is not None:
            return self._server.data("test")
        raise ConfigError(
            "evaluation.server = true, and the sites have data of their own: say what the server judges by with "
            "server_source (--server-data), or set evaluation.server = false",
            key="evaluation.server",
            value="true",
        )


class _Cut(Sequence[Dataset[Any]]):
    """A dataset in parts."""

    def __init__(self, whole: Dataset[Any], parts: Sequence[NDArray[np.int64]]) -> None:
        self._bounds = np.cumsum([0, *(len(part) for part in parts)])
        self._whole, self._parts = whole, parts
        self._tensors: tuple[Tensor, ...] | None = None
        if type(whole) is TensorDataset:
            order = torch.from_numpy(np.concatenate(parts))
            self._tensors = tuple(tensor[order] for tensor in whole.tensors)

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, place: Any) -> Any:
        if self._tensors is None:
            return Subset(self._whole, self._parts[place].tolist())
        start, stop = int(self._bounds[place]), int(self._bounds[place + 1])
        return TensorDataset(*(tensor[start:stop] for tensor in self._tensors))


def _spread(dataset: Dataset[Any] | None, num_sites: int, seed: int) -> Sequence[Dataset[Any] | None] | None:
    """Test data, the same share for every site; the last ones have none where there are fewer examples than sites."""
    if dataset is None:
        return None
    num_parts = min(num_sites, _length(dataset))
    if num_parts == 0:
        return None
    parts = _Cut(dataset, cut.iid(np.empty(_length(dataset)), num_parts, seed=seed))
    return parts if num_parts == num_sites else [*parts, *[None] * (num_sites - num_parts)]


def labels_of(dataset: Dataset[Any]) -> NDArray[Any]:
    """The class of each example: the last tensor of a TensorDataset, or the attribute `targets`.

    Raises:
        ConfigError: there is neither.
    """
    found: Any = getattr(dataset, "targets", None)
    if found is None and isinstance(dataset, TensorDataset):
        found = dataset.tensors[-1]
    labels = np.asarray(found) if isinstance(found, Tensor | np.ndarray | Iterable) else None
    if labels is None or labels.ndim != 1 or len(labels) != _length(dataset):
        raise ConfigError(
            f'data("train") gives a {type(dataset).__name__} without a class for each example; give it an attribute '
            "`targets`, or take partition = iid",
            key="partition.kind",
        )
    return labels


def groups_of(dataset: Dataset[Any]) -> NDArray[Any]:
    """The group of each example, such as its writer or hospital: the dataset's attribute `groups`.

    Raises:
        ConfigError: there is none for each example.
    """
    found: Any = getattr(dataset, "groups", None)
    groups = np.asarray(found) if isinstance(found, Tensor | np.ndarray | Iterable) else None
    if groups is None or groups.ndim != 1 or len(groups) != _length(dataset):
        raise ConfigError(
            f'partition = natural: data("train") gives a {type(dataset).__name__} that does not say where each example '
            "is from; give it an attribute `groups`, with one entry for each example",
            key="partition.kind",
            value="natural",
        )
    return groups


def _length(dataset: Dataset[Any]) -> int:
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
        raise ConfigError(
            "the app's data has no length, so it cannot be spread over sites; give each site a source of its own: "
            "{site} in --data, or sites = {name: source}",
            key="partition.kind",
        )
    return len(dataset)


def _bad(key: str, value: object, bound: str) -> ConfigError:
    return ConfigError(
        f"partition.{key} = {value!r}: wanted {bound}", key=f"partition.{key}", value=str(value), bound=bound
    )
