"""`atoll site world`: what it prints is what would be run, and the processes do meet."""

from __future__ import annotations

import sys
from pathlib import Path
from unittest import mock

import pytest

from atoll.cli import main

SETTINGS = """
[site]
name = "north"
[devices]
device = "cpu"
[parallel]
dp_shard = 2
"""
WORLD = """
[world]
launcher = "slurm"
nodes = 2
processes_per_node = 1
address = "10.0.0.5"
port = 7001
"""


def run(tmp_path: Path, text: str, *words: str) -> int:
    (tmp_path / "site.toml").write_text(text)
    arguments = ["atoll", "site", "world", "--home", str(tmp_path), *words]
    with mock.patch.object(sys, "argv", arguments), pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_a_dry_run_prints_the_world(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, SETTINGS + WORLD, "--dry-run") == 0
    text = capsys.readouterr().out
    assert "sbatch --wait" in text
    assert "--meeting 10.0.0.5:7001:7002" in text
    assert "--nodes 2 --processes 1" in text


def test_another_launcher_must_fit_the_settings_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, SETTINGS + WORLD, "--dry-run", "--launcher", "jobset") != 0
    assert "needs the table kubernetes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (SETTINGS.replace("dp_shard = 2", "dp_shard = 4") + WORLD, "does not make 2 processes"),
        (SETTINGS.replace('"cpu"', '"auto"') + WORLD, "nodes of [world] are other machines"),
        (SETTINGS.replace("[parallel]\ndp_shard = 2\n", "") + WORLD, "world needs [parallel]"),
        (SETTINGS.replace("[parallel]\ndp_shard = 2\n", ""), "without [parallel]"),
    ],
)
def test_settings_that_do_not_fit_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, told: str
) -> None:
    assert run(tmp_path, text, "--dry-run") != 0
    assert told in " ".join(capsys.readouterr().err.split())


def test_the_processes_meet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, SETTINGS) == 0
    assert "2 processes on 1 nodes met after" in capsys.readouterr().out
