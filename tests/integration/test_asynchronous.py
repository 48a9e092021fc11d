"""Versions from the first k updates to come, on real processes: a slow site holds nobody up, and is heard."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

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
SITES: tuple[str, ...] = ("site-1", "site-2", "site-3")
# Who is let go in each round, one after the other: in 2, 3 and 4 one of the two is a version behind.
ORDER = (("site-1", "site-2"), ("site-3", "site-1"), ("site-2", "site-3"), ("site-1", "site-2"))


@pytest.mark.chaos
def test_a_slow_site_holds_nobody_up_and_its_updates_count(federation: Federation) -> None:
    federation.start_all(*SITES)
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


@pytest.mark.parametrize("victim", ["server", pytest.param("site-3", marks=pytest.mark.chaos)])
def test_a_kill_with_a_stale_update_in_the_buffer_or_on_its_way_changes_no_byte(
    federation: Federation, tmp_path: Path, victim: str
) -> None:
    """Sites train when they are told to, so that both runs have the same updates in each version."""
    federation.start_all(*SITES)

    when = "buffered" if victim == "server" else "training"
    wanted = in_order(federation, tmp_path / "undisturbed")
    assert in_order(federation, tmp_path / "disturbed", **{when: lambda: federation.kill_and_start(victim)}) == wanted


@pytest.mark.chaos
def test_with_one_site_ten_times_slower_half_of_the_time_suffices() -> None:
    """To an accuracy of 0.9 on digits, as processes: what benchmarks/asynchronous.py measures, and docs/strategies.md says."""
    script = Path(__file__).parents[2] / "benchmarks" / "asynchronous.py"
    done = subprocess.run(
        [sys.executable, script, "--json"],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["slowdown"] == 10
    assert record["fedbuff_s"] <= record["fedavg_s"] / 2


def in_order(
    federation: Federation,
    paces: Path,
    *,
    training: Callable[[], None] = lambda: None,
    buffered: Callable[[], None] = lambda: None,
) -> str:
    """Hash of the model of a run whose updates come by `ORDER`.

    Args:
        training: done while site-3 trains from version 0, and version 1 is there.
        buffered: done once that update waits in the buffer of round 2.
    """
    released: dict[str, int] = dict.fromkeys(SITES, 0)

    def release(site: str, updates: int = 1) -> None:
        for _ in range(2 * updates):  # steps
            released[site] += 1
            (paces / site / str(released[site])).touch()

    for site in SITES:
        (paces / site).mkdir(parents=True)
        federation.fault(site).write_text(f"pace {paces / site}")
    run = federation.submit(JOB.format(rounds=len(ORDER)) + "[evaluation]\nsites = false\n")
    for version, (first, second) in enumerate(ORDER):
        federation.wait_until(run, lambda state, version=version: state["version"] == version)  # type: ignore[misc]
        if version == 1:
            training()
        release(first)
        if version == 1:
            federation.wait_until(run, lambda state: "accepted" in [s["state"] for s in state["sites"][2:]])
            buffered()
        release(second)
    state = federation.wait_for_end(run)
    for site in SITES:  # a task that was taken back ends
        release(site, 2)
    assert state["status"] == "finished", federation.logs()
    assert [record["sites"] for record in state["rounds"]] == [2, 2, 2, 2]
    return federation.model_hash(run)
