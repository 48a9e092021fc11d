"""Secure aggregation in a tree of processes: each region holds the sessions of its sites and sends their sum up."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from integration.test_trees import Tree, start_sites
from integration.trial import trial_job

pytestmark = pytest.mark.chaos

REGIONS = {"north": ("site-1", "site-3", "site-5"), "south": ("site-2", "site-4", "site-6")}


PROGRAM = Path(__file__).parents[1] / "samples" / "killed_session.py"
DIRECT = ("site-7", "site-8", "site-9")


def job(*, masked: bool, members: int = 2) -> str:
    terms = "secure_aggregation = { fewest_survivors = 3, corrupt = 0.0, bound = 4.0, deadline = '20s' }"
    more = f"[privacy]\n{terms}\n" if masked else ""
    return trial_job(schedule=f"min = {members}", more=f"[evaluation]\nsites = false\n{more}")


@pytest.fixture
def tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tree]:
    tree = Tree(tmp_path_factory.mktemp("tree"))
    try:
        tree.make(REGIONS, settings="min_sites = 3")
        for name, sites in REGIONS.items():
            tree.start(name, *sites)
        yield tree
    finally:
        tree.close()


def wait_for_regions(tree: Tree) -> None:
    log = tree.top.root / "server.log"
    tree.top.wait_for(lambda: all(f"{name} attached" in log.read_text() for name in REGIONS), "both regions attach")


def require_plain(tree: Tree, masked: Mapping[str, Any], *, members: int = 2) -> None:
    """The model of a masked run is that of a plain one of the same sites."""
    plain = tree.top.finish(job(masked=False, members=members))
    assert [(one["sites"], one["weight"]) for one in masked["rounds"]] == [
        (one["sites"], one["weight"]) for one in plain["rounds"]
    ], tree.logs()
    found, wanted = tree.top.model(masked["run"]), tree.top.model(plain["run"])
    for name, values in found.items():
        assert np.abs(values - wanted[name]).max() <= 2 * 2 * 4.0 / ((2**31 - 1) // 3 - 1) + 1e-6, name


def test_the_sums_of_regions_make_the_model_of_plain_ones(tree: Tree) -> None:
    wait_for_regions(tree)
    require_plain(tree, tree.top.finish(job(masked=True)))
    log = tree.regions["north"].root / "server.log"
    assert "session 1 of round 1 opens over 3 sites; 3 shares rebuild a secret" in log.read_text()


def test_sites_beside_regions_have_a_session_with_the_upper_server(tree: Tree) -> None:
    start_sites(tree.top, *DIRECT)
    wait_for_regions(tree)
    members = len(REGIONS) + len(DIRECT)
    masked = tree.top.finish(job(masked=True, members=members))
    require_plain(tree, masked, members=members)
    assert [(one["secure"]["sites"], one["secure"]["dropped"]) for one in masked["rounds"]] == [(3, [])] * 2
    log = tree.top.root / "server.log"
    assert "session 1 of round 1 opens over 3 sites; 3 shares rebuild a secret" in log.read_text()


@pytest.mark.parametrize("phase", ["KEYS", "INPUTS", "CONFIRMING", "UNMASKING"])
def test_a_regions_server_killed_in_a_session(tree: Tree, phase: str) -> None:
    region = tree.regions["north"]
    wait_for_regions(tree)
    assert region.server is not None
    region.server.stop()
    folder = str(region.server_folder)
    region.server = doomed = region.start_program("doomed", [sys.executable, str(PROGRAM), "server", folder, phase])
    region.wait_for_ports()
    run = tree.top.submit(job(masked=True))
    tree.top.wait_for(lambda: not doomed.running, f"the region's server dies before it tells of {phase}")
    assert doomed.popen.returncode == -signal.SIGKILL
    region.start_server()
    masked = tree.top.wait_for_end(run)
    assert masked["status"] == "finished", f"{masked}\n{tree.logs()}"
    require_plain(tree, masked)
