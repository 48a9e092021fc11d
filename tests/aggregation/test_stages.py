"""The strategy by round: each stage is resolved before anything runs, and what reaches over rounds stays of one kind."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.aggregation.stages import Strategies
from atoll.wire.errors import ConfigError
from atoll.wire.job import Job, parse_job
from atoll.wire.manifest import Manifest


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


def test_layouts_and_forms_by_round() -> None:
    strategies = Strategies(
        job({"codec": {"kind": "int8"}}, {"codec": {"kind": "int4"}}, {"download": {"kind": "bfloat16"}})
    )
    manifest = Manifest.build([("a", "float32", (1000,), "parameter")])
    fragments, downloads = strategies.fragments(manifest), strategies.downloads(manifest, 0)
    sizes = [fragments.at(number).of_round(number).layout.num_bytes for number in (4, 5, 10)]
    assert sizes[0] > 1.7 * sizes[1]
    assert sizes[1] == sizes[2]
    assert downloads.at(9) is None
    assert (form := downloads.at(10)) is not None
    assert 2000 <= form.num_bytes < 2100


SCHEDULES: dict[str, dict[str, Any]] = {
    "rounds": {"min": 3},
    "every_steps": {"min": 3, "steps": 4, "fragments": 2},
    "buffered": {"min": 3, "k": 2},
    "cyclic": {"min": 3},
    "hierarchical": {"label": "region", "groups": ["a", "b"], "rounds": 1},
}


@pytest.mark.parametrize(
    ("kind", "override"),
    [
        ("rounds", {"fraction": 0.5, "min": 2, "quorum": 1, "deadline": 5.0, "sample": "weight", "over": 2.0}),
        ("every_steps", {"steps": 8, "alpha": 0.5, "quorum": 2}),
        ("buffered", {"k": 3, "exponent": 1.0, "max_staleness": 2}),
        ("cyclic", {"order": "random"}),
        ("hierarchical", {"inner": {"min": 4}, "inner_optimizer": {"lr": 0.5}}),
    ],
)
def test_a_schedule_with_other_options_from_a_round_on(kind: str, override: dict[str, Any]) -> None:
    more = {"inner": {"kind": "rounds", "min": 3}, "inner_optimizer": {"kind": "sgd", "lr": 1.0}}
    table = {"kind": kind, **SCHEDULES[kind], **(more if kind == "hierarchical" else {})}
    strategies = Strategies(job({"schedule": table, "work": {}}, {"schedule": override}))
    before, after = (strategies.at(number).schedule.options for number in (4, 5))  # type: ignore[attr-defined]
    assert before != after


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
        ({"schedule": {"kind": "rounds", "where": {"zone": "a"}}}, {"schedule": {"where": {"zone": "b"}}}, ["control.override.0.strategy.schedule.where", "whole run"]),
        ({"schedule": {"kind": "every_steps", "steps": 4, "fragments": 2}}, {"schedule": {"fragments": 4}}, ["schedule.fragments", "2 before, 4 then"]),
        ({"schedule": {"kind": "hierarchical", **SCHEDULES["hierarchical"]}}, {"schedule": {"rounds": 2}}, ["schedule.rounds"]),
        ({"schedule": {"kind": "gossip", "zone": "a"}}, {"schedule": {"min": 3}}, ["strategy.schedule", "leave them as they are"]),
        ({"schedule": {"kind": "rounds", "min": 3}}, {"schedule": {"quorum": 4}}, ["from round 5", "quorum is at most min"]),
        ({"schedule": {"kind": "buffered", "k": 2}}, {"codec": {"kind": "int8"}}, ["strategy.codec", "later round"]),
        ({"codec": {"kind": "int8"}}, {"codec": {"kind": "int4", "error_feedback": True}}, ["strategy.codec", "none before, error then"]),
        ({"reducer": {"kind": "krum", "faulty": 0}, "schedule": {"kind": "rounds", "min": 3}}, {"reducer": {"faulty": 1}}, ["control.override.0", "strategy.reducer"]),
    ],
    ids=["out of bounds", "another precision", "a reducer's option", "who is asked", "fragments", "groups in step", "gossip", "quorum", "late updates", "feedback", "too few updates"],
)  # fmt: skip
def test_a_later_stage_that_cannot_be_is_refused_before_the_run(
    strategy: dict[str, Any], override: dict[str, Any], words: list[str]
) -> None:
    Strategies(job(strategy))
    with pytest.raises(ConfigError) as caught:
        Strategies(job(strategy, override))
    for word in words:
        assert word in str(caught.value)
