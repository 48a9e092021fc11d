from __future__ import annotations

from typing import Any

import pytest
import torch

from atoll.aggregation import compositions, parts
from atoll.aggregation.catalogue import describe
from atoll.aggregation.codecs.encoding import feedback_of
from atoll.aggregation.rules.fedprox import FedProx
from atoll.aggregation.schedules.rounds import Rounds
from atoll.aggregation.strategy import Strategy, resolve
from atoll.wire.errors import ConfigError
from atoll.wire.job import Job, parse_job


def job(strategy: dict[str, Any] | None = None, **tables: Any) -> Job:
    table = {"job": {"name": "digits", "app": "digits", "rounds": 3}, "strategy": strategy or {}, **tables}
    return parse_job(table)


def kinds(strategy: Strategy) -> dict[str, str]:
    return {part: getattr(strategy, part).name for part in compositions.PARTS}


def test_fedavg_is_what_a_job_gets_that_says_nothing() -> None:
    strategy = resolve(job())
    assert (strategy.name, strategy.buffers, strategy.bound, strategy.work.num_epochs) == ("fedavg", "mean", 1024.0, 1)
    assert kinds(strategy) == {
        "schedule": "rounds",
        "rule": "none",
        "codec": "native",
        "reducer": "mean",
        "optimizer": "sgd",
        "personal": "none",
    }


@pytest.mark.parametrize(
    ("name", "different"),
    [
        ("fedprox", {"rule": "fedprox"}),
        ("fedadam", {"optimizer": "adam"}),
        ("fedavgm", {}),
        ("fedadagrad", {"optimizer": "adagrad"}),
    ],
)
def test_compositions_by_name(name: str, different: dict[str, str]) -> None:
    strategy = resolve(job({"kind": name}))
    assert kinds(strategy) == {**kinds(resolve(job())), **different}
    assert strategy.name == name


def test_each_part_can_be_replaced() -> None:
    strategy = resolve(
        job(
            {
                "kind": "fedprox",
                "schedule": {"kind": "rounds", "fraction": 0.5, "min": 8, "quorum": 6, "deadline": "10m"},
                "work": {"steps": 500},
                "rule": {"kind": "none"},
                "codec": {"kind": "int8"},
                "reducer": {"kind": "mean"},
                "optimizer": {"kind": "adamw", "lr": 0.1, "betas": [0.8, 0.9]},
                "buffers": "local",
                "sum": {"bound": 16.0},
            }
        )
    )
    assert kinds(strategy) == {
        "schedule": "rounds",
        "rule": "none",
        "codec": "int8",
        "reducer": "mean",
        "optimizer": "adamw",
        "personal": "none",
    }
    assert isinstance(strategy.schedule, Rounds)
    assert strategy.schedule.options.model_dump() == {
        "fraction": 0.5,
        "min": 8,
        "quorum": 6,
        "deadline": 600.0,
        "sample": "uniform",
        "where": {},
        "over": 1.0,
    }
    assert (strategy.work.steps, strategy.buffers, strategy.bound) == (500, "local", 16.0)


def test_the_same_kind_keeps_what_the_composition_says() -> None:
    strategy = resolve(job({"kind": "fedprox", "rule": {"kind": "fedprox", "mu": 0.5}}))
    assert isinstance(strategy.rule, FedProx)
    assert strategy.rule.mu == 0.5
    kept = resolve(job({"kind": "fedprox", "rule": {"kind": "fedprox"}}))
    assert isinstance(kept.rule, FedProx)
    assert kept.rule.mu == 0.01
    momentum = resolve(job({"kind": "fedavgm", "optimizer": {"kind": "sgd", "lr": 0.5}})).optimizer
    assert momentum.precision(wide=False) is torch.float32  # it keeps state: the momentum of 0.9 is still there


@pytest.mark.parametrize(
    ("strategy", "key", "value", "text"),
    [
        ({"kind": "fedavgg"}, "strategy.kind", "fedavgg", "did you mean 'fedavg'"),
        ({"kind": "zzz"}, "strategy.kind", "zzz", "known: .*fedadam"),
        ({"codec": {"kind": "int9"}}, "strategy.codec.kind", "int9", "did you mean 'int8'"),
        ({"reducer": {"kind": "medial"}}, "strategy.reducer.kind", "medial", "median"),
        ({"schedule": {"kind": "rouds"}}, "strategy.schedule.kind", "rouds", "did you mean 'rounds'"),
        ({"optimizer": {"kind": "novel"}}, "strategy.optimizer.kind", "novel", "known: .*adam"),
        ({"rule": {"kind": "unruly"}}, "strategy.rule.kind", "unruly", "known: .*fedprox, none"),
        ({"schedule": {"kind": "rounds", "fraction": 0}}, "strategy.schedule.fraction", "0", "wanted more than 0"),
        (
            {"schedule": {"kind": "rounds", "fraction": 1.5}},
            "strategy.schedule.fraction",
            "1.5",
            "wanted at most 1",
        ),
        ({"schedule": {"kind": "rounds", "min": 0}}, "strategy.schedule.min", "0", "wanted at least 1"),
        ({"schedule": {"kind": "rounds", "quorum": 0}}, "strategy.schedule.quorum", "0", "wanted at least 1"),
        ({"schedule": {"kind": "rounds", "deadline": "soon"}}, "strategy.schedule.deadline", "'soon'", "90s"),
        ({"schedule": {"kind": "rounds", "deadline": 0}}, "strategy.schedule.deadline", "0", "longer than nothing"),
        ({"schedule": {"kind": "rounds", "minimum": 3}}, "strategy.schedule.minimum", "3", "did you mean 'min'"),
        ({"codec": {"kind": "native", "bits": 4}}, "strategy.codec.bits", "4", "takes no options"),
        ({"codec": {"kind": "int8", "bits": 4}}, "strategy.codec.bits", "4", "takes difference, error_feedback"),
        ({"codec": {"kind": "top_k", "fraction": 0}}, "strategy.codec.fraction", "0", "wanted more than 0"),
        ({"codec": {"kind": "random_k", "fraction": 0.6}}, "strategy.codec.fraction", "0.6", "wanted at most 0.5"),
        ({"download": {"kind": "top_k"}}, "strategy.download", "top_k", "left out is no model"),
        ({"download": {"kind": "random_k"}}, "strategy.download", "random_k", "left out is no model"),
        ({"download": {"kind": "int8", "error_feedback": True}}, "strategy.download", "int8", "no error to carry over"),
        ({"rule": {"kind": "fedprox"}}, "strategy.rule.mu", "", "is missing"),
        ({"rule": {"kind": "fedprox", "mu": -1}}, "strategy.rule.mu", "-1", "wanted at least 0"),
        ({"rule": {"kind": "fedprox", "mu": "x"}}, "strategy.rule.mu", "'x'", "wanted a number"),
        ({"optimizer": {"kind": "sgd", "lr": 0}}, "strategy.optimizer.lr", "0", "wanted more than 0"),
        ({"optimizer": {"kind": "sgd", "momentum": 1.1}}, "strategy.optimizer.momentum", "1.1", "at most 1"),
        ({"optimizer": {"kind": "adam", "betas": [0.9]}}, "strategy.optimizer.betas.1", "", "is missing"),
        ({"optimizer": {"kind": "adam", "eps": 0}}, "strategy.optimizer.eps", "0", "wanted more than 0"),
        ({"sum": {"bound": 1e-31}}, "strategy.sum.bound", "1e-31", "1e-30 to 1e\\+30"),
    ],
)
def test_a_bad_setting_is_one_error_with_key_value_and_bound(
    strategy: dict[str, Any], key: str, value: str, text: str
) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        resolve(job(strategy))
    assert (caught.value.key, caught.value.value) == (key, value)
    assert caught.value.bound
    assert key in str(caught.value)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"kind": "rounds", "quorum": 3}, r"quorum is at most min \(2\)"),
        ({"kind": "sgd", "nesterov": True}, "nesterov needs momentum"),
        ({"kind": "sgd", "nesterov": True, "momentum": 1}, "nesterov needs momentum above 0 and below 1"),
        ({"kind": "adam", "betas": [0.9, 1.0]}, "betas are at least 0 and below 1"),
    ],
)
def test_settings_that_contradict_each_other(options: dict[str, Any], text: str) -> None:
    part = "schedule" if options["kind"] == "rounds" else "optimizer"
    with pytest.raises(ConfigError, match=text) as caught:
        resolve(job({part: options}))
    assert caught.value.key == f"strategy.{part}"


@pytest.mark.parametrize("kind", ["top_k", "random_k", "int8", "int4"])
def test_a_codec_takes_one_kind_of_feedback(kind: str) -> None:
    with pytest.raises(ConfigError, match="give error_feedback or difference, not both") as caught:
        parts.build("codec", kind, {"error_feedback": True, "difference": True})
    assert caught.value.key == "strategy.codec"
    sparse = kind in ("top_k", "random_k")
    assert feedback_of(parts.build("codec", kind, {})) == ("error" if sparse else "none")
    assert feedback_of(parts.build("codec", kind, {"error_feedback": not sparse})) == ("none" if sparse else "error")
    assert feedback_of(parts.build("codec", kind, {"difference": True})) == "difference"


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_number_that_is_not_finite(value: float) -> None:
    with pytest.raises(ConfigError, match=r"strategy\.optimizer\.lr = (inf|nan)"):
        parts.build("optimizer", "sgd", {"lr": value})


def test_several_faults_are_counted() -> None:
    with pytest.raises(ConfigError, match="and 1 more"):
        resolve(job({"schedule": {"kind": "rounds", "min": 0, "fraction": 2}}))


def test_every_built_in_says_what_it_is() -> None:
    found = describe()
    assert not [kind for kind in found if kind.failure]
    built_in = {(kind.part, kind.kind) for kind in found if kind.source == "built in"}
    assert built_in >= {(part, kind) for part, table in parts.BUILT_IN.items() for kind in table}
    assert built_in >= {("strategy", name) for name in compositions.BUILT_IN}
    assert all(kind.summary.endswith(".") for kind in found)
    rounds = next(kind for kind in found if kind.kind == "rounds")
    assert [(option.name, option.default, option.bound) for option in rounds.options][:3] == [
        ("fraction", "1.0", "> 0 <= 1"),
        ("min", "2", ">= 1 <= 1000000"),
        ("quorum", "None", ">= 1"),
    ]
    mu = next(kind for kind in found if (kind.part, kind.kind) == ("rule", "fedprox")).options[0]
    assert (mu.name, mu.type, mu.default) == ("mu", "number", "")
