"""`[control]` of a job: what is refused, and the job that each round has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from atoll.wire.errors import ConfigError
from atoll.wire.job import Job, begun_from, decode_job, load_job, parse_job

RUN = "01JDQ3T4V8Z6K1M2N3P4Q5R6S7"


def job(**tables: Any) -> Job:
    return parse_job({"job": {"name": "a", "app": "a", "rounds": 20}, **tables})


def test_a_job_by_round() -> None:
    whole = job(
        app={"lr": 0.1, "augment": {"flip": True, "crop": 2}},
        strategy={"work": {"epochs": 3, "batch_size": 8}, "rule": {"kind": "fedprox", "mu": 0.1}},
        control={
            "override": [
                {"from_round": 5, "app": {"lr": 0.01}, "strategy": {"work": {"steps": 7}}},
                {"from_round": 9, "app": {"augment": {"crop": 4}}, "strategy": {"rule": {"mu": 0.5}}},
            ]
        },
    )
    assert [whole.at(number).app["lr"] for number in (0, 1, 4, 5, 8, 9, 20)] == [0.1, 0.1, 0.1, 0.01, 0.01, 0.01, 0.01]
    assert (whole.at(5).strategy.work.num_epochs, whole.at(5).strategy.work.steps) == (None, 7)
    assert whole.at(5).strategy.work.batch_size == 8
    assert whole.at(9).app["augment"] == {"flip": True, "crop": 4}
    rule = whole.at(9).strategy.rule
    assert rule is not None
    assert rule.options == {"mu": 0.5}
    assert decode_job(whole.canonical()) == whole
    assert [stage.from_round for stage in whole.stages] == [1, 5, 9]


def test_every_value_by_round() -> None:
    """Options of a codec belong to its kind; all else is merged."""
    whole = job(
        strategy={"schedule": {"kind": "rounds", "min": 3}, "codec": {"kind": "top_k", "fraction": 0.1}, "sum": {"bound": 8.0}},
        evaluation={"every": 2, "server": True},
        control={
            "override": [
                {"from_round": 5, "strategy": {"schedule": {"quorum": 2}, "codec": {"fraction": 0.2}}},
                {"from_round": 9, "strategy": {"codec": {"kind": "int8"}, "download": {"kind": "bfloat16"}, "sum": {"bound": 4.0}}},
                {"from_round": 11, "evaluation": {"every": 5}},
            ]
        },
    )  # fmt: skip
    parts = [whole.at(number).strategy for number in (4, 5, 9)]
    assert [part.schedule and part.schedule.options for part in parts] == [{"min": 3}, *[{"min": 3, "quorum": 2}] * 2]
    assert [part.codec and (part.codec.kind, part.codec.options) for part in parts] == [
        ("top_k", {"fraction": 0.1}),
        ("top_k", {"fraction": 0.2}),
        ("int8", {}),
    ]
    assert [part.download and part.download.kind for part in parts] == [None, None, "bfloat16"]
    assert [part.sum.bound for part in parts] == [8.0, 8.0, 4.0]
    assert [(whole.at(n).evaluation.every, whole.at(n).evaluation.server) for n in (10, 11)] == [(2, True), (5, True)]


def test_a_job_without_control_travels_as_it_did() -> None:
    assert b"control" not in job().canonical()
    assert b"metrics" not in job().canonical()


@pytest.mark.parametrize(
    ("control", "words"),
    [
        ({"early_stop": {"patience": 3}}, ["early_stop", "needs control.best"]),
        ({"best": {"metric": "accuracy"}}, ["control.best.mode is missing"]),
        ({"best": {"metric": "accuracy", "mode": "up"}}, ["control.best.mode = 'up'", "'max' or 'min'"]),
        ({"best": {"metric": "a", "mode": "max"}, "early_stop": {"patience": 0}}, ["patience = 0", "at least 1"]),
        ({"best": {"metric": "a", "mode": "max", "at": "server"}}, ["evaluation.server = true"]),
        ({"override": [{"from_round": 1}]}, ["from_round = 1", "at least 2"]),
        ({"override": [{"from_round": 5}, {"from_round": 5}]}, ["must rise", "[5, 5]"]),
        ({"override": [{"from_round": 5, "strategy": {"schedule": {"kind": "buffered"}}}]}, ["strategy.schedule.kind cannot change", "strategy.work"]),
        ({"override": [{"from_round": 5, "strategy": {"local": ["a.*"]}}]}, ["strategy.local cannot change", "stays at a site"]),
        ({"override": [{"from_round": 5, "strategy": {"personal": {"kind": "ditto"}}}]}, ["strategy.personal cannot change"]),
        ({"override": [{"from_round": 5, "strategy": {"parameters": "all"}}]}, ["strategy.parameters cannot change"]),
        ({"override": [{"from_round": 5, "privacy": {}}]}, ["privacy cannot change", "agreed"]),
        ({"override": [{"from_round": 5, "parallel": {"dp_shard": 2}}]}, ["parallel cannot change", "set up once"]),
        ({"override": [{"from_round": 5, "job": {"seed": 5}}]}, ["job cannot change", "agreed"]),
        ({"override": [{"from_round": 5, "evaluation": {"server": True}}]}, ["evaluation.server cannot change", "evaluation.every"]),
        ({"override": [{"from_round": 5, "evaluation": {"every": 0}}]}, ["with control.override", "evaluation.every = 0", "at least 1"]),
        ({"override": [{"from_round": 5, "strategy": {"optimizer": {"kind": "adam"}}}]}, ["strategy.optimizer.kind cannot"]),
        ({"override": [{"from_round": 5, "ap": {"lr": 1}}]}, ["control.override.0.ap", "'app'"]),
        ({"override": [{"from_round": 5, "strategy": {"work": {"batch_size": 0}}}]}, ["with control.override", "strategy.work.batch_size = 0", "at least 1"]),
        ({"override": [{"from_round": 5, "strategy": {"wrok": {"steps": 5}}}]}, ["with control.override", "strategy.wrok", "'work'"]),
        ({"override": [{"from_round": 5, "strategy": {"rule": {"mu": 0.5}}}]}, ["with control.override", "strategy.rule.kind is missing"]),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_key_value_and_bound(control: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        job(control=control)
    for word in words:
        assert word in str(caught.value)


def test_an_error_in_an_override_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(
        '[job]\nname = "a"\napp = "a"\nrounds = 20\n\n[[control.override]]\nfrom_round = 5\nstrategy.local = ["a.*"]\n'
    )
    with pytest.raises(ConfigError, match=r"job\.toml, line [678]: .*strategy\.local cannot change"):
        load_job(path)


def test_the_path_of_the_first_model_stays_on_the_machine(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text('[job]\nname = "a"\napp = "a"\nrounds = 20\nstart = "model.safetensors"\n')
    read = load_job(path)
    assert read.job.start == str(tmp_path / "model.safetensors")
    assert b"model.safetensors" not in read.canonical()
    assert begun_from(read, start=tmp_path / "other").job.start == str(tmp_path / "other")


def test_a_run_begins_with_one_model() -> None:
    continued = begun_from(job(), continues=RUN)
    assert decode_job(continued.canonical()).job.continues == RUN
    with pytest.raises(ConfigError, match="begins with one model"):
        begun_from(continued, start=Path("model.safetensors"))
