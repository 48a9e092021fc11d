"""The short form, which `make test` runs, has a case of every kind of fault; `scripts/chaos` runs the rest."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent


def kinds(*options: str) -> set[str]:
    """The tests of this folder that pytest would run, each once, whatever its parameters."""
    arguments = [sys.executable, "-P", "-m", "pytest", "--collect-only", "--quiet", *options, str(FOLDER)]
    listed = subprocess.run(arguments, capture_output=True, text=True, cwd=FOLDER.parents[1], check=True).stdout
    return {line.rpartition("/")[2].partition("[")[0] for line in listed.splitlines() if "::" in line}


def test_every_kind_of_fault_has_a_short_case() -> None:
    every = kinds("-m", "not gpu")
    assert len(every) > 10
    assert every - kinds() == set()
