"""The example plugin as its users have it: built, installed beside Atoll, and found by its entry points."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from samples.plugin import SOURCE, install_plugin

ROOT = Path(__file__).parents[2]
KINDS = {("schedule", "growing"), ("reducer", "median_length"), ("strategy", "careful")}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install_plugin(tmp_path_factory.mktemp("installed"))


def run(installed: Path, *arguments: str) -> str:
    """What Python prints that has the plugin installed, away from the repository."""
    path = f"{ROOT / 'src'}{os.pathsep}{installed}"
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        cwd=installed,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_part_takes_at_most_forty_lines() -> None:
    points = tomllib.loads((SOURCE / "pyproject.toml").read_text())["project"]["entry-points"]
    assert sorted(points) == ["atoll.reducers", "atoll.schedules", "atoll.strategies"]
    for point in points.values():
        for target in point.values():
            path = SOURCE / (target.partition(":")[0].replace(".", "/") + ".py")
            assert len(path.read_text().splitlines()) <= 40, path


def test_its_parts_are_listed_with_where_they_come_from(installed: Path) -> None:
    listed: list[dict[str, Any]] = json.loads(run(installed, "-m", "atoll.cli", "strategies", "--json"))
    brought = [kind for kind in listed if kind["source"] == "atoll-example-plugin 0.1.0"]
    assert {(kind["part"], kind["kind"]) for kind in brought} == KINDS
    assert all(kind["summary"].endswith(".") and not kind["failure"] for kind in brought)


def test_rounds_grow_and_the_longest_update_is_shortened(installed: Path) -> None:
    seen = json.loads(run(installed, str(Path(__file__).parent / "plugin_round.py")))
    assert [len(cohort) for cohort in seen["cohorts"]] == [2, 4, 4]
    assert set(seen["cohorts"][1]) == {"a", "b", "c", "d"}
    wanted = np.mean([[3, 4], [4, 3], [0, 5], [-3, 4]], axis=0)  # the last one is shortened from 5000 to the median, 5
    assert np.abs(np.array(seen["moves"][1]) - wanted).max() < 1e-6


def test_the_reducer_passes_the_contract_suite_from_outside(installed: Path) -> None:
    """As its author runs it: by what a wheel of Atoll brings. Two codecs of five, for time."""
    tests = str(SOURCE / "test_contract.py")
    chosen = "not (bfloat16 or float32 or int8)"
    printed = run(installed, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "-k", chosen, tests)
    assert " passed" in printed
    assert int(printed.rsplit(" passed", 1)[0].split()[-1]) >= 28
