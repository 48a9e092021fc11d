from __future__ import annotations

import numpy as np
import pytest

from atoll.simulations.partition import Indices, classes, dirichlet, iid, natural, quantity
from atoll.wire.errors import ConfigError

LABELS = np.arange(2000) % 10


def is_partition(parts: list[Indices]) -> bool:
    return sorted(np.concatenate(parts).tolist()) == list(range(len(LABELS)))


def distance(parts: list[Indices]) -> float:
    """Mean total-variation distance of the sites' labels from the whole's."""
    shares = [np.bincount(LABELS[part], minlength=10) / len(part) for part in parts]
    return float(np.mean([np.abs(share - 0.1).sum() / 2 for share in shares]))


@pytest.mark.parametrize("num_sites", [1, 3, 7])
def test_iid_gives_each_example_to_one_site(num_sites: int) -> None:
    parts = iid(LABELS, num_sites, seed=1)
    assert len(parts) == num_sites
    assert is_partition(parts)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert distance(parts) < 0.1


def test_dirichlet_gives_each_example_to_one_site() -> None:
    parts = dirichlet(LABELS, 5, alpha=0.5, seed=1)
    assert is_partition(parts)
    assert min(map(len, parts)) >= 10


def test_dirichlet_is_as_uneven_as_alpha_says() -> None:
    apart = [distance(dirichlet(LABELS, 5, alpha=alpha, seed=1)) for alpha in (0.1, 1.0, 100.0)]
    assert apart[0] > 0.5 > apart[1] > 0.1 > apart[2]


def test_equal_seeds_give_equal_parts() -> None:
    for first, again, other in (
        [iid(LABELS, 4, seed=seed) for seed in (1, 1, 2)],
        [dirichlet(LABELS, 4, alpha=0.5, seed=seed) for seed in (1, 1, 2)],
    ):
        assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
        assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("num_sites", [0, -1, 2001])
def test_refuses_numbers_of_sites_that_cannot_be(num_sites: int) -> None:
    with pytest.raises(ConfigError, match="cannot be spread"):
        iid(LABELS, num_sites)
    with pytest.raises(ConfigError, match="cannot be spread"):
        dirichlet(LABELS, num_sites, alpha=1.0)


@pytest.mark.parametrize(("alpha", "least"), [(-1.0, 10), (0.5, 1000)])
def test_refuses_what_no_draw_can_give(alpha: float, least: int) -> None:
    with pytest.raises(ConfigError, match="Dirichlet"):
        dirichlet(LABELS, 5, alpha=alpha, min_examples=least)


def test_quantity_gives_unlike_sizes_and_the_same_mixture() -> None:
    uneven, even = (quantity(LABELS, 8, alpha=alpha, seed=1, min_examples=10) for alpha in (0.3, 1000.0))
    assert is_partition(uneven)
    assert is_partition(even)
    assert min(map(len, uneven)) >= 10
    assert max(map(len, uneven)) > 5 * min(map(len, uneven))
    assert max(map(len, even)) < 1.3 * min(map(len, even))
    with pytest.raises(ConfigError, match=r"8 sites cannot have 251 of 2000 examples each; set at most 250") as caught:
        quantity(LABELS, 8, alpha=1.0, min_examples=251)
    assert caught.value.key == "partition.min_examples"


def test_classes_gives_each_site_exactly_so_many_and_each_example_to_one() -> None:
    for num_sites, each in [(8, 3), (5, 2), (30, 1), (4, 10)]:
        parts = classes(LABELS, num_sites, classes_each=each, seed=1)
        assert is_partition(parts)
        assert [len(np.unique(LABELS[part])) for part in parts] == [each] * num_sites
        holders = np.bincount(np.concatenate([np.unique(LABELS[part]) for part in parts]), minlength=10)
        assert holders.max() - holders.min() <= 1


@pytest.mark.parametrize(
    ("num_sites", "each", "text"),
    [
        (8, 11, r"partition\.classes_each = 11: the data has 10 classes, .* there are not so many"),
        (4, 2, r"partition\.classes_each = 2: .* 4 sites are to have 2 each; a class would be at no site"),
        (4, 0, r"partition\.classes_each = 0"),
    ],
)
def test_classes_refuses_numbers_that_cannot_be(num_sites: int, each: int, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        classes(LABELS, num_sites, classes_each=each)
    assert caught.value.key == "partition.classes_each"
    rare = np.append(np.zeros(1000, dtype=np.int64), 1)
    with pytest.raises(ConfigError, match=r"class 1 has 1 examples, and 3 sites are to have some of it"):
        classes(rare, 3, classes_each=2)


def test_natural_keeps_groups_together() -> None:
    groups = np.repeat(["north", "east", "south", "west"], [500, 800, 300, 400])
    each = natural(groups, 4)
    assert is_partition(each)
    assert [np.unique(groups[part]).tolist() for part in each] == [["east"], ["north"], ["south"], ["west"]]
    pairs = natural(groups, 2)
    assert is_partition(pairs)
    assert sorted(map(len, pairs)) == [900, 1100]
    assert not set(groups[pairs[0]]) & set(groups[pairs[1]])
    with pytest.raises(ConfigError, match=r"5 sites, and the data has 4 groups: some would be empty; take at most 4"):
        natural(groups, 5)


def test_the_same_seed_gives_the_same_quantity_and_classes() -> None:
    for first, again, other in (
        [quantity(LABELS, 4, alpha=0.5, seed=seed) for seed in (1, 1, 2)],
        [classes(LABELS, 4, classes_each=3, seed=seed) for seed in (1, 1, 2)],
    ):
        assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
        assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))
