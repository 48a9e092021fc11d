"""Equal survivors give equal bytes: a model depends on whose updates are in it, and not on how the others failed."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from integration.federation import Federation, Process
from integration.trial import REPRODUCIBLE, trial_job

from atoll.client.steps import Step

SITES = ("site-1", "site-2", "site-3")
FAILING = "site-2"  # in round 2
STEPS = 3  # of a round
PROGRAM = Path(__file__).parents[1] / "samples" / "killed_process.py"


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """A running server, and three running sites with reproducible rounding."""
    federation = Federation(tmp_path_factory.mktemp("survivors"))
    try:
        federation.make()
        federation.start_all(*SITES, settings=REPRODUCIBLE)
        yield federation
    finally:
        federation.close()


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param('kind = "fedavg"', marks=pytest.mark.chaos, id="fedavg"),
        pytest.param('kind = "scaffold"', marks=pytest.mark.chaos, id="scaffold"),
        pytest.param('kind = "fedadam"\ncodec = { kind = "int8" }', id="fedadam-int8"),
    ],
)
def test_equal_survivors_give_equal_bytes(federation: Federation, strategy: str) -> None:
    """The site raises in round 2, and is killed there: each time it is back in round 3."""
    job = trial_job(
        rounds=3,
        strategy=strategy,
        schedule="min = 3, quorum = 2",
        work=f"steps = {STEPS}, batch_size = 32",
        more="[evaluation]\nsites = false",
    )
    whole = federation.finish(job)
    assert [record["sites"] for record in whole["rounds"]] == [3, 3, 3]
    runs = [raise_in_round_2(federation, job), die_in_round_2(federation, job)]
    hashes = {federation.model_hash(run) for run in runs}
    assert len(hashes) == 1
    assert hashes != {federation.model_hash(whole["run"])}


@pytest.mark.chaos
def test_what_a_site_keeps_for_its_rule_survives_kill_9_and_stays_there(federation: Federation) -> None:
    """In round 2 the site is killed after its control has moved on its disk and before its update is kept."""
    job = trial_job(
        rounds=3,
        strategy='kind = "scaffold"\npersonal = { kind = "ditto" }\ncodec = { kind = "int8" }',
        work=f"steps = {STEPS}, batch_size = 32",
        more="[evaluation]\nevery = 3",  # after the last round alone
    )
    whole = federation.finish(job)
    doomed = start_doomed(federation)
    run = federation.submit(job)
    federation.wait_for(lambda: not doomed.running, f"{FAILING} is killed in round 2")
    assert doomed.popen.poll() == -signal.SIGKILL
    (kept,) = federation.home(FAILING).glob(f"**/{run}/**/rule")
    rounds = sorted(path.name for path in kept.iterdir())  # that which round 2 began with, and what it would leave
    assert rounds == ["00000001.state.safetensors", "00000002.state.safetensors"]
    federation.start_site(FAILING)
    state = federation.wait_for_end(run)
    assert state["status"] == "finished", federation.logs()
    assert [record["sites"] for record in state["rounds"]] == [3, 3, 3]
    assert federation.model_hash(run) == federation.model_hash(whole["run"])
    assert federation.model(run).keys() == {"0.weight", "0.bias", "2.weight", "2.bias"}
    metrics = state["rounds"][-1]["evaluate"]
    assert metrics.keys() == {"accuracy", "loss", "personal_accuracy", "personal_loss"}
    assert metrics == whole["rounds"][-1]["evaluate"]
    assert "personal accuracy" in federation.atoll("status", run, "--home", federation.researcher).out


def raise_in_round_2(federation: Federation, job: str) -> str:
    federation.fault(FAILING).write_text(f"raise-at {STEPS + 1}")
    try:
        run = federation.submit(job)
        require_missing(federation, run, "this batch cannot be learnt")
    finally:
        federation.fault(FAILING).unlink()
    return run


def die_in_round_2(federation: Federation, job: str) -> str:
    """Killed when its second update is trained and not yet kept; started again when the others are in round 3."""
    doomed = start_doomed(federation)
    run = federation.submit(job)
    federation.wait_until(run, lambda state: state["version"] == 2)
    assert doomed.popen.poll() == -signal.SIGKILL
    federation.start_site(FAILING)
    require_missing(federation, run, "not heard for")
    return run


def start_doomed(federation: Federation) -> Process:
    """The failing site anew, to be killed when its second update is trained and not yet kept."""
    federation.sites[FAILING].stop()
    arguments = [sys.executable, str(PROGRAM), "site", str(federation.home(FAILING)), Step.WORKED, "2"]
    federation.sites[FAILING] = federation.start_program(FAILING, arguments)
    return federation.sites[FAILING]


def require_missing(federation: Federation, run: str, why: str) -> None:
    """The run ends well, with the failing site in all rounds but the second."""
    state = federation.wait_for_end(run)
    assert state["status"] == "finished", federation.logs()
    assert [record["sites"] for record in state["rounds"]] == [3, 2, 3]
    assert list(state["rounds"][1]["missing"]) == [FAILING]
    assert why in state["rounds"][1]["missing"][FAILING]
