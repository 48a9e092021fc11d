"""Secure aggregation in a tree of processes: each region holds the sessions of its sites and sends their sum up."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from integration.test_trees import Tree
from integration.trial import trial_job

pytestmark = pytest.mark.chaos

REGIONS = {"north": ("site-1", "site-3", "site-5"), "south": ("site-2", "site-4", "site-6")}


def job(*, masked: bool) -> str:
    terms = "secure_aggregation = { fewest_survivors = 3, corrupt = 0.0, bound = 4.0, deadline = '20s' }"
    more = f"[privacy]\n{terms}\n" if masked else ""
    return trial_job(schedule="min = 2", more=f"[evaluation]\nsites = false\n{more}")


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


def test_the_sums_of_regions_make_the_model_of_plain_ones(tree: Tree) -> None:
    log = tree.top.root / "server.log"
    tree.top.wait_for(lambda: all(f"{name} attached" in log.read_text() for name in REGIONS), "both regions attach")
    masked, plain = (tree.top.finish(job(masked=masked)) for masked in (True, False))
    assert [(one["sites"], one["weight"]) for one in masked["rounds"]] == [
        (one["sites"], one["weight"]) for one in plain["rounds"]
    ], tree.logs()
    found, wanted = tree.top.model(masked["run"]), tree.top.model(plain["run"])
    for name, values in found.items():
        assert np.abs(values - wanted[name]).max() <= 2 * 2 * 4.0 / ((2**31 - 1) // 3 - 1) + 1e-6, name
    log = tree.regions["north"].root / "server.log"
    assert "session 1 of round 1 opens over 3 sites; 3 shares rebuild a secret" in log.read_text()
