"""The example plugin, installed as its README says, into a folder for PYTHONPATH."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "examples" / "plugin"


def install_plugin(folder: Path) -> Path:
    """Builds the wheel with what is installed here, without a network."""
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(folder), str(SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return folder
