"""Layouts over the GPUs of a machine: as on gloo, but with NCCL; each with as many processes as there are devices."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from samples.bench import MakeBench
from samples.parallel_sessions import ignore

from atoll.cluster.open_session import open_session
from atoll.cluster.worker_process import WorkerProcess

pytestmark = pytest.mark.gpu
HEADER = 64


@pytest.mark.parametrize(
    "section",
    [
        {"dp_replicate": -1},
        {"dp_replicate": -1, "precision": {"reduce": "bf16"}},
        {"dp_shard": -1, "zero": 2},
        {"dp_shard": -1},
        {"dp_shard": -1, "accumulate": 2, "clip_norm": 1e6, "activation_checkpoint": "full"},
    ],
    ids=str,
)
async def test_an_update_of_all_devices_is_that_of_one_process(
    make_bench: MakeBench, installed: Path, tmp_path: Path, section: dict[str, Any]
) -> None:
    bench = make_bench(work={"epochs": 1, "batch_size": 7}, app={"dtype": "float32"})
    section = {**section, "processes": torch.cuda.device_count()}
    open_session(bench.prepare("north")).train(bench.train("alone"), ignore)
    path = os.pathsep.join([str(installed), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    worker = WorkerProcess(tmp_path / "worker", env={"PYTHONPATH": path})
    await worker.start()
    try:
        prepared = await worker.prepare(bench.prepare("north", device="cuda", parallel=section))
        assert prepared.device == "cuda:0"
        await worker.train(bench.train("together"))
    finally:
        await worker.close()
    found, wanted = (np.frombuffer(bench.update(name)[HEADER:], dtype="<f4") for name in ("together", "alone"))
    narrow = "precision" in section
    np.testing.assert_allclose(found, wanted, rtol=1e-2 if narrow else 1e-4, atol=1e-2 if narrow else 1e-5)
