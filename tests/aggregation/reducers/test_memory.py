"""Memory of a round does not grow with sites: measured, for every reducer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from samples import reducer_memory

from atoll.aggregation import parts

NUM_SITES = 128
MOST_BYTES = 96 << 20  # docs/strategies.md: blocks of 8 MiB, a few at once; the updates together are 128 MiB
SHORT = {"mean", "krum"}  # one that needs a sum, one that needs all; the others are for scripts/chaos
OPTIONS = {
    "append": {"max_bytes": 2 << 20},
    "norm_bound": {"norm": 1.0},
    "krum": {"faulty": 1},
    "multi_krum": {"faulty": 1},
    "bulyan": {"faulty": 1},
    "centered_clipping": {"radius": 1.0},
    "bucketing": {"inner": {"kind": "median"}},
    "fltrust": {"trusted": "site-003"},
    "qfedavg": {"lr": 0.1},
}


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind in SHORT else pytest.mark.chaos) for kind in parts.BUILT_IN["reducer"]],
)
def test_memory_does_not_grow_with_sites(kind: str) -> None:
    assert NUM_SITES * 4 * reducer_memory.NUM_VALUES > MOST_BYTES
    done = subprocess.run(
        [sys.executable, reducer_memory.__file__, kind, json.dumps(OPTIONS.get(kind, {})), str(NUM_SITES)],
        env={
            **os.environ,
            "PYTHONPATH": str(Path(__file__).parents[3] / "src"),
            "MALLOC_ARENA_MAX": "1",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= MOST_BYTES
