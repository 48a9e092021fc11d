from __future__ import annotations

import itertools
import math

from atoll.aggregation.metrics import combine_metrics


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
