"""Servers and agents that are killed (SIGKILL) at a named step of a run."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from integration.federation import Federation, Process

from atoll.client.steps import Step as SiteStep
from atoll.server.steps import Step as ServerStep

PROGRAM = Path(__file__).parents[1] / "samples" / "killed_process.py"


def start_doomed(federation: Federation, kind: str, folder: Path, step: str, nth: int) -> Process:
    """A server or an agent that kills itself when the step comes for the nth time."""
    name = "server" if kind == "server" else folder.name
    return federation.start_program(name, [sys.executable, str(PROGRAM), kind, str(folder), step, str(nth)])


def doom_the_server(federation: Federation, step: str, nth: int) -> Process:
    """The server anew, to be killed at a step; returns when every site has come back to it."""
    assert federation.server is not None
    federation.server.stop()
    before = len(federation.server.text())
    federation.server = doomed = start_doomed(federation, "server", federation.server_folder, step, nth)
    federation.wait_for_ports()
    wait_for_sites(federation, before, *federation.sites)
    return doomed


def doom_a_site(federation: Federation, site: str, step: str, nth: int) -> Process:
    """An agent anew, to be killed at a step; returns when it has come back."""
    assert federation.server is not None
    federation.sites[site].stop()
    before = len(federation.server.text())
    federation.sites[site] = doomed = start_doomed(federation, "site", federation.home(site), step, nth)
    wait_for_sites(federation, before, site)
    return doomed


def wait_for_sites(federation: Federation, before: int, *sites: str) -> None:
    """Sites that the server's log names as attached beyond its first `before` characters.

    A run begins with whoever is there, where its schedule needs no more: with all of them, as in the undisturbed run.
    """
    server = federation.server
    assert server is not None
    federation.wait_for(lambda: all(f"{site} attached" in server.text()[before:] for site in sites), "all are attached")


def wait_for_death(federation: Federation, doomed: Process, step: str) -> None:
    federation.wait_for(lambda: not doomed.running, f"it dies at {step}")
    assert doomed.popen.returncode == -signal.SIGKILL


def run_with_a_kill(federation: Federation, job: str, site: str, step: ServerStep | SiteStep, nth: int) -> str:
    """The id of a run in which the server, or this site's agent, was killed at a step and started again."""
    at_site = isinstance(step, SiteStep)
    doomed = doom_a_site(federation, site, step, nth) if at_site else doom_the_server(federation, step, nth)
    run = federation.submit(job)
    wait_for_death(federation, doomed, step)
    if at_site:
        federation.start_site(site)
    else:
        federation.start_server()
    return run


def require_all(federation: Federation, run: str, sites: int) -> None:
    """The run ends well, with so many sites in every round."""
    state = federation.wait_for_end(run)
    assert state["status"] == "finished", federation.logs()
    assert {record["sites"] for record in state["rounds"]} == {sites}, state["rounds"]
