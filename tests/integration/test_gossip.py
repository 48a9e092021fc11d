"""Gossip by real processes: against D-PSGD written by hand, who relays and who does not, and what a kill leaves."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from chaos.doomed import require_all, run_with_a_kill
from integration.federation import Federation
from integration.gossip import d_psgd, gossip_job, mean_of, spread_of, start_reef, weights_of
from numpy.typing import NDArray

from atoll.client.steps import Step as SiteStep
from atoll.server.steps import Step

CHAIN = [(2, 3), (1, 2), (1, 4)]
RING = [(1, 2), (2, 3), (3, 4), (1, 4)]


@pytest.fixture(scope="module")
def reef(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """Four sites, of which two listen: the other two reach those, and not each other."""
    federation = Federation(tmp_path_factory.mktemp("reef"))
    try:
        federation.make()
        start_reef(federation, listening=("site-1", "site-2"))
        yield federation
    finally:
        federation.close()


@pytest.fixture(scope="module")
def undisturbed(reef: Federation) -> dict[str, Any]:
    """A run in which nothing happens, with one pair that only the server can bring together."""
    return reef.finish(gossip_job(rounds=3, schedule="min = 4"))


def require_equal(federation: Federation, state: Mapping[str, Any], weights: NDArray[np.float64]) -> None:
    """Every version is the mean of the models that D-PSGD gives with these weights, and the record says how far apart."""
    first = federation.model_of_version(state["run"], 0)
    for version, record in enumerate(state["rounds"], start=1):
        models = d_psgd(federation, first, weights, record["round"])
        wanted, found = mean_of(models), federation.model_of_version(state["run"], version)
        for name, value in wanted.items():
            np.testing.assert_allclose(found[name], value, rtol=0, atol=3e-7)
        assert record["evaluate"]["consensus_distance"] == pytest.approx(spread_of(models), rel=1e-3)
        assert record["sites"] == record["weight"] == 4


@pytest.mark.chaos
def test_pairs_of_which_one_can_call_the_other_equal_d_psgd_and_nothing_is_relayed(reef: Federation) -> None:
    pairs = ", ".join(f'["site-{one}", "site-{two}"]' for one, two in CHAIN)
    state = reef.finish(gossip_job(rounds=4, schedule=f"min = 4, every = 2, graph = [{pairs}]"))
    require_equal(reef, state, weights_of(*CHAIN))
    assert [record["round"] for record in state["rounds"]] == [2, 4]
    for record in state["rounds"]:
        assert record["exchange"] == {"round": record["round"], "pairs": 3, "direct": 3, "relayed": []}
        assert "loss" in record["train"]
    assert not list((reef.server_folder / "relays").rglob("*.1"))


def test_a_pair_that_cannot_reach_each_other_is_relayed_and_no_other(
    reef: Federation, undisturbed: dict[str, Any]
) -> None:
    state = undisturbed
    require_equal(reef, state, weights_of(*RING))
    (record,) = state["rounds"]
    assert (record["exchange"]["pairs"], record["exchange"]["direct"]) == (4, 3)
    (relayed,) = record["exchange"]["relayed"]
    assert relayed.startswith("site-3, site-4 (site-3 to site-4: ")
    assert "site-4 does not listen" in relayed
    assert "site-4 to site-3: " in relayed
    shown = reef.atoll("status", state["run"], "--home", reef.researcher).out
    assert "exchange of round 3: 3 of 4 pairs directly" in shown
    assert "through the server: site-3, site-4" in shown


@pytest.mark.parametrize(
    ("step", "nth"),
    [
        pytest.param(Step.JOURNALLED, 7, marks=pytest.mark.chaos, id="training"),
        pytest.param(Step.JOURNALLED, 13, id="exchange"),
        pytest.param(Step.JOURNALLED, 30, marks=pytest.mark.chaos, id="a-later-round"),
        pytest.param(Step.RECEIVED, 2, marks=pytest.mark.chaos, id="relay"),
        pytest.param(Step.MADE, 1, marks=pytest.mark.chaos, id="version"),
        pytest.param(SiteStep.WORKED, 2, marks=pytest.mark.chaos, id="site"),
    ],
)
def test_a_kill_at_a_step_changes_no_byte(
    reef: Federation, undisturbed: dict[str, Any], step: Step | SiteStep, nth: int
) -> None:
    run = run_with_a_kill(reef, gossip_job(rounds=3, schedule="min = 4"), "site-2", step, nth)
    require_all(reef, run, 4)
    assert reef.model_hash(run) == reef.model_hash(undisturbed["run"])


@pytest.mark.chaos
def test_a_site_that_accepts_no_zone_declines(reef: Federation) -> None:
    policy = reef.home("site-4") / "policy.toml"
    text = policy.read_text()
    policy.write_text(text.replace('zones = ["reef"]', "zones = []"))
    try:
        state = reef.wait_for_end(reef.submit(gossip_job(rounds=1, schedule="min = 4").replace('"60s"', '"3s"')))
    finally:
        policy.write_text(text)
    assert state["status"] == "failed"
    assert "zone 'reef', which is not in zones" in state["reason"]["message"]


@pytest.mark.chaos
def test_a_server_and_an_agent_that_are_killed_go_on_to_the_same_bytes(federation: Federation) -> None:
    start_reef(federation)
    job = gossip_job(rounds=6, schedule="min = 4, every = 3, deadline = '120s'")
    undisturbed = federation.model_hash(federation.finish(job)["run"])
    for number in range(1, 5):
        federation.fault(f"site-{number}").write_text("slow 0.7")
    run = federation.submit(job)
    for round_, victim in enumerate(["server", "site-2", "server", "site-3"], start=2):
        federation.wait_until(run, lambda state, round_=round_: state["round"] >= round_)  # type: ignore[misc]
        time.sleep(0.1 * round_)  # into training, exchange or collection
        federation.kill_and_start(victim)
    state = federation.wait_for_end(run)
    assert state["status"] == "finished", federation.logs()
    assert [record["sites"] for record in state["rounds"]] == [4, 4]
    assert all(not record["exchange"]["relayed"] for record in state["rounds"])
    assert federation.model_hash(run) == undisturbed


@pytest.mark.chaos
def test_a_neighbour_that_dies_is_out_for_all_and_the_others_go_on(federation: Federation) -> None:
    start_reef(federation)
    for number in range(1, 5):
        federation.fault(f"site-{number}").write_text("slow 0.3")
    run = federation.submit(gossip_job(rounds=5, schedule="min = 3, every = 1, deadline = '60s'"))
    federation.wait_until(run, lambda state: state["version"] >= 1)
    federation.sites["site-4"].kill()
    state = federation.wait_for_end(run)
    assert state["status"] == "finished", federation.logs()
    assert [record["sites"] for record in state["rounds"]][-1] == 3
    assert state["rounds"][-1]["exchange"] == {"round": 5, "pairs": 3, "direct": 3, "relayed": []}
