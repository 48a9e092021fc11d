"""Every robust reducer against its paper's formula, written out over whole vectors."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from contracts.updates import BOUND, SMALL, decoded, encoded, layout_of, random_state, whole_mean
from numpy.typing import NDArray

from atoll.aggregation.parts import build
from atoll.aggregation.reducers.reduction import RoundTerms
from atoll.wire.errors import BadUpdate, ConfigError

Vector = NDArray[np.float64]
SITES = tuple(f"site-{number}" for number in range(9))
WEIGHTS = dict(zip(SITES, (3, 50, 7, 11, 2, 30, 8, 90, 41), strict=True))
LOSSES = dict(zip(SITES, (0.5, 1.5, 0.25, 2.0, 1.0, 0.75, 3.0, 0.1, 0.9), strict=True))
LAYOUT = layout_of(SMALL)
SEED = 77


def payloads(sites: tuple[str, ...] = SITES, *, far: tuple[str, ...] = ()) -> dict[str, bytes]:
    """Updates that lie near one another, but for those of `far`."""
    base, common = random_state(LAYOUT.manifest, 0), random_state(LAYOUT.manifest, 1)
    made = {}
    for number, site in enumerate(sites, start=2):
        own, scale = random_state(LAYOUT.manifest, number), 0.3 if site not in far else -100.0
        trained = {
            name: base[name] + (common[name] + own[name] * scale) if base[name].is_floating_point() else own[name]
            for name in base
        }
        trained = {name: value.to(base[name].dtype) for name, value in trained.items()}
        made[site] = encoded(LAYOUT, base, trained, site=site)
    return made


def combined(kind: str, options: dict[str, Any], updates: dict[str, bytes]) -> Vector:
    terms = RoundTerms(num_sites=len(updates), max_weight=max(WEIGHTS.values()), bound=BOUND, seed=SEED)
    reduction = build("reducer", kind, options).init(LAYOUT, terms)
    for site, payload in updates.items():
        metrics = {"loss": (4 * LOSSES[site], 4.0)}
        reduction.check(payload, WEIGHTS[site], metrics=metrics)
        reduction.fold(site, payload, WEIGHTS[site], metrics)
    result: Vector = whole_mean(reduction).numpy()
    return result


def vectors(updates: dict[str, bytes]) -> Vector:
    return np.stack([decoded(LAYOUT, updates[site]).numpy() for site in sorted(updates)])


# --- the formulas ---------------------------------------------------------------------------------------------------


def krum_order(x: Vector, faulty: int) -> list[int]:
    def score(i: int) -> float:
        others = sorted(float(((x[i] - x[j]) ** 2).sum()) for j in range(len(x)) if j != i)
        return sum(others[: max(1, len(x) - faulty - 2)])

    return sorted(range(len(x)), key=score)


def bulyan(x: Vector, faulty: int) -> Vector:
    left = list(range(len(x)))
    chosen: list[int] = []
    while len(chosen) < len(x) - 2 * faulty:
        best = left[krum_order(x[left], faulty)[0]]
        chosen.append(best)
        left.remove(best)
    picked = x[sorted(chosen)]
    middle = np.median(picked, axis=0)
    keep = len(picked) - 2 * faulty
    result = np.empty(x.shape[1])
    for place in range(x.shape[1]):
        nearest = np.abs(picked[:, place] - middle[place]).argsort(kind="stable")[:keep]
        result[place] = picked[nearest, place].mean()
    return result


def geometric_median(x: Vector, weights: Vector, iterations: int, nu: float) -> Vector:
    share = weights / weights.sum()
    z: Vector = share @ x
    for _ in range(iterations):
        near = share / np.maximum(np.linalg.norm(x - z, axis=1), nu)
        z = (near / near.sum()) @ x
    return z


def centered_clipping(x: Vector, radius: float, iterations: int) -> Vector:
    v = np.zeros(x.shape[1])
    for _ in range(iterations):
        lengths = np.linalg.norm(x - v, axis=1)
        v = v + ((x - v) * np.minimum(1, radius / lengths)[:, None]).mean(axis=0)
    return v


def fltrust(x: Vector, trusted: int) -> Vector:
    root = x[trusted]
    others = [row for place, row in enumerate(x) if place != trusted]
    trust = [max(0.0, float(row @ root / np.linalg.norm(row) / np.linalg.norm(root))) for row in others]
    scaled = [t * np.linalg.norm(root) / np.linalg.norm(row) * row for t, row in zip(trust, others, strict=True)]
    total: Vector = np.sum(scaled, axis=0) / sum(trust)
    return total


def qfedavg(x: Vector, losses: Vector, q: float, lr: float) -> Vector:
    steps, total = np.zeros(x.shape[1]), 0.0
    for row, loss in zip(x, losses, strict=True):
        steps += loss**q * row / lr
        total += q * loss ** (q - 1) * float(((row / lr) ** 2).sum()) + loss**q / lr
    return steps / total


def norm_bound(x: Vector, weights: Vector, norm: float) -> Vector:
    shortened = x * np.minimum(1, norm / np.linalg.norm(x, axis=1))[:, None]
    result: Vector = weights @ shortened / weights.sum()
    return result


WEIGHT_VECTOR = np.array([WEIGHTS[site] for site in SITES], dtype=np.float64)
LOSS_VECTOR = np.array([LOSSES[site] for site in SITES])
CASES: list[tuple[str, dict[str, Any], Callable[[Vector], Vector]]] = [
    ("median", {}, lambda x: np.median(x, axis=0)),
    ("trimmed_mean", {"fraction": 0.25}, lambda x: np.sort(x, axis=0)[2:7].mean(axis=0)),
    ("trimmed_mean", {"fraction": 0.0}, lambda x: x.mean(axis=0)),
    ("krum", {"faulty": 2}, lambda x: x[krum_order(x, 2)[0]]),
    ("multi_krum", {"faulty": 2, "select": 4}, lambda x: x[krum_order(x, 2)[:4]].mean(axis=0)),
    ("multi_krum", {"faulty": 3}, lambda x: x[krum_order(x, 3)[:6]].mean(axis=0)),
    ("bulyan", {"faulty": 1}, lambda x: bulyan(x, 1)),
    ("geometric_median", {"iterations": 25}, lambda x: geometric_median(x, WEIGHT_VECTOR, 25, 1e-6)),
    ("centered_clipping", {"radius": 60.0, "iterations": 3}, lambda x: centered_clipping(x, 60.0, 3)),
    ("fltrust", {"trusted": "site-4"}, lambda x: fltrust(x, 4)),
    ("qfedavg", {"q": 0.7, "lr": 0.1}, lambda x: qfedavg(x, LOSS_VECTOR, 0.7, 0.1)),
    ("qfedavg", {"q": 0.0, "lr": 0.1}, lambda x: x.mean(axis=0)),
    ("norm_bound", {"norm": 100.0}, lambda x: norm_bound(x, WEIGHT_VECTOR, 100.0)),
]


@pytest.mark.parametrize(("kind", "options", "formula"), CASES, ids=[f"{kind} {options}" for kind, options, _ in CASES])
@pytest.mark.parametrize("far", [(), ("site-7",)], ids=["near", "one far"])
def test_the_formula(
    kind: str, options: dict[str, Any], formula: Callable[[Vector], Vector], far: tuple[str, ...]
) -> None:
    updates = payloads(far=far)
    wanted = formula(vectors(updates))
    assert np.abs(combined(kind, options, updates) - wanted).max() <= 1e-9 * max(1.0, np.abs(wanted).max())


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("median", {}),
        ("trimmed_mean", {"fraction": 0.25}),
        ("krum", {"faulty": 2}),
        ("multi_krum", {"faulty": 2}),
        ("bulyan", {"faulty": 1}),
        ("centered_clipping", {"radius": 30.0, "iterations": 10}),
        ("fltrust", {"trusted": "site-0"}),
        ("bucketing", {"size": 2, "inner": {"kind": "median"}}),
        ("geometric_median", {}),
    ],
)
def test_one_far_site_moves_the_mean_and_not_this(kind: str, options: dict[str, Any]) -> None:
    honest = vectors(payloads()).mean(axis=0)
    updates = payloads(far=("site-6",))
    moved_mean = np.linalg.norm(combined("mean", {}, updates) - honest)
    assert np.linalg.norm(combined(kind, options, updates) - honest) < 0.2 * moved_mean


def test_an_even_number_has_the_mean_of_the_two_middle_values() -> None:
    updates = payloads(SITES[:4])
    assert np.array_equal(combined("median", {}, updates), np.median(vectors(updates), axis=0))


def test_bucketing_of_one_is_the_inner_reducer() -> None:
    updates = payloads()
    alone = combined("krum", {"faulty": 2}, updates)
    assert np.array_equal(alone, combined("bucketing", {"size": 1, "inner": {"kind": "krum", "faulty": 2}}, updates))


def test_bucketing_is_the_inner_reducer_of_the_buckets_means() -> None:
    updates = payloads()
    x = vectors(updates)
    result = combined("bucketing", {"size": 3, "inner": {"kind": "median"}}, updates)
    sites, found = set(range(9)), 0
    for first in itertools.combinations(sorted(sites), 3):
        for second in itertools.combinations(sorted(sites - set(first)), 3):
            third = sorted(sites - set(first) - set(second))
            means = [x[list(bucket)].mean(axis=0) for bucket in (first, second, third)]
            found += np.allclose(result[:50], np.median([mean[:50] for mean in means], axis=0), rtol=0, atol=1e-12)
    assert found == 6  # one deal, its buckets in any order


def test_without_anybody_on_its_side_the_trusted_update_stands_alone() -> None:
    base = random_state(LAYOUT.manifest, 0)
    step = random_state(LAYOUT.manifest, 1)
    floats = {name for name in base if base[name].is_floating_point()}
    there = {name: (base[name] + step[name]).to(base[name].dtype) if name in floats else base[name] for name in base}
    back = {name: (base[name] - step[name]).to(base[name].dtype) if name in floats else base[name] for name in base}
    updates = {"site-0": encoded(LAYOUT, base, there), "site-1": encoded(LAYOUT, base, back)}
    assert np.array_equal(combined("fltrust", {"trusted": "site-0"}, updates), vectors(updates)[0])


@pytest.mark.parametrize(
    ("kind", "options", "num_sites", "message"),
    [
        ("krum", {"faulty": 2}, 6, "krum needs at least 7 updates .* there are 6"),
        ("multi_krum", {"faulty": 1, "select": 6}, 6, "multi_krum needs at least 7 updates .* there are 6"),
        ("bulyan", {"faulty": 2}, 9, "bulyan needs at least 11 updates .* there are 9"),
        ("fltrust", {"trusted": "site-9"}, 5, '"site-9", which is not among them'),
    ],
)
def test_too_few_survivors_are_an_error_and_never_the_mean(
    kind: str, options: dict[str, Any], num_sites: int, message: str
) -> None:
    with pytest.raises(BadUpdate, match=message):
        combined(kind, options, payloads(SITES[:num_sites]))


@pytest.mark.parametrize("metrics", [{}, {"loss": (0.0, 4.0)}, {"loss": (1.0, 0.0)}, {"loss": (-1.0, 1.0)}])
def test_an_update_without_a_loss_above_0_is_refused_when_it_comes(metrics: dict[str, tuple[float, float]]) -> None:
    """So that it costs its own task and not the run."""
    terms = RoundTerms(num_sites=1, max_weight=9, bound=BOUND)
    payload = payloads(("site-0",))["site-0"]
    for kind, options in (("qfedavg", {"lr": 0.1}), ("bucketing", {"inner": {"kind": "qfedavg", "lr": 0.1}})):
        with pytest.raises(BadUpdate, match=r"training loss, and that of site-0 is .* change the app's loss") as caught:
            build("reducer", kind, options).init(LAYOUT, terms).check(payload, 1, site="site-0", metrics=metrics)
        assert caught.value.field == "loss"
    build("reducer", "qfedavg", {"lr": 0.1, "q": 0.0}).init(LAYOUT, terms).check(payload, 1, metrics=metrics)


@pytest.mark.parametrize(
    ("kind", "options", "of_8", "of_9"),
    [
        ("mean", {}, 8, 9),
        ("norm_bound", {"norm": 1.0}, 8, 9),
        ("median", {}, 2, 1),
        ("trimmed_mean", {"fraction": 0.25}, 4, 5),
        ("krum", {"faulty": 1}, 1, 1),
        ("multi_krum", {"faulty": 2}, 6, 7),
        ("multi_krum", {"faulty": 2, "select": 3}, 3, 3),
        ("bulyan", {"faulty": 1}, 4, 5),
        ("geometric_median", {}, 8, 9),
        ("centered_clipping", {"radius": 1.0}, 8, 9),
        ("fltrust", {"trusted": "a"}, 1, 1),
        ("qfedavg", {"lr": 0.1}, 1, 1),
        ("qfedavg", {"lr": 0.1, "q": 0.0}, 8, 9),
        ("bucketing", {"size": 2, "inner": {"kind": "krum", "faulty": 0}}, 2, 1),
        ("bucketing", {"size": 2, "inner": {"kind": "geometric_median"}}, 8, 5),
    ],
)
def test_sites_are_promised_no_more_than_what_is_mixed(
    kind: str, options: dict[str, Any], of_8: int, of_9: int
) -> None:
    reducer = build("reducer", kind, options)
    assert (reducer.mixed(8), reducer.mixed(9)) == (of_8, of_9)


@pytest.mark.parametrize(
    ("kind", "options", "key"),
    [
        ("trimmed_mean", {"fraction": 0.5}, "strategy.reducer.fraction"),
        ("krum", {}, "strategy.reducer.faulty"),
        ("krum", {"faulty": -1}, "strategy.reducer.faulty"),
        ("multi_krum", {"faulty": 1, "select": 0}, "strategy.reducer.select"),
        ("bulyan", {"faulty": "x"}, "strategy.reducer.faulty"),
        ("geometric_median", {"nu": 0.0}, "strategy.reducer.nu"),
        ("centered_clipping", {"radius": float("inf")}, "strategy.reducer.radius"),
        ("norm_bound", {"norm": 0.0}, "strategy.reducer.norm"),
        ("qfedavg", {"lr": 0.1, "q": -1.0}, "strategy.reducer.q"),
        ("fltrust", {"trusted": ""}, "strategy.reducer.trusted"),
        ("bucketing", {"size": 0, "inner": {"kind": "median"}}, "strategy.reducer.size"),
        ("bucketing", {"inner": {"kind": "mean"}}, "strategy.reducer.inner.kind"),
        ("bucketing", {"inner": {"kind": "fltrust", "trusted": "a"}}, "strategy.reducer.inner.kind"),
        ("bucketing", {"inner": {"kind": "bucketing", "inner": {"kind": "median"}}}, "strategy.reducer.inner.kind"),
    ],
)
def test_bad_options_name_their_key(kind: str, options: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build("reducer", kind, options)
    assert caught.value.key == key
