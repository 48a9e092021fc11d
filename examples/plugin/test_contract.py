"""The reducer, through what every reducer has to hold: `pytest test_contract.py`, with the plugin installed."""

import pytest

from atoll.aggregation.testing.reducer_contract import ReducerCase, ReducerContract


@pytest.mark.parametrize("case", [ReducerCase(kind="median_length")])
class TestMedianLength(ReducerContract):
    pass
