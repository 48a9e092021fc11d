"""How data that lies in one place is spread over sites, for examples and simulations.

The partitioners are those of flwr-datasets, given local labels; only the indices are taken from them. It is loaded
here and nowhere else, on the first call: it brings in pyarrow and takes seconds to import.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from atoll.wire.errors import ConfigError

if TYPE_CHECKING:
    from datasets import Dataset

Indices = NDArray[np.int64]


def iid(labels: ArrayLike, num_sites: int, *, seed: int = 0) -> list[Indices]:
    """Indices into `labels` for each site: shuffled, then cut into parts whose sizes differ by at most one."""
    _check(labels, num_sites)
    order = np.random.default_rng(seed).permutation(np.asarray(labels).shape[0])
    return [np.sort(part) for part in np.array_split(order, num_sites)]


def dirichlet(
    labels: ArrayLike, num_sites: int, *, alpha: float, seed: int = 0, min_examples: int = 10
) -> list[Indices]:
    """Indices into `labels` for each site, each label spread over the sites by a draw from Dirichlet(alpha).

    A small alpha gives each site few labels (0.1), a large one all of them evenly (100). Draws again until every
    site has `min_examples`. Yurochkin et al. 2019, arXiv 1905.12022; here as flwr-datasets does it.

    Raises:
        ConfigError: flwr-datasets is not installed, or no draw in eleven gives every site enough examples.
    """
    _check(labels, num_sites)
    try:
        from flwr_datasets.partitioner import DirichletPartitioner
    except ImportError:
        raise ConfigError("flwr-datasets is not installed: pip install 'atoll[simulations]'") from None
    try:
        partitioner = DirichletPartitioner(
            num_partitions=num_sites, partition_by="label", alpha=alpha, min_partition_size=min_examples, seed=seed
        )
        partitioner.dataset = _dataset(np.asarray(labels))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The specified min_partition_size")  # it draws again, as we say
            return [np.sort(partitioner.load_partition(site)[:]["index"]) for site in range(num_sites)]
    except ValueError as error:
        raise ConfigError(
            f"Dirichlet({alpha}) over {num_sites} sites: {error}", key="alpha", value=str(alpha)
        ) from None


def shards(labels: ArrayLike, num_sites: int, *, shards_each: int = 2, seed: int = 0) -> list[Indices]:
    """Indices into `labels` for each site: sorted by label, cut into equal shards, `shards_each` of them drawn for it.

    A site then has about `shards_each` labels (McMahan et al. 2016, arXiv:1602.05629, section 3).
    """
    _check(labels, num_sites * shards_each)
    rng = np.random.default_rng(seed)
    shuffled = rng.permutation(np.asarray(labels).shape[0])
    by_label = shuffled[np.argsort(np.asarray(labels)[shuffled], kind="stable")]
    cut = np.array_split(by_label, num_sites * shards_each)
    drawn = rng.permutation(len(cut)).reshape(num_sites, shards_each)
    return [np.sort(np.concatenate([cut[shard] for shard in mine])) for mine in drawn]


def _dataset(labels: NDArray[Any]) -> Dataset:
    """The labels and their indices as the partitioners want them."""
    from datasets import Dataset

    class Labels(Dataset):  # type: ignore[misc]
        def __getitem__(self, key: Any) -> Any:
            """A column at once: partitioners make an array of it, which asks for 60,000 labels one by one (16 s)."""
            whole = super().__getitem__(slice(None))
            return whole[key] if isinstance(key, str) else super().__getitem__(key)

    table = Labels.from_dict({"label": labels, "index": np.arange(len(labels))})
    return cast("Dataset", table.with_format("numpy"))


def _check(labels: ArrayLike, num_sites: int) -> None:
    num_examples = np.asarray(labels).shape[0]
    if not 1 <= num_sites <= num_examples:
        raise ConfigError(
            f"{num_examples} examples cannot be spread over {num_sites} sites",
            key="sites",
            value=str(num_sites),
            bound=f"1 to {num_examples}",
        )
