"""What goes together with masked updates, and why the rest does not."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.aggregation.strategy import require_regions_allowed, resolve
from atoll.wire.errors import ConfigError
from atoll.wire.job import Job, parse_job

GROUPED = {
    "kind": "hierarchical",
    "label": "region",
    "groups": ["north", "south"],
    "rounds": 1,
    "inner": {"kind": "rounds", "min": 3},
}
BUCKETS = {"kind": "bucketing", "size": 3, "inner": {"kind": "median"}}


def job(*, strategy: dict[str, Any] | None = None, fewest: int = 3, **more: Any) -> Job:
    section = {"schedule": {"kind": "rounds", "min": 3}, **(strategy or {})}
    table = {"job": {"name": "a", "app": "a", "rounds": 4}, "strategy": section, **more}
    return parse_job({**table, "privacy": {"secure_aggregation": {"fewest_survivors": fewest}}})


@pytest.mark.parametrize(
    "strategy",
    [
        {},
        *({"optimizer": {"kind": kind, "lr": 0.1}} for kind in ("sgd", "adam", "adamw", "adagrad", "yogi")),
        {"optimizer": {"kind": "sgd", "lr": 0.1, "momentum": 0.9}},
        {"rule": {"kind": "fedprox", "mu": 0.1}},
        {"rule": {"kind": "scaffold"}},
        {"kind": "feddyn"},
        {"codec": {"kind": "float32"}},
        {"buffers": "local"},
        {"kind": "fedbuff", "schedule": {"kind": "buffered", "min": 3, "k": 3}},
        {"schedule": {"kind": "every_steps", "min": 3, "steps": 6}},
        {"schedule": {"kind": "every_steps", "min": 3, "steps": 6, "fragments": 3}},
        {"schedule": {"kind": "every_steps", "min": 3, "steps": 6, "alpha": 0.5}},
        {"schedule": GROUPED},
        {"rule": {"kind": "fednova"}},
        {"reducer": {"kind": "norm_bound", "norm": 1.0}},
        {"reducer": {"kind": "centered_clipping", "radius": 1.0}},
        {"reducer": BUCKETS},
        {"schedule": {"kind": "rounds", "min": 15}, "reducer": {**BUCKETS, "inner": {"kind": "krum", "faulty": 1}}},
    ],
    ids=str,
)
def test_what_runs_masked(strategy: dict[str, Any]) -> None:
    resolve(job(strategy=strategy))


@pytest.mark.parametrize(
    ("strategy", "reason"),
    [
        *(
            ({"reducer": {"kind": kind, **options}}, "this reducer looks at each update by itself")
            for kind, options in (
                ("median", {}),
                ("trimmed_mean", {"fraction": 0.2}),
                ("krum", {"faulty": 0}),
                ("multi_krum", {"faulty": 0}),
                ("bulyan", {"faulty": 0}),
                ("fltrust", {"trusted": "site-1"}),
                ("qfedavg", {"lr": 0.1}),
            )
        ),
        *(
            ({"codec": {"kind": kind}}, "masked values travel as levels of a ring")
            for kind in ("bfloat16", "int8", "int4", "top_k", "random_k")
        ),
        ({"download": {"kind": "int8"}}, "a coded version is another one"),
        ({"buffers": "first"}, "the buffers of one site"),
        ({"schedule": {"kind": "cyclic"}}, "a turn is of one site"),
        ({"schedule": {"kind": "gossip", "zone": "reef", "min": 3}}, "hand whole models to their neighbours"),
        *(
            ({"reducer": reducer}, "two of those can show the update of one site")
            for reducer in (
                {"kind": "geometric_median"},
                {"kind": "geometric_median", "iterations": 1},
                {"kind": "centered_clipping", "radius": 1.0, "iterations": 2},
            )
        ),
        ({"reducer": {"kind": "bucketing", "inner": {"kind": "median"}}}, "raise size to fewest_survivors"),
        (
            {
                "schedule": {"kind": "rounds", "min": 13},
                "reducer": {"kind": "bucketing", "size": 3, "inner": {"kind": "krum", "faulty": 1}},
            },
            "so few of them are too few for the reducer inside",
        ),
        (
            {"reducer": {"kind": "bucketing", "size": 3, "inner": {"kind": "qfedavg", "lr": 0.1}}},
            "the server learns the sum",
        ),
        ({"schedule": GROUPED, "reducer": BUCKETS}, "buckets of groups have no sessions"),
    ],
    ids=str,
)
def test_what_is_refused_says_why(strategy: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        resolve(job(strategy=strategy))
    assert "privacy.secure_aggregation" in str(caught.value)
    table = job(strategy=strategy).model_dump(mode="json", exclude_none=True, exclude={"privacy"})
    resolve(parse_job(table))  # without masks it runs


def test_regions_have_sessions_of_their_own() -> None:
    require_regions_allowed(job(fewest=5), ["north"])
    with pytest.raises(ConfigError, match="needs each update by itself"):
        require_regions_allowed(job(strategy={"reducer": BUCKETS}), ["north"])


def test_more_survivors_than_a_round_closes_with_are_refused_where_no_region_is() -> None:
    resolve(job(fewest=5))
    with pytest.raises(
        ConfigError, match=r"of at least 5 sites.*: a round may close with fewer .*raise min and quorum"
    ):
        require_regions_allowed(job(fewest=5), [])
    quorum = {"schedule": {"kind": "rounds", "min": 3, "quorum": 2}}
    with pytest.raises(ConfigError, match="raise min and quorum"):
        require_regions_allowed(job(strategy=quorum), [])
    require_regions_allowed(job(), [])
