"""Strategies under secure aggregation, from the job to the model: the sum of bare levels bit for bit, and the plain run."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from samples.masked_run import Server
from samples.strategy_run import RegionSite, TopServer, TrainedSite, job_of, naive, played, sites_of

from atoll.aggregation.lanes import factors_in, run_manifest
from atoll.aggregation.reducers.bucketing import whole_buckets
from atoll.aggregation.strategy import resolve
from atoll.privacy.secagg.agreement import Terms
from atoll.server.run_state import Outcome
from atoll.server.secure_pipeline import bucket_seed

FIVE = [f"site-{number}" for number in range(5)]
NINE = [f"site-{number}" for number in range(9)]
ROUNDS = {"kind": "rounds", "min": 5}


def both(
    tmp_path: Path,
    strategy: Mapping[str, Any],
    names: Sequence[str],
    *,
    rounds: int = 1,
    labels: Mapping[str, str] | None = None,
    drops: Sequence[str] = (),
    **terms: Any,
) -> tuple[Server, Server, dict[str, TrainedSite]]:
    """The job masked and plain; `drops` stop before their masked input."""
    job = job_of(strategy, rounds=rounds, **terms)
    sites = sites_of(job, tmp_path / "masked-sites", names, labels)
    for name in drops:
        sites[name].stops_at = {0: "shares"}
    masked = played(job, tmp_path / "masked", sites)
    assert masked.driver.state.outcome is Outcome.FINISHED, masked.driver.state.reason
    job = job_of(strategy, rounds=rounds, masked=False)
    plain = played(job, tmp_path / "plain", sites_of(job, tmp_path / "plain-sites", names, labels))
    assert plain.driver.state.outcome is Outcome.FINISHED, plain.driver.state.reason
    return masked, plain, sites


def stored(server: Server, values: NDArray[Any]) -> NDArray[Any]:
    """Values as a version has them: each rounded to its tensor's dtype."""
    found, start = [], 0
    for spec in server.manifest:
        found.append(values[start : start + spec.num_elements].astype(spec.dtype).astype(np.float64))
        start += spec.num_elements
    return np.concatenate(found)


def terms_of(sites: Mapping[str, TrainedSite], name: str) -> Terms:
    terms = sites[name].terms
    assert terms is not None
    return terms


def require_close(
    masked: Server, plain: Server, terms: Terms, sites: Sequence[TrainedSite], version: int = 1, *, times: int = 1
) -> None:
    """No value is further from the plain run's than rounding may cost (docs/secure-aggregation.md), `times` as much."""
    weight = sum(site.weight for site in sites)
    most = len(sites) * terms.quantum * terms.max_weight / weight
    assert np.abs(masked.model(version) - plain.model(version)).max() <= times * version * most + 1e-6


# --- at the client ---------------------------------------------------------------------------------------------------


def test_sites_shorten_their_updates_to_the_norm(tmp_path: Path) -> None:
    strategy = {"schedule": ROUNDS, "reducer": {"kind": "norm_bound", "norm": 2.0}}
    masked, plain, sites = both(tmp_path, strategy, FIVE, bound=2.0)  # no value of a shortened update is larger
    terms = terms_of(sites, FIVE[0])
    np.testing.assert_array_equal(masked.model(), stored(masked, naive(terms, sites, FIVE)))
    require_close(masked, plain, terms, list(sites.values()))
    assert np.linalg.norm(plain.model()) < 2.0, "the updates are longer, at about 7"


def test_one_step_of_centered_clipping_counts_each_site_the_same(tmp_path: Path) -> None:
    strategy = {"schedule": ROUNDS, "reducer": {"kind": "centered_clipping", "radius": 3.0}}
    masked, plain, sites = both(tmp_path, strategy, FIVE, drops=["site-3"])
    survivors = [name for name in FIVE if name != "site-3"]
    terms = terms_of(sites, FIVE[0])
    np.testing.assert_array_equal(masked.model(), stored(masked, naive(terms, sites, survivors, weighted=False)))
    all_ = naive(terms, sites, FIVE, weighted=False)
    assert np.abs(all_ - plain.model()).max() <= terms.quantum + 1e-6


# --- FedNova ---------------------------------------------------------------------------------------------------------


def test_fednovas_steps_are_counted_exactly(tmp_path: Path) -> None:
    masked, plain, sites = both(tmp_path, {"kind": "fednova", "schedule": ROUNDS}, FIVE)
    require_close(masked, plain, terms_of(sites, FIVE[0]), [*sites.values()], times=9)  # as many steps
    place = [spec.name for spec in masked.manifest].index("fednova.steps")
    start = sum(spec.num_elements for spec in list(masked.manifest)[:place])
    assert masked.model()[start] == pytest.approx(plain.model()[start], rel=1e-15)
    weights = [site.weight for site in sites.values()]
    [lane] = factors_in(sites[FIVE[0]].layout(1), resolve(sites[FIVE[0]].job).lanes)
    steps = [np.frombuffer(site.update(1).read_bytes(), "<f8", 1, lane.offset)[0] for site in sites.values()]
    mean = sum(w * s for w, s in zip(weights, steps, strict=True)) / sum(weights)
    assert masked.model()[start] == pytest.approx(mean, rel=1e-15)


# --- buckets ---------------------------------------------------------------------------------------------------------

BUCKETED = {
    "schedule": {"kind": "rounds", "min": 9},
    "reducer": {"kind": "bucketing", "size": 3, "inner": {"kind": "median"}},
}


def buckets_of(sites: Mapping[str, TrainedSite]) -> tuple[tuple[str, ...], ...]:
    return whole_buckets(sorted(sites), 3, bucket_seed(0))


def test_the_median_of_the_sums_of_buckets(tmp_path: Path) -> None:
    masked, _, sites = both(tmp_path, BUCKETED, NINE, rounds=2)
    buckets = buckets_of(sites)
    assert sorted(map(len, buckets)) == [3, 3, 3]
    means = [naive(terms_of(sites, names[0]), sites, names, weighted=False) for names in buckets]
    middle = np.array([statistics.median(column) for column in zip(*means, strict=True)])
    before = masked.model(1)
    np.testing.assert_array_equal(masked.model(2), stored(masked, before + middle))
    record = masked.record
    assert (record.num_sites, record.weight) == (9, sum(site.weight for site in sites.values()))
    assert (record.secure.num_sites, record.secure.parts, record.secure.threshold) == (9, 3, 3)
    assert {terms_of(sites, name).num_sites for name in NINE} == {3}, "each site has seen its bucket alone"


def test_a_bucket_goes_on_without_who_drops_out_of_it(tmp_path: Path) -> None:
    strategy = {"schedule": {"kind": "rounds", "min": 10}, "reducer": {**BUCKETED["reducer"], "size": 5}}
    names = [f"site-{number}" for number in range(10)]
    masked, _, sites = both(tmp_path, strategy, names, drops=["site-4"])
    buckets = whole_buckets(sorted(sites), 5, bucket_seed(0))
    means = []
    for bucket in buckets:
        survivors = [name for name in bucket if name != "site-4"]
        means.append(naive(terms_of(sites, bucket[0]), sites, survivors, weighted=False))
    np.testing.assert_array_equal(masked.model(), stored(masked, (means[0] + means[1]) / 2))
    assert list(masked.record.secure.dropped) == ["site-4"]
    assert list(masked.record.missing) == ["site-4"]


# --- groups ----------------------------------------------------------------------------------------------------------

GROUPED = {
    "schedule": {
        "kind": "hierarchical",
        "label": "region",
        "groups": ["north", "south"],
        "rounds": 2,
        "inner": {"kind": "rounds", "min": 4},
    }
}
EIGHT = {f"site-{number}": ("north", "south")[number % 2] for number in range(8)}


def test_each_group_has_a_session_of_its_own(tmp_path: Path) -> None:
    masked, plain, sites = both(tmp_path, GROUPED, list(EIGHT), rounds=2, labels=EIGHT)
    groups = [[sites[name] for name in EIGHT if EIGHT[name] == group] for group in ("north", "south")]
    for group in groups:
        require_close(masked, plain, terms_of(sites, group[0].name), group, version=2)
    assert np.abs(masked.model(2)).max() > 0.1
    assert (masked.record.secure.parts, masked.record.num_sites) == (2, 8)
    for name, home in EIGHT.items():
        assert set(terms_of(sites, name).opening.sites) == {other for other in EIGHT if EIGHT[other] == home}
    digests = {terms_of(sites, name).opening.digests[1] for name in EIGHT}
    assert len(digests) == 2, "in its second round each group begins with a version of its own"


class Killed(Exception):
    """The server's process is gone."""


@pytest.mark.parametrize("phase", ["shares", "confirmations"])
@pytest.mark.parametrize("parts", ["groups", "buckets"])
def test_a_server_killed_in_the_sessions_of_parts_ends_with_the_same_model(
    tmp_path: Path, parts: str, phase: str
) -> None:
    strategy, names = (GROUPED, list(EIGHT)) if parts == "groups" else (BUCKETED, NINE)
    labels = EIGHT if parts == "groups" else None
    whole, _, _ = both(tmp_path / "whole", strategy, names, rounds=2, labels=labels)
    job = job_of(strategy, rounds=2)
    sites = sites_of(job, tmp_path / "sites", names, labels)
    first = Server(tmp_path, job, sites)

    async def killed() -> None:
        running = asyncio.ensure_future(first.run())
        while sum(site.heard.count(phase) for site in sites.values()) < 5:  # in one part at least some more are done
            await asyncio.sleep(0.001)
        first.dead = True
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(killed())
    first.store.close()
    second = Server(tmp_path, job, sites)
    asyncio.run(second.run())
    np.testing.assert_array_equal(second.model(2), whole.model(2))


# --- fragments -------------------------------------------------------------------------------------------------------


def test_a_session_is_over_the_fragment_of_its_round(tmp_path: Path) -> None:
    strategy = {"schedule": {"kind": "every_steps", "min": 5, "steps": 6, "fragments": 3}}
    masked, plain, sites = both(tmp_path, strategy, FIVE, rounds=4)
    require_close(masked, plain, terms_of(sites, FIVE[0]), list(sites.values()), version=4)
    fragments = resolve(sites[FIVE[0]].job).fragments(masked.manifest)
    assert terms_of(sites, FIVE[0]).num_values == fragments.of_round(4).layout.num_values < fragments.whole.num_values
    moved = masked.model(1) != masked.model(0)
    names = np.repeat([spec.name for spec in masked.manifest], [spec.num_elements for spec in masked.manifest])
    assert set(names[moved]) == fragments.of_round(1).names


# --- trees -----------------------------------------------------------------------------------------------------------


def tree(folder: Path, job: Any, regions: Mapping[str, Sequence[str]]) -> tuple[TopServer, dict[str, RegionSite]]:
    below = {
        name: RegionSite(name, job, folder / name, sites_of(job, folder / name / "sites", names))
        for name, names in regions.items()
    }
    (folder / "top").mkdir(parents=True)
    top = TopServer(folder / "top", job, below, manifest=run_manifest(sites_manifest(below), resolve(job).lanes))  # type: ignore[arg-type]
    return top, below


def sites_manifest(below: Mapping[str, RegionSite]) -> Any:
    return next(iter(next(iter(below.values())).sites.values())).manifest.model


REGIONS = {"north": ["a", "b", "c"], "south": ["d", "e", "f", "g"]}


@pytest.mark.parametrize(
    "parts",
    [{"kind": "fedavg"}, {"kind": "fedavg", "reducer": {"kind": "norm_bound", "norm": 3.0}}, {"kind": "fednova"}],
    ids=["mean", "norm_bound", "fednova"],
)
def test_a_region_sends_the_sum_of_its_own_session_up(tmp_path: Path, parts: Mapping[str, Any]) -> None:
    strategy = {"schedule": {"kind": "rounds", "min": 2}, **parts}
    models, most = {}, 0.0
    for masked in (True, False):
        top, below = tree(tmp_path / str(masked), job_of(strategy, masked=masked, rounds=2), REGIONS)
        asyncio.run(top.play())
        assert top.driver.state.outcome is Outcome.FINISHED, top.driver.state.reason
        models[masked] = top.model(2)
        assert all(region.own is not None and region.own.driver.state.version == 2 for region in below.values())
        assert [len(region.partials) for region in below.values()] == [2, 2]
        if masked:
            sites = [site for region in below.values() for site in region.sites.values()]
            terms = [terms_of(region.sites, min(region.sites)) for region in below.values()]
            assert [end.version for site in sites for end in site.ended] == [1, 2] * 7
            assert {one.num_sites for one in terms} == {3, 4}
            most = sum(one.num_sites * one.quantum * one.max_weight for one in terms) / sum(s.weight for s in sites)
            weight = sum(site.weight for site in sites)
            assert (top.record.num_sites, top.record.weight) == (2, weight)
            assert top.record.train_metrics["loss"].count == weight
    most *= 9 if parts["kind"] == "fednova" else 1  # as many steps
    assert np.abs(models[True] - models[False]).max() <= 2 * most + 1e-6
    assert np.abs(models[True]).max() > 0.1


def test_a_region_whose_session_comes_to_nothing_has_no_part_in_the_round(tmp_path: Path) -> None:
    strategy = {"schedule": {"kind": "rounds", "min": 2}}
    top, below = tree(tmp_path, job_of(strategy, attempts=1), REGIONS)
    for name in ("d", "e"):
        below["south"].sites[name].stops_at = {0: "shares"}

    async def played() -> None:
        for site in below.values():
            await site.prepare()
        driving = await top.begin()
        async with asyncio.timeout(20):
            while not below["south"].errors:
                await asyncio.sleep(0.01)
        driving.cancel()
        for site in below.values():
            site._driving.cancel()

    asyncio.run(played())
    text = str(below["south"].errors[0])
    assert "region south has no part in round 1: round 1: none of 1 sessions" in text
    assert "d (silent for 1 s)" in text
    assert below["south"].own is not None
    assert below["south"].own.driver.state.outcome is Outcome.NONE, "its run goes on"
