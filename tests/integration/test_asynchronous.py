"""Versions from the first k updates to come, on real processes: a slow site holds nobody up, and is heard."""

from __future__ import annotations

import pytest
from integration.federation import Federation

JOB = """
[job]
name = "buffered"
app = "trial"
data = "trial"
rounds = {rounds}
seed = 3
wait_for_sites = "60s"

[strategy]
kind = "fedbuff"
schedule = {{ kind = "buffered", k = 2, min = 3, deadline = "60s" }}
work = {{ steps = 2 }}
"""


def test_a_slow_site_holds_nobody_up_and_its_updates_count(federation: Federation) -> None:
    federation.start_all("site-1", "site-2", "site-3")
    federation.fault("site-3").write_text("slow 0.6")  # seconds a step: several rounds of the others
    run = federation.submit(JOB.format(rounds=8))
    seen = federation.wait_until(run, lambda state: state["round"] >= 3)
    assert seen["status"] == "running"
    federation.fault("site-3").unlink()
    state = federation.wait_for_end(run)
    assert (state["status"], state["version"]) == ("finished", 8)
    assert all(record["sites"] >= 2 for record in state["rounds"])
    first = state["rounds"][0]
    assert first["missing"] == {}  # what is out goes on in the next round
    assert state["rounds"][-1]["evaluate"]["accuracy"] > 0.9
    accepted = [line for line in federation.sites["site-3"].text().splitlines() if "joined" in line]
    assert len(accepted) == 1  # it took part all the time, and was never asked to begin anew


@pytest.mark.parametrize("stops", [(3,), pytest.param((3, 6), marks=pytest.mark.chaos)], ids=["once", "twice"])
def test_a_server_killed_in_the_middle_goes_on_with_buffer_and_versions(
    federation: Federation, stops: tuple[int, ...]
) -> None:
    federation.start_all("site-1", "site-2", "site-3")
    federation.fault("site-3").write_text("slow 0.5")
    run = federation.submit(JOB.format(rounds=10))
    for stop in stops:
        federation.wait_until(run, lambda state, stop=stop: state["round"] >= stop)  # type: ignore[misc]
        assert federation.server is not None
        federation.server.kill()
        federation.start_server()
    state = federation.wait_for_end(run)
    assert (state["status"], state["version"]) == ("finished", 10), federation.logs()
    assert [record["version"] for record in state["rounds"]] == list(range(1, 11))
    assert all(record["sites"] >= 2 for record in state["rounds"])
    assert state["rounds"][-1]["evaluate"]["accuracy"] > 0.9


@pytest.mark.chaos
def test_a_site_killed_with_a_stale_task_goes_on_with_it(federation: Federation) -> None:
    """Its update of an old round is kept, though rounds are committed meanwhile, and counts when it comes."""
    federation.start_all("site-1", "site-2", "site-3")
    federation.fault("site-3").write_text("slow 0.5")
    run = federation.submit(JOB.format(rounds=14))
    federation.wait_until(run, lambda state: state["round"] >= 3)
    federation.sites["site-3"].kill()
    federation.fault("site-3").unlink()
    federation.start_site("site-3")
    state = federation.wait_for_end(run)
    assert (state["status"], state["version"]) == ("finished", 14), federation.logs()
    assert all(record["missing"] == {} for record in state["rounds"][:-1])
