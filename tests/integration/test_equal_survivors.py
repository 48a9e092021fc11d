"""Equal survivors give equal bytes: a model depends on whose updates are in it, and not on how the others failed."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from integration.federation import REPRODUCIBLE, Federation, trial_job

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
        pytest.param('kind = "fedadam"\ncodec = { kind = "int8" }', id="fedadam-int8"),
    ],
)
def test_equal_survivors_give_equal_bytes(federation: Federation, strategy: str) -> None:
    """The site raises in round 2, raises there again, and is killed there: each time it is back in round 3."""
    job = trial_job(
        rounds=3,
        strategy=strategy,
        schedule="min = 3, quorum = 2",
        work=f"steps = {STEPS}, batch_size = 32",
        more="[evaluation]\nsites = false",
    )
    whole = federation.finish(job)
    assert [record["sites"] for record in whole["rounds"]] == [3, 3, 3]
    runs = [raise_in_round_2(federation, job), raise_in_round_2(federation, job), die_in_round_2(federation, job)]
    hashes = {federation.model_hash(run) for run in runs}
    assert len(hashes) == 1
    assert hashes != {federation.model_hash(whole["run"])}


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
    federation.sites[FAILING].stop()
    arguments = [sys.executable, str(PROGRAM), "site", str(federation.home(FAILING)), Step.WORKED, "2"]
    doomed = federation.sites[FAILING] = federation.start_program(FAILING, arguments)
    run = federation.submit(job)
    federation.wait_until(run, lambda state: state["version"] == 2)
    assert doomed.popen.poll() == -signal.SIGKILL
    federation.start_site(FAILING)
    require_missing(federation, run, "not heard for")
    return run


def require_missing(federation: Federation, run: str, why: str) -> None:
    """The run ends well, with the failing site in all rounds but the second."""
    state = federation.wait_for_end(run)
    assert state["status"] == "finished", federation.logs()
    assert [record["sites"] for record in state["rounds"]] == [3, 2, 3]
    assert list(state["rounds"][1]["missing"]) == [FAILING]
    assert why in state["rounds"][1]["missing"][FAILING]
