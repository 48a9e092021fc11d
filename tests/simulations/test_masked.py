"""Simulated runs with secure aggregation: the protocol of a deployment, with sums that are exact."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from samples.simulated import Points, points_job

import atoll
from atoll.cluster.masking import mask_by_strategy
from atoll.privacy.secagg.levels import largest_level
from atoll.server.masked_sum import MaskedSum
from atoll.simulations import masked as module
from atoll.simulations.dropouts import Dropouts
from atoll.simulations.results import Result
from atoll.wire.errors import ConfigError

SITES = 6
LABELS = {f"site-{number}": {"region": ("north", "south")[number % 2]} for number in range(1, SITES + 1)}
LOCAL: dict[str, Any] = {"buffers": "local"}
STRATEGIES: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedadam": {"kind": "fedadam"},
    "fedprox": {"kind": "fedprox"},
    "scaffold": {"kind": "scaffold"},
    "feddyn": {"kind": "feddyn"},
    "fednova": {"kind": "fednova"},
    "norm_bound": {"reducer": {"kind": "norm_bound", "norm": 0.2}},
    "bucketing": {"reducer": {"kind": "bucketing", "size": SITES, "inner": {"kind": "median"}}},
    "buffered": {"schedule": {"kind": "buffered", "k": 4, "min": SITES}},
    "hierarchical": {
        "schedule": {
            "kind": "hierarchical",
            "label": "region",
            "groups": ["north", "south"],
            "rounds": 2,
            "inner": {"kind": "rounds", "min": 3},
        }
    },
    "fragments": {
        "schedule": {"kind": "every_steps", "steps": 4, "min": SITES, "fragments": 2},
        "work": {"batch_size": 8},
    },
}


def masked(job: dict[str, Any], **terms: Any) -> dict[str, Any]:
    section = {"fewest_survivors": 3, "corrupt": 0.0, "threat": "semi-honest", **terms}
    return {**job, "privacy": {"secure_aggregation": section}}


def run(job: dict[str, Any], **options: Any) -> Result:
    result = atoll.simulate(job, **{"app": Points, "sites": SITES, "source": {}, "labels": LABELS, **options})
    assert (result.status, result.reason) == ("finished", "")
    return result


def apart(one: Result, other: Result) -> float:
    """Largest difference of a value of their models."""
    pairs = [(tensor.double(), other.model[name].double()) for name, tensor in one.model.items()]
    return max(float((mine - theirs).abs().max()) for mine, theirs in pairs)


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_the_model_is_that_of_plain_updates_within_the_steps_of_the_ring(strategy: dict[str, Any]) -> None:
    """Differences of a round grow by training on: bounds of 1e-4 where the second round's are off by far less alone."""
    job = points_job(**LOCAL, **strategy)
    with_masks, plain = run(masked(job, bound=1.0)), run(job)
    assert 0 < apart(with_masks, plain) < 1e-4
    assert [entry.weight for entry in with_masks.rounds] == [entry.weight for entry in plain.rounds]
    for mine, theirs in zip(with_masks.rounds, plain.rounds, strict=True):
        assert mine.sites == theirs.sites
        assert set(mine.train) == {"loss"}  # the metric that the job names; all else stays at the sites
        assert mine.train["loss"] == pytest.approx(theirs.train["loss"], abs=1e-3)


def test_buckets_have_a_session_each() -> None:
    reducer = {"kind": "bucketing", "size": 3, "inner": {"kind": "geometric_median"}}
    result = run(masked(points_job(**LOCAL, reducer=reducer)))
    assert [entry.sites for entry in result.rounds] == [SITES, SITES]
    assert all(torch.isfinite(tensor.float()).all() for tensor in result.model.values())


def test_a_round_is_off_by_less_than_a_level_of_each_site() -> None:
    job = points_job(rounds=1, **LOCAL)
    level = largest_level(SITES, 32)
    assert 0 < apart(run(masked(job)), run(job)) <= SITES * 8.0 / level + 2.0**-24


def test_runs_repeat_though_keys_and_masks_are_drawn_anew() -> None:
    job = masked(points_job(**LOCAL), threat="active")
    assert run(job).model_bytes == run(job).model_bytes


class Inputs:
    """Levels of the sites as they are, taken before they are masked, and sums as they come out of sessions."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.levels: dict[tuple[int, str], NDArray[np.int64]] = {}
        self.sums: list[tuple[int, tuple[str, ...], NDArray[np.int64]]] = []
        write, put = mask_by_strategy, module.MaskedWork.put

        def bare(strategy: Any, layout: Any, request: Any, secret: bytes, **options: Any) -> Any:
            site, number = request.key.split("/")
            write(strategy, layout, replace(request, masks=[], exact_masks=[]), secret, **options)
            written = Path(request.out_path).read_bytes()
            data = np.frombuffer(written, dtype="<i4", offset=8 * len(request.exact))
            self.levels[int(number), site] = data.astype(np.int64)
            return write(strategy, layout, request, secret, **options)

        def kept(work: Any, number: int, part: int, total: MaskedSum) -> None:
            sites = work._held[0].sites
            surviving = tuple(sites[index] for index in sorted(work._held[1]._now.surviving))
            self.sums.append((number, surviving, total._lanes[1].view("<i4").astype(np.int64)))
            put(work, number, part, total)

        monkeypatch.setattr(module, "mask_by_strategy", bare)
        monkeypatch.setattr(module.MaskedWork, "put", kept)


@pytest.mark.parametrize(
    ("sites", "terms", "share"),
    [
        pytest.param(20, {"threat": "active", "corrupt": 0.1}, 0.25, id="complete"),
        pytest.param(130, {"corrupt": 0.05, "dropped": 0.1}, 0.05, id="harary"),
    ],
)
def test_sums_of_sessions_that_sites_drop_out_of_are_exact(
    monkeypatch: pytest.MonkeyPatch, sites: int, terms: dict[str, Any], share: float
) -> None:
    inputs = Inputs(monkeypatch)
    job = masked(points_job(rounds=1, min_sites=sites, **LOCAL), **terms)
    job["strategy"]["schedule"]["quorum"] = sites
    result = run(job, sites=sites, source={"num_train": 40 * sites}, session_dropouts=Dropouts(share=share, seed=3))
    ((number, surviving, found),) = inputs.sums
    assert 0 < len(surviving) < sites
    naive = sum(inputs.levels[number, site] for site in surviving)
    assert np.array_equal(found, naive)
    assert result.rounds[0].sites == len(surviving)
    assert len(result.rounds[0].secure["dropped"]) == sites - len(surviving)
    assert result.rounds[0].secure["threshold"] > 2
    assert all(torch.isfinite(tensor.float()).all() for tensor in result.model.values())


def test_sites_drop_out_of_sessions_by_lots_of_their_own() -> None:
    """With one seed for both, a site that was there with its update would else be there to the end."""
    lots = Dropouts(share=0.25, seed=1)
    job = masked(points_job(rounds=6, min_sites=20, **LOCAL))
    job["strategy"]["schedule"]["quorum"] = 5
    result = run(job, sites=20, source={"num_train": 800}, dropouts=lots, session_dropouts=lots)
    there = [entry.secure["sites"] for entry in result.rounds]
    assert len(set(there)) > 1
    assert max(there) < 20
    assert 5 < sum(len(entry.secure["dropped"]) for entry in result.rounds) < 30  # of about 90, 3 phases of 4


def test_too_few_survivors_publish_nothing() -> None:
    job = masked(points_job(**LOCAL), fewest_survivors=6)
    always = Dropouts(by_site=dict.fromkeys(("site-2", "site-4", "site-5"), 1.0))
    result = atoll.simulate(job, app=Points, sites=SITES, source={}, session_dropouts=always)
    assert result.status == "failed"
    assert "none of 3 sessions of secure aggregation came to its end" in result.reason
    assert "(dropped out)" in result.reason
    assert not result.rounds


def test_what_cannot_be_masked_is_refused_as_in_a_federation() -> None:
    with pytest.raises(ConfigError, match=r"set strategy\.buffers = local"):
        run(masked(points_job()))  # with BatchNorm's counter
    with pytest.raises(ConfigError, match="looks at each update by itself"):
        run(masked(points_job(**LOCAL, reducer={"kind": "median"})))
    with pytest.raises(ConfigError, match=r"dropouts\.by_site"):
        run(masked(points_job(**LOCAL)), session_dropouts=Dropouts(by_site={"nobody": 0.5}))
