"""A federation whose sites have one process, a sharded pair, and a replicated pair: one model, whatever they are."""

from __future__ import annotations

import os
import signal

import numpy as np
import psutil
import pytest
from integration.federation import Federation
from integration.trial import REPRODUCIBLE, trial_job

pytestmark = pytest.mark.chaos
JOB = trial_job(rounds=2, values='dtype = "float64"')
PARALLEL = {"site-2": "[parallel]\ndp_shard = 2\n", "site-3": "[parallel]\ndp_replicate = 2\n"}
SITES = ("site-1", "site-2", "site-3")


def test_sites_of_all_kinds_make_the_model_of_plain_ones_and_a_rank_may_die(federation: Federation) -> None:
    federation.start_all(*SITES, settings=REPRODUCIBLE)
    plain = federation.model(federation.finish(JOB)["run"])
    for name, settings in PARALLEL.items():
        federation.sites[name].stop()
        federation.add_settings(federation.home(name) / "site.toml", settings)
        federation.start_site(name)
    state = federation.finish(JOB)
    assert [record["sites"] for record in state["rounds"]] == [3, 3]
    mixed = federation.model(state["run"])
    assert mixed.keys() == plain.keys()
    for name, array in plain.items():
        np.testing.assert_allclose(mixed[name], array, rtol=0, atol=1e-11)

    federation.fault("site-3").write_text("slow 0.2")
    run = federation.submit(JOB)
    federation.wait_for(lambda: len(ranks(federation, "site-3")) == 2, "site-3 has its ranks")
    federation.wait_until(run, lambda state: state["status"] == "running")
    at = federation.sites["site-3"].log.stat().st_size
    os.kill(ranks(federation, "site-3")[1], signal.SIGKILL)
    federation.fault("site-3").unlink()
    state = federation.wait_for_end(run)
    assert state["status"] == "finished"
    assert [record["sites"] for record in state["rounds"]] == [3, 3]
    said = federation.sites["site-3"].log.read_text()[at:]
    assert "worker ended during" in said
    assert "trying again in" not in said  # the session with the server has held
    for name, array in federation.model(run).items():
        np.testing.assert_array_equal(array, mixed[name])


def ranks(federation: Federation, site: str) -> list[int]:
    """Process ids of a site's ranks."""
    below = psutil.Process(federation.sites[site].pid).children(recursive=True)
    return [one.pid for one in below if "atoll.cluster.parallel.rank" in one.cmdline()]
