"""Runs that share sites: as many side by side as a site has said, the others in line, and each as if it were alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from integration.federation import Federation
from integration.trial import REPRODUCIBLE, trial_job

ROOMY = ("site-1", "site-2")  # each works on two runs at once
NARROW = "site-3"  # on one
ONE = trial_job(rounds=3, sites=ROOMY, schedule="min = 2")
OTHER = trial_job(
    rounds=3, sites=ROOMY, schedule="min = 2", strategy='kind = "fedadam"\ncodec = { kind = "int8" }', seed=4
)
NARROW_JOB = trial_job(rounds=2, sites=[NARROW], schedule="min = 1")


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """A running server, two sites that take two runs at once and one that takes one."""
    federation = Federation(tmp_path_factory.mktemp("side-by-side"))
    try:
        federation.make()
        federation.start_server()
        federation.enrol_researcher()
        for name in (*ROOMY, NARROW):
            federation.enrol_site(name)
            federation.add_settings(federation.home(name) / "site.toml", REPRODUCIBLE)
        for name in ROOMY:
            path = federation.home(name) / "site.toml"
            path.write_text(path.read_text().replace("runs_at_once = 1", "runs_at_once = 2"))
        federation.sign()
        for name in (*ROOMY, NARROW):
            federation.start_site(name)
        yield federation
    finally:
        federation.close()


def test_two_runs_at_once_give_the_bytes_that_each_gives_alone(federation: Federation) -> None:
    """At each site two workers meet in the middle of a training: neither goes on before the other is there."""
    alone = [federation.model_hash(federation.finish(job)["run"]) for job in (ONE, OTHER)]
    assert alone[0] != alone[1]
    for name in ROOMY:
        meeting = federation.root / f"{name}.meeting"
        meeting.mkdir()
        federation.fault(name).write_text(f"meet {meeting} 2")
    try:
        runs = [federation.submit(job) for job in (ONE, OTHER)]
        states = [federation.wait_for_end(run) for run in runs]
    finally:
        for name in ROOMY:
            federation.fault(name).unlink()
    for state in states:
        assert state["status"] == "finished", federation.logs()
        assert [record["sites"] for record in state["rounds"]] == [2, 2, 2]
    assert [federation.model_hash(run) for run in runs] == alone


def test_a_run_waits_for_the_one_place_of_its_site(federation: Federation) -> None:
    """A third run, for other sites, overtakes it: the server has looked at all three, and kept the second in line."""
    gate = federation.root / "gate"
    federation.fault(NARROW).write_text(f"await {gate}")
    first = federation.submit(NARROW_JOB)
    federation.wait_until(first, lambda state: state["status"] == "running")
    second = federation.submit(NARROW_JOB)
    federation.finish(ONE)
    waiting = federation.status(second)
    assert (waiting["status"], waiting["sites"]) == ("queued", [])
    assert federation.status(first)["status"] == "running"
    gate.touch()
    states = [federation.wait_for_end(run) for run in (first, second)]
    assert [state["status"] for state in states] == ["finished", "finished"], federation.logs()
    assert federation.model_hash(first) == federation.model_hash(second)
