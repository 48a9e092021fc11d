"""A fifth of the sites send their updates the other way round, five times as long: the mean learns nothing, others do.

On real data, by `benchmarks/attacks.py`, whose table is in docs/strategies.md.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from atoll.aggregation import parts

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "attacks.py"


def loaded() -> Any:
    spec = importlib.util.spec_from_file_location("attacks", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ATTACKS = loaded()
ROBUST = [reducer for reducer in ATTACKS.REDUCERS if reducer != "mean"]


def accuracy(reducer: str, num_attackers: int = ATTACKS.NUM_ATTACKERS) -> float:
    found: float = ATTACKS.accuracy_under_attack(
        reducer, num_rounds=6, strength=5.0, num_attackers=num_attackers, seed=0
    )
    return found


def test_the_mean_fails() -> None:
    assert accuracy("mean", num_attackers=0) > 0.9
    assert accuracy("mean") < 0.25


@pytest.mark.parametrize("reducer", ROBUST)
def test_a_robust_reducer_keeps_its_accuracy(reducer: str) -> None:
    """Krum learns from one site a round, and a bound on lengths leaves each attacker its share: both are slower."""
    assert accuracy(reducer) > (0.75 if reducer in ("krum", "norm_bound") else 0.85)


def test_every_reducer_is_attacked_but_that_for_fairness_and_that_of_payloads() -> None:
    assert set(ATTACKS.REDUCERS) == set(parts.BUILT_IN["reducer"]) - {"qfedavg", "append"}
