"""What goes together with masked updates, and why the rest does not."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.aggregation.strategy import require_regions_allowed, resolve
from atoll.wire.errors import ConfigError
from atoll.wire.job import Job, parse_job


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
                ("geometric_median", {}),
                ("centered_clipping", {"radius": 1.0}),
                ("norm_bound", {"norm": 1.0}),
                ("fltrust", {"trusted": "site-1"}),
                ("bucketing", {"inner": {"kind": "median"}}),
            )
        ),
        *(
            ({"codec": {"kind": kind}}, "masked values travel as levels of a ring")
            for kind in ("bfloat16", "int8", "int4", "top_k", "random_k")
        ),
        ({"download": {"kind": "int8"}}, "a coded version is another one"),
        ({"buffers": "first"}, "the buffers of one site"),
        ({"rule": {"kind": "fednova"}}, "needs more digits"),
        ({"schedule": {"kind": "rounds", "min": 3, "quorum": 2}}, "raise min and quorum"),
        ({"schedule": {"kind": "every_steps", "min": 3, "steps": 6, "fragments": 3}}, "sums of fragments"),
        ({"schedule": {"kind": "cyclic"}}, "a turn is of one site"),
        ({"schedule": {"kind": "gossip", "zone": "reef", "min": 3}}, "hand whole models to their neighbours"),
        (
            {
                "schedule": {
                    "kind": "hierarchical",
                    "label": "region",
                    "groups": ["north", "south"],
                    "rounds": 1,
                    "inner": {"kind": "rounds", "min": 3},
                }
            },
            "sessions of the groups",
        ),
    ],
    ids=str,
)
def test_what_is_refused_says_why(strategy: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        resolve(job(strategy=strategy))
    assert "privacy.secure_aggregation" in str(caught.value)
    table = job(strategy=strategy).model_dump(mode="json", exclude_none=True, exclude={"privacy"})
    resolve(parse_job(table))  # without masks it runs


def test_regions_are_refused() -> None:
    with pytest.raises(ConfigError, match="sessions below a region"):
        require_regions_allowed(job(), ["north"])


def test_more_survivors_than_a_round_closes_with_are_refused() -> None:
    with pytest.raises(ConfigError, match="of at least 5 sites"):
        resolve(job(fewest=5))
