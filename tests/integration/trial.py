"""The trial of the integration tests: its data, its apps as an installed distribution, and its jobs."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_breast_cancer

APPS = Path(__file__).parent / "apps"
REPRODUCIBLE = "[reproducible]\nseed = 7\n"  # of rounding, in site.toml


def breast_cancer() -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """569 examples of 30 standardised features, in a fixed shuffled order."""
    features, labels = load_breast_cancer(return_X_y=True)
    x: NDArray[np.float64] = np.asarray(features, dtype=np.float64)
    order = np.random.default_rng(0).permutation(len(x))
    x = (x - x.mean(axis=0)) / x.std(axis=0)
    return x[order].astype(np.float32), np.asarray(labels, dtype=np.int64)[order]


def write_share(path: Path, start: int) -> Path:
    """A site's share of the breast cancer data, in `path`: every third example of the first 450 from `start` on."""
    x, y = breast_cancer()
    mine = slice(start, 450, 3 + start)  # sites of different sizes
    np.savez(path, x_train=x[mine], y_train=y[mine], x_test=x[450:], y_test=y[450:])
    return path


def install_apps(folder: Path, extra: Mapping[str, str] | None = None) -> Path:
    """A folder for PYTHONPATH with the trial apps as an installed distribution, and atoll's own source.

    Args:
        extra: text appended to the module, by file name: another hash, another behaviour.
    """
    folder.mkdir(parents=True, exist_ok=True)
    record = []
    for source in APPS.glob("*.py"):
        text = source.read_text() + (extra or {}).get(source.name, "")
        (folder / source.name).write_text(text)
        record.append(f"{source.name},,{len(text)}")
    info = folder / "trial_apps-1.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: trial-apps\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[atoll.apps]\ntrial = trial_apps:Trial\nlarger = trial_apps:OneTensorMore\nnotes = trial_apps:Notes\n"
    )
    (info / "RECORD").write_text("\n".join([*record, "trial_apps-1.0.dist-info/RECORD,,"]) + "\n")
    source_root = Path(__file__).parents[2] / "src"
    return Path(f"{folder}{os.pathsep}{source_root}")


def trial_job(
    *,
    rounds: int = 2,
    app: str = "trial",
    values: str = "",
    strategy: str = 'kind = "fedavg"',
    schedule: str = "min = 3",
    work: str = "epochs = 1, batch_size = 32",
    more: str = "",
    wait: str = "60s",
    seed: int = 3,
    sites: Sequence[str] = (),
) -> str:
    """A job file of the trial app."""
    return f"""
[job]
name = "trial"
app = "{app}"
data = "trial"
rounds = {rounds}
seed = {seed}
sites = {json.dumps(sites)}
wait_for_sites = "{wait}"

[app]
{values}

[strategy]
{strategy}
schedule = {{ kind = "rounds", {schedule} }}
work = {{ {work} }}

{more}
"""
