"""Simulated round times are those of the same federation as processes."""

from __future__ import annotations

import pytest
from integration.federation import Federation
from integration.trial import trial_job
from samples.simulated import Points, points_job

import atoll
from atoll.simulations.clock import Speeds

STEP_S = {"site-1": 0.2, "site-2": 0.4, "site-3": 1.0}
STEPS = 10


@pytest.mark.chaos  # goes by the wall clock, beside which other tests load the machine
def test_rounds_take_the_simulated_time_in_processes_whose_steps_sleep(trio: Federation) -> None:
    more = "[evaluation]\nsites = false\n"
    work = {"steps": STEPS, "batch_size": 8}
    simulated = atoll.simulate(
        points_job(min_sites=3, work=work), app=Points, sites=3, source={}, speeds=Speeds(by_site=STEP_S)
    )
    assert [entry.waited.slowest for entry in simulated.rounds] == ["site-3"] * 2
    try:
        for site, seconds in STEP_S.items():
            trio.fault(site).write_text(f"slow {seconds}")
        state = trio.finish(trial_job(work=f"steps = {STEPS}, batch_size = 8", more=more))
    finally:
        for site in STEP_S:
            trio.fault(site).unlink(missing_ok=True)
    expected = [simulated.rounds[0].simulated_s, simulated.rounds[1].simulated_s - simulated.rounds[0].simulated_s]
    assert [entry["seconds"] for entry in state["rounds"]] == pytest.approx(expected, rel=0.2)
