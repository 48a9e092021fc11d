"""Two nodes that Open MPI's mpirun really starts, on one machine: a run's rounds, and what becomes of a lost node."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from samples.bench import MakeBench

from atoll.cluster.parallel.section import world_of
from atoll.cluster.worker_process import WorkerDied, WorkerProcess

pytestmark = pytest.mark.chaos  # needs Debian's openmpi-bin
WORLD: dict[str, Any] = {
    "launcher": "mpirun",
    "nodes": 2,
    "processes_per_node": 2,
    "address": "127.0.0.1",
    "interface": "lo",
    "environment": {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1"},
    "mpirun": {"hosts": ["localhost", "localhost"]},
}
LAYOUT = {"dp_shard": 2, "pp": 2, "pipeline": {"microbatches": 2}, "timeouts": {"start": 120, "collective": 60}}


async def test_a_world_of_mpirun_trains_and_ends_with_a_lost_rank(
    make_bench: MakeBench, installed: Path, tmp_path: Path
) -> None:
    bench = make_bench(work={"epochs": 1, "batch_size": 8})
    path = os.pathsep.join([str(installed), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    worker = WorkerProcess(tmp_path / "worker", env={"PYTHONPATH": path})
    await worker.start()
    try:
        await worker.prepare(bench.prepare("north", parallel={"dp_shard": 4} | {"timeouts": LAYOUT["timeouts"]}))
        await worker.train(bench.train("local"))
        prepare = bench.prepare("north", parallel=LAYOUT, world=WORLD, device="cpu")
        assert world_of(prepare).num_processes == 4
        await worker.prepare(prepare)
        below = [process.cmdline() for process in psutil.Process(worker.pid).children(recursive=True)]
        assert sum("atoll.cluster.parallel.rank" in line for line in below) == 4
        assert any(line and line[0].endswith("mpirun") for line in below)
        await worker.train(bench.train("update"))
        assert len(bench.update("update")) == len(bench.update("local"))
        found, wanted = (np.frombuffer(bench.update(name)[64:], dtype="<f8") for name in ("update", "local"))
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-12)
        children = psutil.Process(worker.pid).children(recursive=True)
        last = [one for one in children if "atoll.cluster.parallel.rank" in one.cmdline()][-1]
        os.kill(last.pid, signal.SIGKILL)
        with pytest.raises(WorkerDied):
            await worker.train(bench.train("again", round=2))
        gone, alive = psutil.wait_procs(children, timeout=30)
        assert not alive, [one.cmdline() for one in alive]
        assert gone
    finally:
        await worker.close()
