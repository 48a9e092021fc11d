"""Who mixes with whom, and by how much: graphs over sites in the order of their names, and Metropolis-Hastings weights.

Invariant: the weights are symmetric and doubly stochastic, exactly (fractions), whatever the graph; so mixing leaves
the mean of all models where it is. They depend on the sites that are there and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Final, Literal

Pair = tuple[str, str]  # of sites, the name that sorts first before the other
Named = Literal["ring", "complete", "exponential", "torus"]
Weights = Mapping[str, Mapping[str, Fraction]]  # by site: the weight of each model that it mixes, its own included

NAMED: Final = ("ring", "complete", "exponential", "torus")


def pairs(graph: Named | Sequence[Pair], sites: Iterable[str]) -> tuple[Pair, ...]:
    """The neighbours among `sites`, sorted.

    * ring: each with the next one, the last with the first.
    * complete: all with all.
    * exponential: those 1, 2, 4, 8, ... places apart on the ring (Ying et al. 2021, arXiv:2110.13363, here undirected):
      degree about 2 log2 n.
    * torus: a grid of the rows that make it as square as the number of sites allows, closed in both directions; of a
      prime number of sites a ring.
    * a list of pairs: those of which both sites are there.
    """
    names = sorted(set(sites))
    if not isinstance(graph, str):
        return tuple(sorted({_ordered(a, b) for a, b in graph if a in names and b in names}))
    size = len(names)
    steps: list[tuple[int, int]] = []
    if graph == "ring":
        steps = [(i, (i + 1) % size) for i in range(size)]
    elif graph == "complete":
        steps = [(i, j) for i in range(size) for j in range(i)]
    elif graph == "exponential":
        steps = [(i, (i + 2**k) % size) for i in range(size) for k in range((size - 1).bit_length())]
    else:
        rows = max(r for r in range(1, math.isqrt(size) + 1) if size % r == 0) if size else 0
        columns = size // rows if rows else 0
        for i in range(size):
            row, column = divmod(i, columns)
            steps.append((i, row * columns + (column + 1) % columns))
            steps.append((i, (row + 1) % rows * columns + column))
    return tuple(sorted({_ordered(names[i], names[j]) for i, j in steps if i != j}))


def metropolis(sites: Iterable[str], joined: Iterable[Pair]) -> Weights:
    """W_ij = 1 / (1 + max(d_i, d_j)) of neighbours, the rest to each site's own model (Xiao and Boyd 2004, section 4.1:
    Metropolis-Hastings), with d the degrees in `joined`; keys in the order of names.

    Raises:
        ValueError: a pair is of a site that is not among `sites`, or of a site with itself.
    """
    names = sorted(set(sites))
    neighbours: dict[str, set[str]] = {name: set() for name in names}
    for a, b in joined:
        if a == b or a not in neighbours or b not in neighbours:
            raise ValueError(f"({a}, {b}) is no pair of two of the sites {', '.join(names)}")
        neighbours[a].add(b)
        neighbours[b].add(a)
    weights: dict[str, dict[str, Fraction]] = {}
    for name in names:
        degree = len(neighbours[name])
        row = {other: Fraction(1, 1 + max(degree, len(neighbours[other]))) for other in neighbours[name]}
        row[name] = 1 - sum(row.values(), Fraction(0))
        weights[name] = {other: row[other] for other in sorted(row)}
    require_doubly_stochastic(weights)
    return weights


def require_doubly_stochastic(weights: Weights) -> None:
    """Returns where each row and each column of `weights` sums to 1 exactly, and none is negative.

    Raises:
        ValueError: names the site whose row or column it is.
    """
    columns = dict.fromkeys(weights, Fraction(0))
    for site, row in weights.items():
        if min(row.values()) < 0 or sum(row.values()) != 1:
            raise ValueError(f"the weights of {site} are negative or do not sum to 1: {dict(row)}")
        for other, weight in row.items():
            columns[other] += weight
    for site, total in columns.items():
        if total != 1:
            raise ValueError(f"the weights of the model of {site} sum to {total} over all sites, not to 1")


def _ordered(a: str, b: str) -> Pair:
    return (a, b) if a < b else (b, a)
