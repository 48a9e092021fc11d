"""kill -9 of the server and of an agent at each named step: the run ends with the bytes of the undisturbed one."""

from __future__ import annotations

import signal

import pytest
from chaos.conftest import JOB, require_undisturbed
from chaos.doomed import start_doomed
from integration.federation import Federation

from atoll.client.steps import Step as SiteStep
from atoll.server.steps import Step as ServerStep

# In the order of a run; the number says which occurrence kills. The first three hit the submission itself.
SERVER_STEPS = [
    (ServerStep.SUBMITTED, 1),
    (ServerStep.STORED, 1),
    (ServerStep.QUEUED, 1),
    (ServerStep.OFFERED, 2),
    (ServerStep.JOURNALLED, 1),
    (ServerStep.JOURNALLED, 3),
    (ServerStep.DISPATCHED, 2),
    (ServerStep.GRANTED, 1),
    (ServerStep.GRANTED, 4),
    (ServerStep.RECEIVING, 2),
    (ServerStep.RECEIVED, 1),
    (ServerStep.CHECKED, 2),
    (ServerStep.FOLDED, 2),
    (ServerStep.CLOSING, 1),
    (ServerStep.MADE, 1),
    (ServerStep.MADE, 2),
    (ServerStep.COMMITTED, 1),
    (ServerStep.ANNOUNCED, 1),
    (ServerStep.EVALUATED, 1),
    (ServerStep.EVALUATED, 5),
    (ServerStep.ENDED, 1),
]
SHORT = {ServerStep.RECEIVED, ServerStep.MADE, SiteStep.KEPT}


def _marked(steps: list[tuple[ServerStep | SiteStep, int]]) -> list[object]:
    """Every step; those beyond the short version are marked, and run by scripts/chaos."""
    return [
        pytest.param(step, nth, id=f"{step}-{nth}", marks=() if step in SHORT and nth == 1 else pytest.mark.chaos)
        for step, nth in steps
    ]


@pytest.mark.parametrize(("step", "nth"), _marked([*SERVER_STEPS]))
def test_the_server_killed_at_a_step(federation: Federation, undisturbed: str, step: ServerStep, nth: int) -> None:
    assert federation.server is not None
    federation.server.stop()
    doomed = start_doomed(federation, "server", federation.server_folder, step, nth)
    federation.server = doomed
    federation.wait_for_ports()
    submitting = federation.start_submitting(JOB)
    federation.wait_for(lambda: not doomed.running, f"the server dies at {step}")
    assert doomed.popen.returncode == -signal.SIGKILL
    federation.start_server()
    run = federation.submitted(submitting)
    require_undisturbed(federation, run, undisturbed)


@pytest.mark.parametrize(("step", "nth"), [(ServerStep.EVALUATED, 6), (ServerStep.ENDED, 1)])
def test_the_last_evaluation_outlives_a_kill_before_it_is_on_record(
    federation: Federation, step: ServerStep, nth: int
) -> None:
    """Three sites evaluate two versions: the sixth evaluation ends the run."""
    wanted = [record["evaluate"] for record in federation.finish(JOB)["rounds"]]
    assert federation.server is not None
    federation.server.stop()
    federation.server = doomed = start_doomed(federation, "server", federation.server_folder, step, nth)
    federation.wait_for_ports()
    run = federation.submit(JOB)
    federation.wait_for(lambda: not doomed.running, f"the server dies at {step}")
    federation.start_server()
    assert [record["evaluate"] for record in federation.wait_for_end(run)["rounds"]] == wanted


@pytest.mark.parametrize(("step", "nth"), _marked([(step, 1) for step in SiteStep]))
def test_an_agent_killed_at_a_step(federation: Federation, undisturbed: str, step: SiteStep, nth: int) -> None:
    federation.sites["site-2"].stop()
    doomed = start_doomed(federation, "site", federation.home("site-2"), step, nth)
    federation.sites["site-2"] = doomed
    run = federation.submit(JOB)
    federation.wait_for(lambda: not doomed.running, f"the agent dies at {step}")
    assert doomed.popen.returncode == -signal.SIGKILL
    federation.start_site("site-2")
    require_undisturbed(federation, run, undisturbed)
