from __future__ import annotations

import itertools
import math

import pytest

from atoll.aggregation import plugins
from atoll.aggregation.metrics import MetricRules, Pairs, combine_metrics, value_of
from atoll.aggregation.plugins import Plugin
from atoll.aggregation.strategy import require_regions_allowed
from atoll.wire.errors import ConfigError
from atoll.wire.job import parse_job


def test_sums_do_not_depend_on_the_order_of_sites() -> None:
    by_site = {
        "a": {"loss": (0.1, 3.0), "accuracy": (2.0, 3.0)},
        "b": {"loss": (1e16, 1.0)},
        "c": {"loss": (0.3, 7.0)},
        "d": {"loss": (-1e16, 2.0), "accuracy": (1.0, 2.0)},
    }
    wanted = {"accuracy": (3.0, 5.0), "loss": (0.4, 13.0)}  # adding floats one by one loses the small ones
    for order in itertools.permutations(by_site):
        combined = combine_metrics({site: by_site[site] for site in order})
        assert combined == wanted
        assert list(combined) == ["accuracy", "loss"]


def test_nobody_and_nothing() -> None:
    assert combine_metrics({}) == {}
    assert combine_metrics({"a": {}}) == {}


def test_a_sum_beyond_float64_is_infinite_and_no_crash() -> None:
    assert combine_metrics({site: {"loss": (1.7e308, 1.0)} for site in "abc"}) == {"loss": (math.inf, 3.0)}
    huge = {"a": {"loss": (1.7e308, 1.0)}, "b": {"loss": (1.7e308, 1.0)}, "c": {"loss": (-1.7e308, 1.0)}}
    assert combine_metrics(huge) == {"loss": (1.7e308, 3.0)}


BY_SITE = {
    "a": {"accuracy": (90.0, 100.0)},
    "b": {"accuracy": (2.0, 10.0)},
    "c": {"accuracy": (0.0, 0.0), "f1": (1.0, 2.0)},
}


def _rules(**metrics: dict[str, str]) -> MetricRules:
    table = {"job": {"name": "a", "app": "a", "rounds": 1}, "evaluation": {"metrics": metrics}}
    return MetricRules(parse_job(table))


@pytest.mark.parametrize(
    ("by", "value"), [("mean", 92 / 110), ("sum", 92.0), ("min", 0.2), ("max", 0.9), ("site_mean", 0.55)]
)
def test_a_metric_of_a_metric(by: str, value: float) -> None:
    combined = _rules(other={"of": "accuracy", "by": by}).combine(BY_SITE)
    assert value_of(combined, "other") == pytest.approx(value)
    assert combined["accuracy"] == (92.0, 110.0), "the plain ones stay"


def test_a_metric_may_take_the_place_of_another() -> None:
    assert _rules(accuracy={"of": "accuracy", "by": "min"}).combine(BY_SITE)["accuracy"] == (0.2, 1.0)


def test_a_metric_that_nobody_reports_is_left_out() -> None:
    assert "other" not in _rules(other={"of": "auc", "by": "min"}).combine(BY_SITE)


def test_a_plugin_computes_and_one_that_raises_has_no_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def spread(pairs: Pairs) -> float:
        means = [total / count for total, count in pairs.values()]
        return max(means) - min(means)

    def broken(pairs: Pairs) -> float:
        raise RuntimeError("no")

    found = {"spread": spread, "broken": broken}
    monkeypatch.setattr(plugins, "find", lambda part, kind, key: Plugin(kind=kind, source="x 1.0", value=found[kind]))
    combined = _rules(one={"of": "accuracy", "by": "spread"}, two={"of": "accuracy", "by": "broken"}).combine(BY_SITE)
    assert value_of(combined, "one") == pytest.approx(0.7)
    assert "two" not in combined


def test_an_aggregation_that_nothing_brings_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"evaluation.metrics.worst.by = 'mni' is not known; did you mean 'min'"):
        _rules(worst={"of": "accuracy", "by": "mni"})


def test_what_a_regions_sums_do_not_say_is_refused_where_there_are_regions() -> None:
    table = {
        "job": {"name": "a", "app": "a", "rounds": 1},
        "evaluation": {"metrics": {"worst": {"of": "f1", "by": "min"}}},
    }
    job = parse_job(table)
    require_regions_allowed(job, [])
    with pytest.raises(ConfigError, match=r"evaluation\.metrics\.worst\.by = 'min': a region reports sums"):
        require_regions_allowed(job, ["north"])
