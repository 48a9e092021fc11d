from __future__ import annotations

import numpy as np
import pytest

from atoll.simulations.partition import Indices, dirichlet, iid
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
