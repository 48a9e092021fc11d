"""Boosted trees of five hospitals, appended round by round, are about as good as trees grown in one place."""

from __future__ import annotations

import subprocess
import sys
from importlib import resources
from pathlib import Path

from atoll.aggregation.strategy import resolve
from atoll.cluster.app import build_app
from atoll.cluster.opaque_app import OpaqueApp
from atoll.cluster.registry import AppEntry, hash_distribution, load_opaque_app
from atoll.cluster.seeds import training_seed
from atoll.wire.job import Job, load_job


def app_of(job: Job, path: Path, **values: float) -> OpaqueApp:
    entry = AppEntry(name="trees", distribution="atoll-examples", entry_point="trees")
    kind = load_opaque_app(entry, hash_distribution("atoll-examples"))
    return build_app(kind, {**job.app, **values}, {"path": str(path)})


def accuracy(app: OpaqueApp, payloads: list[bytes]) -> float:
    total, count = app.evaluate(payloads)["accuracy"]
    return total / count


def test_trees_of_five_hospitals_are_as_good_as_trees_grown_in_one_place(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "atoll_examples.trees.prepare", "--out", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True)
    with resources.as_file(resources.files("atoll_examples.trees") / "job.toml") as path:
        job = load_job(path)
    assert resolve(job).reducer.mixed(5) == 1
    sites = {f"site-{number}": app_of(job, tmp_path / f"site-{number}.npz") for number in range(1, 6)}
    central = app_of(job, tmp_path / "central.npz", eta=5 * 0.06)
    forest: list[bytes] = []
    alone: list[bytes] = []
    for round_ in range(1, job.job.rounds + 1):
        forest += [app.train(forest, training_seed(0, site, round_)) for site, app in sites.items()]
        alone.append(central.train(alone, training_seed(0, "central", round_)))
    assert max(map(len, forest)) <= 65536
    server = app_of(job, tmp_path / "test.npz")
    assert accuracy(server, forest) >= 0.93
    assert accuracy(server, alone) - accuracy(server, forest) <= 0.03  # three of the 114 examples
