"""The strategy by round: each stage is resolved before anything runs, and what reaches over rounds stays of one kind."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.aggregation.stages import Strategies
from atoll.wire.errors import ConfigError
from atoll.wire.job import Job, parse_job


def job(strategy: dict[str, Any], *overrides: dict[str, Any]) -> Job:
    stages = [{"from_round": 5 * number, "strategy": override} for number, override in enumerate(overrides, start=1)]
    section = {"job": {"name": "a", "app": "a", "rounds": 20}, "strategy": strategy}
    return parse_job({**section, **({"control": {"override": stages}} if stages else {})})


def test_parts_by_round() -> None:
    strategies = Strategies(
        job(
            {"optimizer": {"kind": "adam", "lr": 0.1}, "rule": {"kind": "fedprox", "mu": 1.0}},
            {"optimizer": {"lr": 0.01}},
            {"rule": {"mu": 0.0}},
        )
    )
    assert [strategies.at(number).optimizer.lr.at(0) for number in (1, 4, 5, 20)] == [0.1, 0.1, 0.01, 0.01]  # type: ignore[attr-defined]
    assert strategies.first is strategies.at(4)
    assert strategies.at(9).rule is not strategies.at(10).rule


def test_a_promise_of_mixing_is_that_of_the_weakest_round() -> None:
    krum = {"schedule": {"kind": "rounds", "min": 9}, "reducer": {"kind": "multi_krum", "faulty": 1, "select": 6}}
    assert Strategies(job(krum)).mixed(9) == 6
    assert Strategies(job(krum, {"reducer": {"select": 2}})).mixed(9) == 2


@pytest.mark.parametrize(
    ("strategy", "override", "words"),
    [
        ({"optimizer": {"kind": "sgd"}}, {"optimizer": {"lr": -1}}, ["control.override.0", "from round 5", "strategy.optimizer.lr"]),
        ({"optimizer": {"kind": "sgd"}}, {"optimizer": {"momentum": 0.9}}, ["control.override.0.strategy.optimizer", "precision"]),
        ({"reducer": {"kind": "trimmed_mean"}, "schedule": {"kind": "rounds", "min": 9}}, {"reducer": {"fraction": 2.0}}, ["control.override.0", "strategy.reducer.fraction = 2.0"]),
        ({"reducer": {"kind": "krum", "faulty": 0}, "schedule": {"kind": "rounds", "min": 3}}, {"reducer": {"faulty": 1}}, ["control.override.0", "strategy.reducer"]),
    ],
    ids=["out of bounds", "another precision", "a reducer's option", "too few updates"],
)  # fmt: skip
def test_a_later_stage_that_cannot_be_is_refused_before_the_run(
    strategy: dict[str, Any], override: dict[str, Any], words: list[str]
) -> None:
    Strategies(job(strategy))
    with pytest.raises(ConfigError) as caught:
        Strategies(job(strategy, override))
    for word in words:
        assert word in str(caught.value)
