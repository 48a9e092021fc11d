"""`atoll demo`: one line for programs, a model and a plot for people, and no process left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from safetensors.numpy import load_file

PATIENCE_S = 280.0


def _demo(out: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "atoll.cli", "demo", "--out", str(out), *arguments]
    environment = os.environ | {"TMPDIR": str(out.parent)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _left(folder: Path) -> list[str]:
    """Command lines of processes that were started for `folder`."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or ())
        if str(folder) in line and process.pid != os.getpid():
            found.append(line)
    return found


def _temporary(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith("atoll-")]


@pytest.mark.chaos
def test_a_program_reads_one_line(tmp_path: Path) -> None:
    process = _demo(tmp_path / "out", "--json", "--rounds", "4")
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    assert len(out.splitlines()) == 1
    line = json.loads(out)
    assert list(line) == ["sites", "rounds", "test_accuracy", "central_test_accuracy", "seconds", "model"]
    assert (line["sites"], line["rounds"]) == (3, 4)
    assert 0.7 < line["test_accuracy"] <= 1  # of four rounds
    assert 0.85 < line["central_test_accuracy"] <= 1


def test_the_demo_trains_reports_and_cleans_up(tmp_path: Path) -> None:
    """In a pipe: the table of rounds, the chart, both accuracies, and paths of files that are there."""
    process = _demo(tmp_path / "out", "--rounds", "3")
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    lines = out.splitlines()
    head = next(number for number, line in enumerate(lines) if line.startswith("round "))
    assert re.fullmatch(r"round +sites +training loss +accuracy at sites +accuracy at server +seconds +up", lines[head])
    rows = [line.split() for line in lines[head + 1 : head + 4]]
    assert [row[:2] for row in rows] == [["1", "3"], ["2", "3"], ["3", "3"]]
    at_server = float(rows[-1][4])
    assert 0.7 < at_server <= 1
    assert f"test accuracy, 3 sites that keep their data   {at_server:.1%}" in lines
    assert any(re.fullmatch(r"the same model, all data in one place +\d+\.\d%", line) for line in lines)
    assert sum("┄ central" in line for line in lines) == 1
    paths = dict(line.split() for line in lines if line.startswith(("model ", "plot ")))
    assert set(paths) == {"model", "plot"}
    assert Path(paths["plot"]).stat().st_size > 0
    assert list(load_file(paths["model"]).values())[-1].shape[0] == 10  # classes
    assert _temporary(tmp_path) == []
    assert _left(tmp_path) == []


def test_ctrl_c_ends_every_process_of_the_demo(tmp_path: Path) -> None:
    process = _demo(tmp_path / "out", "--rounds", "1000")
    deadline_s = time.monotonic() + PATIENCE_S
    while not any("site run" in line for line in _left(tmp_path)):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert _left(tmp_path) == []
    assert _temporary(tmp_path) == []
