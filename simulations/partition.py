"""How data that lies in one place is spread over sites, for examples and simulations.

Dirichlet's is that of flwr-datasets, given local labels; only the indices are taken from it. It is loaded here and
nowhere else, on the first call: it brings in pyarrow and takes seconds to import.
"""

from __future__ import annotations

import heapq
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


def quantity(
    examples: ArrayLike, num_sites: int, *, alpha: float, seed: int = 0, min_examples: int = 1
) -> list[Indices]:
    """Indices into `examples` for each site: the same mixture everywhere, in sizes that a draw from Dirichlet(alpha) gives.

    Every site has `min_examples`; the others go by the draw: with an alpha of 0.1 to a few sites, of 100 evenly to all.

    Raises:
        ConfigError: there are fewer examples than `min_examples` for each site.
    """
    _check(examples, num_sites)
    num_examples = np.asarray(examples).shape[0]
    rest = num_examples - num_sites * min_examples
    if rest < 0:
        most = num_examples // num_sites
        text = f"{num_sites} sites cannot have {min_examples} of {num_examples} examples each"
        raise ConfigError(
            f"{text}; set at most {most}", key="partition.min_examples", value=str(min_examples), bound=f"1 to {most}"
        )
    rng = np.random.default_rng(seed)
    ends = np.rint(np.cumsum(rng.dirichlet(np.full(num_sites, alpha))) * rest).astype(np.int64)
    ends[-1] = rest  # however the shares were rounded
    cuts = ends + min_examples * np.arange(1, num_sites + 1)
    return [np.sort(part) for part in np.split(rng.permutation(num_examples), cuts[:-1])]


def classes(labels: ArrayLike, num_sites: int, *, classes_each: int, seed: int = 0) -> list[Indices]:
    """Indices into `labels` for each site, which has exactly `classes_each` classes.

    Each class is at about the same number of sites, and they share its examples evenly (Li et al. 2022,
    arXiv:2102.02079, "quantity-based label imbalance").

    Raises:
        ConfigError: there are fewer classes, too few sites to have all of them, or too few examples of one.
    """
    _check(labels, num_sites)
    rng = np.random.default_rng(seed)
    known, class_of = np.unique(np.asarray(labels), return_inverse=True)
    _check_classes(len(known), num_sites, classes_each)
    holders: list[list[int]] = [[] for _ in known]
    for site in rng.permutation(num_sites):
        order = rng.permutation(len(known))
        fewest = order[np.argsort([len(holders[number]) for number in order], kind="stable")]
        for number in fewest[:classes_each]:
            holders[number].append(int(site))
    parts: list[list[Indices]] = [[] for _ in range(num_sites)]
    for number, sites in enumerate(holders):
        found = rng.permutation(np.flatnonzero(class_of == number))
        if len(found) < len(sites):
            text = f"class {known[number]} has {len(found)} examples, and {len(sites)} sites are to have some of it"
            raise ConfigError(f"{text}; take fewer sites or classes", key="sites", value=str(num_sites))
        for site, part in zip(sites, np.array_split(found, len(sites)), strict=True):
            parts[site].append(part)
    return [np.sort(np.concatenate(mine)) for mine in parts]


def natural(groups: ArrayLike, num_sites: int) -> list[Indices]:
    """Indices into `groups` for each site: whole groups, such as all examples of one writer or hospital.

    With as many sites as groups each has one, in the order of the groups' names; with fewer, the largest group that is
    left goes to the site that has least.

    Raises:
        ConfigError: there are more sites than groups, so that some would be empty.
    """
    _check(groups, num_sites)
    names, group_of, sizes = np.unique(np.asarray(groups), return_inverse=True, return_counts=True)
    if num_sites > len(names):
        text = f"{num_sites} sites, and the data has {len(names)} groups: some would be empty"
        raise ConfigError(
            f"{text}; take at most {len(names)}", key="sites", value=str(num_sites), bound=f"1 to {len(names)}"
        )
    site_of = np.arange(len(names))
    if num_sites < len(names):
        loads = [(0, site) for site in range(num_sites)]
        for number in np.argsort(-sizes, kind="stable"):
            load, site = heapq.heappop(loads)
            site_of[number] = site
            heapq.heappush(loads, (load + int(sizes[number]), site))
    order = np.argsort(site_of[group_of], kind="stable")
    return np.split(order, np.cumsum(np.bincount(site_of[group_of], minlength=num_sites))[:-1])


def _check_classes(num_classes: int, num_sites: int, classes_each: int) -> None:
    least = -(-num_classes // num_sites)
    if not least <= classes_each <= num_classes:
        text = f"the data has {num_classes} classes, and {num_sites} sites are to have {classes_each} each"
        why = "a class would be at no site" if classes_each < least else "there are not so many"
        raise ConfigError(
            f"partition.classes_each = {classes_each}: {text}; {why}",
            key="partition.classes_each",
            value=str(classes_each),
            bound=f"{least} to {num_classes}",
        )


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
