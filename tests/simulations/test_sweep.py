"""Sweeps: grids, runs in processes that are kept one by one, tables, the report, and going on after a kill."""

from __future__ import annotations

import csv
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyarrow import parquet
from samples.simulated import Points, points_job
from typer.testing import CliRunner

import atoll
from atoll.cli.app import app
from atoll.simulations.sweep import open_sweep, variants
from atoll.wire.errors import ConfigError

JOB = """
[job]
name = "digits"
app = "digits"
rounds = 2
[app]
hidden = 8
[strategy]
optimizer = { kind = "sgd", lr = 1.0 }
schedule = { kind = "rounds", min = 2 }
[training]
threads = 1
device = "cpu"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A job, and made-up digits."""
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {f"x_{split}": rng.random((40, 64), np.float32) for split in ("train", "test")}
    arrays |= {f"y_{split}": np.arange(40) % 10 for split in ("train", "test")}
    np.savez(tmp_path / "central.npz", allow_pickle=False, **arrays)
    (tmp_path / "job.toml").write_text(JOB)
    return tmp_path


def arguments(folder: Path, *grid: str, seeds: int = 1) -> list[str]:
    options = [word for one in grid for word in ("--grid", one)]
    own = [
        "sweep",
        str(folder / "job.toml"),
        *options,
        "--seeds",
        str(seeds),
        "--jobs",
        "2",
        "--out",
        str(folder / "out"),
    ]
    return [*own, "--", "--sites", "2", "--data", f"path={folder}/central.npz", "--home", str(folder)]


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_a_grid_is_every_combination_with_every_seed() -> None:
    runs = variants(["strategy.optimizer.lr=0.1,1", "--alpha=0.5,5", "app.name=a,b"], 2)
    assert len(runs) == 16
    assert runs[0].label == "strategy.optimizer.lr=0.1, alpha=0.5, app.name=a"
    assert runs[-1].arguments() == [
        "--set", "job.seed=2", "--set", "strategy.optimizer.lr=1", "--alpha", "5", "--set", "app.name=b",
    ]  # fmt: skip
    assert [run.label for run in variants([], 1)] == ["job"]
    for bad, words in {"lr": "wanted KEY=VALUE,VALUE", "lr=": "wanted KEY=VALUE,VALUE"}.items():
        with pytest.raises(ConfigError, match=words):
            variants([bad], 1)
    with pytest.raises(ConfigError, match="--grid names lr twice"):
        variants(["lr=1", "lr=2"], 1)
    with pytest.raises(ConfigError, match="are 20000 runs; wanted at most 10000"):
        variants(["lr=1,2"], 10_000)


def test_a_sweep_compares_keeps_what_is_done_and_does_what_is_missing(folder: Path) -> None:
    command = arguments(folder, "strategy.optimizer.lr=0.5,1")
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.stderr
    assert [line.split()[:3] for line in done.stdout.splitlines()[1:]] == [
        ["strategy.optimizer.lr=0.5", "1", "of"],
        ["strategy.optimizer.lr=1", "1", "of"],
    ]
    out = folder / "out"
    assert [row["strategy.optimizer.lr"] for row in rows(out / "runs.csv")] == ["0.5", "1"]
    assert [row["round"] for row in rows(out / "rounds.csv")] == ["1", "2"] * 2
    table = parquet.read_table(out / "rounds.parquet").to_pylist()
    assert [f"{row['evaluate.accuracy']}" for row in table] == [
        row["evaluate.accuracy"] for row in rows(out / "rounds.csv")
    ]
    page = (out / "report.html").read_text()
    assert page.count("<svg") == 1
    assert "strategy.optimizer.lr=0.5" in page
    assert "src=" not in page

    first = (out / "run-0001" / "rounds.jsonl").stat()
    model = (out / "run-0002" / "model.safetensors").read_bytes()
    shutil.rmtree(out / "run-0002")
    (out / "run-0002.partial-1").mkdir()  # as a kill leaves it
    again = CliRunner().invoke(app, command)
    assert again.exit_code == 0
    assert "1 of 2 runs are done already" in again.stderr
    assert (out / "run-0001" / "rounds.jsonl").stat().st_ino == first.st_ino
    assert (out / "run-0002" / "model.safetensors").read_bytes() == model
    assert not list(out.glob("*.partial-*"))
    with pytest.raises(ConfigError, match="has a sweep with other runs; take another --out"):
        open_sweep(out, folder / "job.toml", variants(["strategy.optimizer.lr=0.5"], 1), command[-6:])


def test_a_run_that_fails_is_told_of_and_tried_again_next_time(folder: Path) -> None:
    done = CliRunner().invoke(app, arguments(folder, "strategy.optimizer.momentun=0.5"))
    assert done.exit_code == 5
    assert "1 of 1 runs failed, the first with: atoll: " in done.stderr
    assert "momentun" in done.stderr
    assert [path.name for path in (folder / "out").iterdir()] == ["sweep.json"]


@pytest.mark.chaos
def test_a_sweep_that_is_killed_goes_on_with_the_same_bytes(folder: Path) -> None:
    command = [sys.executable, "-m", "atoll.cli", *arguments(folder, "strategy.optimizer.lr=0.5,1", seeds=2)]
    process = subprocess.Popen(command, cwd=folder, start_new_session=True)
    while not list((folder / "out").glob("run-000[0-9]/result.json")):
        assert process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert len(list((folder / "out").glob("run-000[0-9]"))) < 4
    subprocess.run(command, cwd=folder, check=True)
    models = [(folder / "out" / f"run-000{n}" / "model.safetensors").read_bytes() for n in range(1, 5)]
    shutil.rmtree(folder / "out")
    subprocess.run(command, cwd=folder, check=True)
    assert models == [(folder / "out" / f"run-000{n}" / "model.safetensors").read_bytes() for n in range(1, 5)]


def test_a_result_draws_itself() -> None:
    result = atoll.simulate(points_job(), app=Points, sites=6, source={})
    lines = [axes.lines[0] for axes in result.plot().axes]
    assert list(lines[0].get_ydata()) == list(result.metrics("accuracy").values())  # type: ignore[arg-type]
    assert len(lines) == 3  # rounds, bytes, sites; no simulated time has passed
    found = result.rounds[-1].spread["accuracy"]
    assert list(found) == sorted(found)
    assert found[0] <= result.metrics("accuracy")[2] <= found[-1]
    page = result._repr_html_()
    assert page.startswith("<b>points</b>: finished, 2 rounds of 6 sites, accuracy ")
    assert page.count("<svg") == 1
