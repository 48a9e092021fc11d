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

FEW, MANY = 32, 96  # from 32 on, a block of all updates has its full size
MOST_BYTES = 64 << 20  # docs/strategies.md: eight blocks of 8 MiB at once
UPDATE_BYTES = 4 * reducer_memory.NUM_VALUES
OPTIONS = {
    "norm_bound": {"norm": 1.0},
    "krum": {"faulty": 1},
    "multi_krum": {"faulty": 1},
    "bulyan": {"faulty": 1},
    "centered_clipping": {"radius": 1.0},
    "bucketing": {"inner": {"kind": "median"}},
    "fltrust": {"trusted": "site-003"},
    "qfedavg": {"lr": 0.1},
}


@pytest.fixture(scope="module")
def peaks() -> dict[str, tuple[int, int]]:
    cases = {kind: OPTIONS.get(kind, {}) for kind in parts.BUILT_IN["reducer"]}
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, reducer_memory.__file__, json.dumps(cases), str(FEW), str(MANY)],
        env={**os.environ, "PYTHONPATH": str(root / "src"), "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, tuple[int, int]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("kind", parts.BUILT_IN["reducer"])
def test_memory_does_not_grow_with_sites(peaks: dict[str, tuple[int, int]], kind: str) -> None:
    few, many = peaks[kind]
    assert many <= MOST_BYTES
    assert many - few < (MANY - FEW) * UPDATE_BYTES / 4  # updates that were kept would be all of it
