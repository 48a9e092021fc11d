"""Versions of a run at the server, on real processes: which stay on its disk, and how it judges each on its own data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from integration.federation import Federation
from integration.trial import breast_cancer, trial_job
from numpy.typing import NDArray

KEPT = 2  # keep_versions
ONE_STEP = "steps = 1, full_batch = true"
JUDGED_NOWHERE = "[evaluation]\nsites = false\n"


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """One site, and a server that keeps two versions and has data of its own: what no site trains or tests on."""
    root = tmp_path_factory.mktemp("judge")
    federation = Federation(root, limits=f"heartbeat_s = 1\nlease_s = 10\nkeep_versions = {KEPT}")
    try:
        federation.make()
        x, y = own_data()
        np.savez(root / "server.npz", x_test=x, y_test=y)
        federation.add_settings(
            federation.server_folder / "server.toml",
            '[apps.trial]\ndistribution = "trial-apps"\nentry_point = "trial"\n'
            f'[data.trial]\npath = "{root / "server.npz"}"\n',
        )
        federation.start_all("site-1")
        yield federation
    finally:
        federation.close()


def test_the_newest_versions_and_the_first_stay(judge: Federation) -> None:
    rounds = 6
    run = judge.finish(trial_job(rounds=rounds, schedule="min = 1", work=ONE_STEP, more=JUDGED_NOWHERE))["run"]
    for version in (0, rounds - 1, rounds):
        assert fetch(judge, run, version) == ""
    for version in range(1, rounds - KEPT + 1):
        assert "only the newest are kept" in fetch(judge, run, version)
    first, last = judge.model_of_version(run, 0), judge.model(run)
    assert any(not np.array_equal(first[name], last[name]) for name in last)


def test_each_version_is_judged_on_the_servers_own_data(judge: Federation, tmp_path: Path) -> None:
    judge.fault("site-1").write_text(f"pace {tmp_path}")  # a step a round: the server never has two to judge
    job = trial_job(rounds=3, schedule="min = 1", work=ONE_STEP, more="[evaluation]\nsites = true\nserver = true\n")
    run = judge.submit(job)
    for number in (1, 2, 3):
        (tmp_path / str(number)).touch()
        state = judge.wait_until(run, lambda state, number=number: judged(state) == number)  # type: ignore[misc]
        at_server, at_sites = (state["rounds"][-1][where]["accuracy"] for where in ("server", "evaluate"))
        assert at_server == accuracy(judge.model_of_version(run, number), *own_data())
        assert at_server != at_sites
    assert judge.wait_for_end(run)["status"] == "finished"


def judged(state: Mapping[str, Any]) -> int:
    """Rounds that both the server and the site have judged."""
    return sum("accuracy" in record["server"] and "accuracy" in record["evaluate"] for record in state["rounds"])


def own_data() -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    x, y = breast_cancer()
    return x[1:450:3], y[1:450:3]


def accuracy(model: Mapping[str, NDArray[Any]], x: NDArray[np.float32], y: NDArray[np.int64]) -> float:
    layers = torch.nn.Sequential(torch.nn.Linear(30, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
    layers.load_state_dict({name: torch.from_numpy(array) for name, array in model.items()})
    with torch.no_grad():
        output: NDArray[np.float32] = layers(torch.from_numpy(x)).numpy()
    return float((output.argmax(axis=1) == y).mean())


def fetch(federation: Federation, run: str, version: int) -> str:
    """What `atoll model` says when it is refused; nothing where it wrote the file."""
    path = federation.root / f"{version}.safetensors"
    done = federation.atoll(
        "model", run, "--version", str(version), "--out", path, "--home", federation.researcher, check=False
    )
    assert (done.code == 0) == path.exists()
    return done.err if done.code else ""
