"""The built-in reducers, through the suite that a plugin's reducer goes through as well."""

from __future__ import annotations

import pytest
from contracts.reducer_cases import CASES

from atoll.aggregation.testing.reducer_contract import ReducerContract


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.kind)
class TestReducers(ReducerContract):
    pass


def test_the_suite_holds_a_reducer_of_each_need() -> None:
    assert {case.made().needs for case in CASES} == {"sum", "all"}
