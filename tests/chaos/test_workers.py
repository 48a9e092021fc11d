"""kill -9 of a worker in each phase, and of the agent above it: the same bytes, and no process is left behind."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from chaos.conftest import JOB, RELAYED
from integration.federation import Federation

SAMPLE = Path(__file__).parents[1] / "samples" / "doomed_worker"
PHASES = ["start", "prepare", "training", "writing", "evaluation"]
SHORT = {"writing"}


@pytest.mark.parametrize(
    "phase", [pytest.param(phase, marks=() if phase in SHORT else pytest.mark.chaos) for phase in PHASES]
)
def test_a_worker_killed_in_a_phase(federation: Federation, undisturbed: str, tmp_path: Path, phase: str) -> None:
    doom = shutil.copytree(SAMPLE, tmp_path / "doom")
    (doom / "fatal").write_text(phase)
    federation.sites["site-3"].stop()
    federation.start_site("site-3", PYTHONPATH=f"{doom}{os.pathsep}{federation.environment['PYTHONPATH']}")
    federation.fault("site-3").write_text("none")  # opened at each step of training, and else without effect
    try:
        state = federation.finish(JOB)
    finally:
        federation.fault("site-3").unlink()
    assert not (doom / "fatal").exists(), f"no worker has died in {phase}"
    assert [record["sites"] for record in state["rounds"]] == [3, 3]
    assert federation.model_hash(state["run"]) == undisturbed
    assert "signal 9" in federation.sites["site-3"].text()


def test_no_worker_outlives_its_agent_and_a_server_that_is_gone_is_waited_for(
    federation: Federation, undisturbed: str
) -> None:
    """The server goes in the middle of a training; the sites say so and stay; an agent that dies takes its worker along."""
    federation.fault(RELAYED).write_text("slow 0.3")
    run = federation.submit(JOB)
    worker = federation.wait_for_worker(RELAYED)
    assert federation.server is not None
    federation.server.kill()
    for site in ("site-1", "site-3"):
        log = federation.sites[site].log
        at = log.stat().st_size
        federation.wait_for(
            lambda log=log, at=at: log.read_text()[at:].count("trying again in") >= 2,  # type: ignore[misc]
            f"{site} tries again and again",
        )
        said = [line for line in log.read_text()[at:].splitlines() if "trying again in" in line]
        assert all("not connected to 127.0.0.1:" in line for line in said)
        assert any("nobody listens" in line for line in said), said
        waits_s = [float(line.rpartition(" in ")[2].removesuffix(" s")) for line in said]
        assert all(wait_s <= 15.0 for wait_s in waits_s), waits_s
    federation.sites[RELAYED].kill()
    federation.wait_for(lambda: not alive(worker), "the worker ends with its agent")
    federation.fault(RELAYED).unlink()
    federation.start_server()
    federation.start_site(RELAYED)
    state = federation.wait_for_end(run)
    assert state["status"] == "finished", federation.logs()
    assert federation.model_hash(run) == undisturbed


def alive(pid: int) -> bool:
    """Whether a process is there and no zombie: it may be waiting for whoever adopted it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
