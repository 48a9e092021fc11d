"""Gossip by real processes: against D-PSGD written by hand, who relays and who does not, and what a kill leaves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from integration.federation import Federation
from integration.gossip import d_psgd, gossip_job, mean_of, ring_weights, spread_of, start_reef


@pytest.fixture(scope="module")
def reef(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """Four sites that can all call each other."""
    federation = Federation(tmp_path_factory.mktemp("reef"))
    try:
        federation.make()
        start_reef(federation)
        yield federation
    finally:
        federation.close()


def test_a_ring_equals_d_psgd_written_by_hand_and_relays_nothing(reef: Federation) -> None:
    state = reef.finish(gossip_job(rounds=4, schedule="min = 4, every = 2"))
    assert [record["round"] for record in state["rounds"]] == [2, 4]
    first = reef.model_of_version(state["run"], 0)
    for version, record in enumerate(state["rounds"], start=1):
        models = d_psgd(reef, first, ring_weights(), record["round"])
        wanted, found = mean_of(models), reef.model_of_version(state["run"], version)
        for name, value in wanted.items():
            np.testing.assert_allclose(found[name], value, rtol=0, atol=2e-7)
        assert record["evaluate"]["consensus_distance"] == pytest.approx(spread_of(models), rel=1e-3)
        assert record["exchange"] == {"round": record["round"], "pairs": 4, "direct": 4, "relayed": []}
        assert record["sites"] == record["weight"] == 4
        assert "loss" in record["train"]
