"""A run whose strategy a plugin brings, on real processes that find it by its entry points."""

from __future__ import annotations

import os
from pathlib import Path

from integration.federation import Federation
from samples.plugin import install_plugin

JOB = """
[job]
name = "plugin"
app = "trial"
data = "trial"
rounds = 3
seed = 3
wait_for_sites = "60s"

[strategy]
kind = "careful"
work = { epochs = 1, batch_size = 32 }
"""


def test_a_plugins_schedule_and_reducer_make_a_run(federation: Federation, tmp_path: Path) -> None:
    plugin = install_plugin(tmp_path / "plugin")
    federation.environment["PYTHONPATH"] += f"{os.pathsep}{plugin}"
    federation.start_all("site-1", "site-2", "site-3")
    run = federation.submit(JOB)
    state = federation.wait_for_end(run)
    assert (state["status"], state["version"]) == ("finished", 3), federation.logs()
    assert [record["sites"] for record in state["rounds"]] == [2, 3, 3]  # half of three, then all
    assert state["rounds"][-1]["evaluate"]["accuracy"] > 0.9
