"""Graphs over sites and their mixing weights."""

from __future__ import annotations

from fractions import Fraction

import pytest

from atoll.aggregation.graphs import NAMED, Named, metropolis, pairs, require_doubly_stochastic

SITES = [f"s{number}" for number in range(8)]


def degrees(graph: Named, num_sites: int) -> set[int]:
    found = pairs(graph, SITES[:num_sites])
    return {sum(site in pair for pair in found) for site in SITES[:num_sites]}


@pytest.mark.parametrize(
    ("graph", "num_sites", "degree"),
    [
        ("ring", 8, 2),
        ("ring", 2, 1),
        ("complete", 8, 7),
        ("exponential", 8, 5),  # 1, 2 and 4 places on, and 1 and 2 back: 4 on is 4 back
        ("exponential", 5, 4),
        ("torus", 8, 3),  # 2 rows of 4: the row above is the row below
        ("torus", 6, 3),
        ("torus", 7, 2),  # a ring
    ],
)
def test_graphs_have_their_degrees(graph: Named, num_sites: int, degree: int) -> None:
    assert degrees(graph, num_sites) == {degree}


def test_a_ring_goes_by_names() -> None:
    assert pairs("ring", ["d", "a", "c", "b"]) == (("a", "b"), ("a", "d"), ("b", "c"), ("c", "d"))


def test_a_list_of_pairs_keeps_those_of_which_both_are_there() -> None:
    listed = [("b", "a"), ("b", "c"), ("c", "d"), ("a", "b")]
    assert pairs(listed, ["a", "b", "c"]) == (("a", "b"), ("b", "c"))


@pytest.mark.parametrize("graph", NAMED)
@pytest.mark.parametrize("num_sites", range(9))
def test_every_graph_is_connected_and_its_weights_doubly_stochastic(graph: Named, num_sites: int) -> None:
    sites = SITES[:num_sites]
    found = pairs(graph, sites)
    weights = metropolis(sites, found)
    require_doubly_stochastic(weights)
    assert all(weights[a][b] == weights[b][a] for a, b in found)
    reached = set(sites[:1])
    for _ in sites:
        reached |= {other for pair in found for other in pair if reached & set(pair)}
    assert reached == set(sites)


def test_metropolis_weights_of_a_star() -> None:
    weights = metropolis(["a", "b", "c", "d"], [("a", "b"), ("a", "c"), ("a", "d")])
    quarter = Fraction(1, 4)
    assert weights["a"] == {"a": quarter, "b": quarter, "c": quarter, "d": quarter}
    assert weights["b"] == {"a": quarter, "b": 3 * quarter}


def test_a_site_without_neighbours_keeps_its_model() -> None:
    assert metropolis(["a", "b", "c"], [("a", "b")])["c"] == {"c": 1}


def test_weights_that_are_not_doubly_stochastic_are_found() -> None:
    half = Fraction(1, 2)
    with pytest.raises(ValueError, match=r"model of a sum to 3/2"):
        require_doubly_stochastic({"a": {"a": Fraction(1)}, "b": {"a": half, "b": half}})
    with pytest.raises(ValueError, match=r"weights of a"):
        require_doubly_stochastic({"a": {"a": half}})


def test_a_pair_of_a_stranger_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\(a, z\) is no pair"):
        metropolis(["a", "b"], [("a", "z")])
