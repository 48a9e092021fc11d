"""A server whose state lies in PostgreSQL, made and run by the commands, killed and started again."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from integration.federation import Federation
from integration.trial import REPRODUCIBLE, trial_job
from samples.postgresql import postgresql

from atoll.server.steps import Step

SITES = ("site-1", "site-2", "site-3")
JOB = trial_job(rounds=3, strategy='kind = "fedadam"\ncodec = { kind = "int8" }')
PROGRAM = Path(__file__).parents[1] / "samples" / "killed_process.py"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with postgresql() as url:
        yield url


@pytest.fixture(scope="module")
def federation(url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """A running server on PostgreSQL with three running sites, which are patient: the server will be away."""
    federation = Federation(tmp_path_factory.mktemp("postgresql"), limits="heartbeat_s = 1\nlease_s = 120")
    try:
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("ATOLL_DATABASE", url)
            federation.make()
        federation.start_all(*SITES, settings=REPRODUCIBLE)
        yield federation
    finally:
        federation.close()


def test_a_server_on_postgresql_killed_in_and_between_rounds_goes_on_to_the_same_bytes(
    federation: Federation, url: str
) -> None:
    """Killed when an update of the first round has come, and again when a round is committed and nobody knows yet."""
    undisturbed = federation.model_hash(federation.finish(JOB)["run"])
    assert federation.server is not None
    federation.server.stop()
    start_doomed(federation, Step.RECEIVED, 2)
    run = federation.submit(JOB)
    expect_death(federation, Step.RECEIVED)
    start_doomed(federation, Step.COMMITTED, 1)
    expect_death(federation, Step.COMMITTED)
    federation.start_server()
    state = federation.wait_for_end(run)
    assert state["status"] == "finished", federation.logs()
    assert [record["sites"] for record in state["rounds"]] == [3, 3, 3]
    assert federation.model_hash(run) == undisturbed
    with psycopg.connect(url) as connection:
        found = connection.execute("SELECT count(*) FROM rounds WHERE run = %s", [run]).fetchone()
    assert found == (3,)
    assert not list(federation.server_folder.glob("*.sqlite"))


def start_doomed(federation: Federation, step: Step, nth: int) -> None:
    """A server that kills itself when the step comes for the nth time."""
    arguments = [sys.executable, str(PROGRAM), "server", str(federation.server_folder), step, str(nth)]
    federation.server = federation.start_program("server", arguments)
    federation.wait_for_ports()


def expect_death(federation: Federation, step: Step) -> None:
    server = federation.server
    assert server is not None
    federation.wait_for(lambda: not server.running, f"the server dies at {step}")
    assert server.popen.returncode == -signal.SIGKILL
