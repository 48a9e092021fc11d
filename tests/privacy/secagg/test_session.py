"""Whole sessions: the sum is exact for whoever drops out when, and too few give nothing."""

from __future__ import annotations

import itertools
import random

import pytest
from samples.secagg_session import as_integers, inputs, naive_sum, plan_of, run

from atoll.wire.errors import NotAllowed, TooFewSites

PHASES = ("keys", "shares", "sends", "unmasks")


def patterns(num_sites: int) -> list[tuple[int, ...]]:
    """In which phase each site drops out; len(PHASES): never."""
    return list(itertools.combinations_with_replacement(range(len(PHASES) + 1), num_sites))


@pytest.mark.parametrize("pattern", patterns(5), ids=lambda pattern: "".join(map(str, pattern)))
def test_every_pattern_of_drops_of_five_sites(pattern: tuple[int, ...]) -> None:
    """Which site drops out does not matter but by its index, so sites are shuffled by the pattern."""
    plan = plan_of(5)
    order = list(range(5))
    random.Random(str(pattern)).shuffle(order)
    there = {
        phase: {site for site, left in zip(order, pattern, strict=True) if left > place}
        for place, phase in enumerate(PHASES)
    }
    values = inputs(plan)
    threshold = plan.parameters.threshold
    if min(len(sites) for sites in there.values()) < threshold:
        with pytest.raises((NotAllowed, TooFewSites)):
            run(plan, values, **there).result()
        return
    sums, found = run(plan, values, **there).result()
    assert as_integers(sums) == naive_sum(values, there["sends"])
    assert not found.liars


@pytest.mark.chaos
def test_every_pattern_of_drops_of_each_of_five_sites() -> None:
    """All 3,125 of them, whoever is first on the list."""
    plan = plan_of(5)
    values, come_out = inputs(plan), 0
    for pattern in itertools.product(range(len(PHASES) + 1), repeat=5):
        there = {phase: {site for site in range(5) if pattern[site] > place} for place, phase in enumerate(PHASES)}
        if min(len(sites) for sites in there.values()) < plan.parameters.threshold:
            with pytest.raises((NotAllowed, TooFewSites)):
                run(plan, values, **there).result()
            continue
        sums, _ = run(plan, values, **there).result()
        assert as_integers(sums) == naive_sum(values, there["sends"]), pattern
        come_out += 1
    assert come_out == 10 * 16 + 5 * 4 + 1  # three, four or five sites stay to the end


@pytest.mark.parametrize("threat", ["active", "semi-honest"])
@pytest.mark.parametrize(
    ("num_sites", "corrupt"), [(20, 0.1), (20, 0.34), pytest.param(100, 0.1, marks=pytest.mark.chaos)]
)
def test_random_drops_of_larger_cohorts(num_sites: int, corrupt: float, threat: str) -> None:
    plan = plan_of(num_sites, corrupt=corrupt, threat=threat)  # type: ignore[arg-type]
    lot = random.Random(num_sites)
    sites = set(range(num_sites))
    leaving = lot.sample(sorted(sites), plan.parameters.num_dropped)
    third = len(leaving) // 3
    shares = sites - set(leaving[:third])
    sends = shares - set(leaving[third : 2 * third])
    unmasks = sends - set(leaving[2 * third :])
    values = inputs(plan)
    sums, _ = run(plan, values, keys=sites, shares=shares, sends=sends, unmasks=unmasks).result()
    assert as_integers(sums) == naive_sum(values, sends)


def test_a_harary_graph_with_drops() -> None:
    plan = plan_of(200, corrupt=0.05, dropped=0.05, threat="active")
    assert not plan.parameters.complete
    sites = set(range(200))
    lot = random.Random(3)
    leaving = lot.sample(sorted(sites), 10)
    sends = sites - set(leaving[:8])
    unmasks = sends - set(leaving[8:])
    values = inputs(plan)
    sums, _ = run(plan, values, keys=sites, shares=sites - set(leaving[:3]), sends=sends, unmasks=unmasks).result()
    assert as_integers(sums) == naive_sum(values, sends)
