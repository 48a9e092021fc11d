"""Thresholds and graphs: published vectors, the table of the complete graph, and what is refused."""

from __future__ import annotations

import math

import pytest

from atoll.privacy.secagg.parameters import LARGEST_COMPLETE, Threat, harary, parameters
from atoll.wire.errors import ConfigError


@pytest.mark.parametrize(
    ("num_sites", "corrupt", "dropped", "threat", "expected"),
    [
        (100, 33, 33, "semi-honest", (68, 34)),
        (1000, 50, 330, "semi-honest", (72, 24)),
        (1000, 50, 330, "active", (398, 223)),
        (10_000, 3300, 500, "active", (178, 146)),
    ],
)
def test_the_vectors_published_with_the_protocol(
    num_sites: int, corrupt: int, dropped: int, threat: Threat, expected: tuple[int, int]
) -> None:
    assert harary(num_sites, corrupt, dropped, threat, correctness_bits=20) == expected


@pytest.mark.parametrize(
    ("corrupt", "dropped", "threat", "expected"),
    [
        (0.05, 0.05, "semi-honest", [(30, 16), (34, 18)]),
        (0.1, 0.1, "semi-honest", [(46, 25), (52, 28)]),
        (0.05, 0.05, "active", [(52, 36), (62, 43)]),
        (0.1, 0.2, "active", [(174, 109), (226, 142)]),
        (0.33, 0.1, "active", [(184, 143), (244, 189)]),
    ],
)
def test_graphs_of_500_and_1000_sites(
    corrupt: float, dropped: float, threat: Threat, expected: list[tuple[int, int]]
) -> None:
    made = [parameters(n, corrupt=corrupt, dropped=dropped, threat=threat) for n in (500, 1000)]
    assert [(p.degree, p.threshold) for p in made] == expected
    assert not any(p.complete for p in made)


@pytest.mark.parametrize(
    ("num_sites", "corrupt", "threshold", "dropped"),
    [(5, 0.1, 3, 2), (5, 0.34, 4, 1), (10, 0.1, 6, 4), (20, 0.34, 14, 6), (50, 0.2, 31, 19), (100, 0.34, 68, 32)],
)
def test_thresholds_of_the_complete_graph(num_sites: int, corrupt: float, threshold: int, dropped: int) -> None:
    made = parameters(num_sites, corrupt=corrupt)
    assert (made.threshold, made.num_dropped, made.degree) == (threshold, dropped, num_sites - 1)
    assert made.complete


@pytest.mark.parametrize("num_sites", range(3, LARGEST_COMPLETE + 1))
@pytest.mark.parametrize("corrupt", [0.0, 0.1, 0.2])
def test_what_the_threshold_promises_on_the_complete_graph(num_sites: int, corrupt: float) -> None:
    made = parameters(num_sites, corrupt=corrupt)
    n, t, a, d = made.num_sites, made.threshold, made.num_corrupt, made.num_dropped
    assert a == math.floor(corrupt * n + 1e-9)
    assert 2 * (t - a) > n - a, "two quorums could hold different honest sites"
    assert t - a >= 3, "a sum could hold fewer than three honest inputs"
    assert n - d >= t, "the survivors could be too few to unmask"


def test_three_sites_of_whom_none_may_drop_out() -> None:
    made = parameters(3)
    assert (made.threshold, made.num_dropped, made.fewest_survivors) == (3, 0, 3)


@pytest.mark.parametrize(
    ("num_sites", "options", "text"),
    [
        (2, {}, "wanted 3 to 65535"),
        (3, {"corrupt": 0.34}, "4 shares are needed; take more sites"),
        (10, {"dropped": 0.5}, "so 4 may drop out and not 5"),
        (10, {"corrupt": 1.0}, "corrupt = 1.0: wanted 0 to below 1"),
        (10, {"dropped": -0.1}, "dropped = -0.1: wanted 0 to below 1"),
        (200, {"corrupt": 0.4, "dropped": 0.6}, "lower corrupt or dropped"),
    ],
)
def test_what_no_threshold_holds_for(num_sites: int, options: dict[str, float], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        parameters(num_sites, **options)  # type: ignore[arg-type]
