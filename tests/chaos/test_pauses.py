"""SIGSTOP of the server and of an agent, for less and for more than a lease.

Scaled: leases of seconds. As it would be: a minute, with the leases that a server has when nobody changes them.
"""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass

import pytest
from chaos.conftest import JOB, PATIENT, Limits, require_undisturbed
from integration.federation import Federation, Process
from integration.trial import trial_job

SHORT_LEASE = "heartbeat_s = 1\nlease_s = 4"
AS_SHIPPED = "heartbeat_s = 15\nlease_s = 45"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    limits: str
    for_s: float


LONGER_THAN_THE_LEASE = [
    pytest.param(Pause(limits=SHORT_LEASE, for_s=6), id="scaled"),
    pytest.param(Pause(limits=AS_SHIPPED, for_s=60), id="a-minute", marks=pytest.mark.chaos),
]
SHORTER_THAN_THE_LEASE = [
    pytest.param(Pause(limits=PATIENT, for_s=2), id="scaled"),
    pytest.param(Pause(limits=PATIENT, for_s=60), id="a-minute", marks=pytest.mark.chaos),
]


@pytest.mark.parametrize("pause", LONGER_THAN_THE_LEASE)
def test_a_server_that_is_stopped_drops_nobody(
    federation: Federation, undisturbed: str, limits: Limits, pause: Pause
) -> None:
    """While it does not listen nobody's lease runs: it would drop all its sites for its own silence."""
    with limits(pause.limits):
        run = begun(federation, JOB)
        assert federation.server is not None
        stop_for(federation.server, pause.for_s)
        federation.fault("site-3").unlink()
        require_undisturbed(federation, run, undisturbed)


@pytest.mark.parametrize("pause", SHORTER_THAN_THE_LEASE)
def test_an_agent_that_is_stopped_for_less_than_its_lease_is_waited_for(
    federation: Federation, undisturbed: str, limits: Limits, pause: Pause
) -> None:
    run = begun(federation, JOB)
    stop_for(federation.sites["site-3"], pause.for_s)
    federation.fault("site-3").unlink()
    require_undisturbed(federation, run, undisturbed)


@pytest.mark.parametrize("pause", LONGER_THAN_THE_LEASE)
def test_an_agent_that_is_stopped_for_more_than_its_lease_is_left_out_and_comes_back(
    federation: Federation, limits: Limits, pause: Pause
) -> None:
    with limits(pause.limits):
        run = begun(federation, trial_job(rounds=1, schedule="min = 3, quorum = 2, deadline = '300s'"))
        log = federation.sites["site-3"].log
        stop_for(federation.sites["site-3"], pause.for_s)
        at = log.stat().st_size
        federation.fault("site-3").unlink()
        state = federation.wait_for_end(run)
        assert state["status"] == "finished", federation.logs()
        [record] = state["rounds"]
        assert record["sites"] == 2
        assert "not heard for" in record["missing"]["site-3"]
        federation.wait_for(lambda: "attached to federation" in log.read_text()[at:], "the site comes back")


def begun(federation: Federation, job: str) -> str:
    """A run in which site-3 trains, slowly."""
    federation.fault("site-3").write_text("slow 3")  # seconds a step: it is seen, however busy the machine is
    run = federation.submit(job)
    federation.wait_until(
        run, lambda state: any(site["site"] == "site-3" and site["state"] == "training" for site in state["sites"])
    )
    return run


def stop_for(process: Process, seconds: float) -> None:
    process.popen.send_signal(signal.SIGSTOP)
    time.sleep(seconds)  # this is the fault itself
    process.popen.send_signal(signal.SIGCONT)
