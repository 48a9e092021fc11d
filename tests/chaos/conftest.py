"""One federation for all faults: three sites that are patient, since the server will be away, and a relay before one."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from chaos.relay import Relay
from integration.federation import Federation
from integration.trial import REPRODUCIBLE, trial_job

JOB = trial_job(rounds=2, strategy='kind = "fedadam"\ncodec = { kind = "int8" }')
SITES = ("site-1", "site-2", "site-3")
LABELS = {"site-1": "north", "site-2": "north", "site-3": "south"}  # region
RELAYED = "site-2"  # the one that reaches the server through the relay
PATIENT = "heartbeat_s = 1\nlease_s = 120"

PROGRAM = Path(__file__).parents[1] / "samples" / "altered_process.py"
Limits = Callable[[str], AbstractContextManager[None]]


def pytest_addoption(parser: pytest.Parser) -> None:
    """For scripts/chaos; see test_seeds.py."""
    parser.addoption("--seeds", type=int, help="so many random fault scripts, from seed 1 on")
    parser.addoption("--seed", type=int, help="the fault script of this seed alone")


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Federation, Relay]]:
    """A running server with three running sites; quorum is the whole cohort, and nobody's lease runs out."""
    federation = Federation(tmp_path_factory.mktemp("chaos"), limits=PATIENT)
    relay: Relay | None = None
    try:
        federation.make()
        federation.start_server()
        relay = Relay(federation.ports[0]).start()
        federation.enrol_researcher()
        for name in SITES:
            federation.enrol_site(name)
            federation.add_settings(federation.home(name) / "site.toml", REPRODUCIBLE)
            federation.label(name, LABELS[name])
        reach_by(federation.home(RELAYED) / "site.toml", relay.port)
        federation.sign()
        for name in SITES:
            federation.start_site(name)
        yield federation, relay
    finally:
        federation.close()
        if relay is not None:
            relay.close()


@pytest.fixture
def federation(made: tuple[Federation, Relay]) -> Federation:
    """The one that all tests share. A test leaves it with all its processes running."""
    return made[0]


@pytest.fixture
def relay(made: tuple[Federation, Relay]) -> Iterator[Relay]:
    """What stands between site-2 and the server."""
    yield made[1]
    made[1].mend()


@pytest.fixture(scope="session")
def undisturbed_hashes() -> dict[str, str]:
    return {}


@pytest.fixture
def undisturbed_of(federation: Federation, undisturbed_hashes: dict[str, str]) -> Callable[[str], str]:
    """Hash of the model that a job gives when nothing happens."""

    def of(job: str) -> str:
        if job not in undisturbed_hashes:
            undisturbed_hashes[job] = federation.model_hash(federation.finish(job)["run"])
        return undisturbed_hashes[job]

    return of


@pytest.fixture
def undisturbed(undisturbed_of: Callable[[str], str]) -> str:
    """Hash of the model that `JOB` gives when nothing happens."""
    return undisturbed_of(JOB)


@pytest.fixture
def limits(federation: Federation) -> Limits:
    """Other `[limits]` of the server while a block lasts."""

    @contextmanager
    def other(text: str) -> Iterator[None]:
        change_limits(federation, text)
        try:
            yield
        finally:
            change_limits(federation, PATIENT)

    return other


def change_limits(federation: Federation, text: str) -> None:
    """Start the server again with other `[limits]`."""
    assert federation.server is not None
    federation.server.stop()
    path = federation.server_folder / "server.toml"
    path.write_text(path.read_text().rpartition("\n[limits]\n")[0] + f"\n[limits]\n{text}\n")
    federation.start_server()


def reach_by(settings: Path, port: int, host: str = "127.0.0.1") -> None:
    """Have a site reach its server by another port."""
    lines = settings.read_text().splitlines()
    kept = [line for line in lines if not line.startswith("server = ")]
    kept.insert(kept.index("[site]") + 1, f'server = "{host}:{port}"')
    settings.write_text("\n".join(kept) + "\n")


def alter(federation: Federation, *names: str, **alterations: Any) -> None:
    """Start the server ("server") or sites anew in an altered world; see samples/altered_process.py."""
    for name in names:
        at_server = name == "server"
        process = federation.server if at_server else federation.sites[name]
        assert process is not None
        process.stop()
        kind, folder = ("server", federation.server_folder) if at_server else ("site", federation.home(name))
        arguments = [sys.executable, str(PROGRAM), kind, str(folder), json.dumps(alterations)]
        started = federation.start_program(name, arguments)
        if at_server:
            federation.server = started
            federation.wait_for_ports()
        else:
            federation.sites[name] = started


def restore(federation: Federation, *names: str) -> None:
    """Start the server ("server") or sites anew as they are."""
    for name in names:
        if name == "server":
            assert federation.server is not None
            federation.server.stop()
            federation.start_server()
        else:
            federation.sites[name].stop()
            federation.start_site(name)


def require_undisturbed(federation: Federation, run: str, undisturbed: str) -> None:
    """A run of JOB ends with every site in both rounds, and with the bytes of the run that nothing happened to."""
    state = federation.wait_for_end(run)
    assert state["status"] == "finished", federation.logs()
    assert [record["sites"] for record in state["rounds"]] == [3, 3]
    assert federation.model_hash(run) == undisturbed
