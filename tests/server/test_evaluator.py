"""Evaluation on the server's side with a real worker and an app that is really installed."""

from __future__ import annotations

import asyncio
import os
import struct
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from atoll.cluster.registry import hash_distribution
from atoll.cluster.worker_process import WorkerDied
from atoll.server.evaluator import Evaluator
from atoll.server.records import RunRow
from atoll.server.settings import ServerFolder, ServerSettings
from atoll.server.store import Store
from atoll.wire.errors import AppFailed, NotAllowed, Unknown
from atoll.wire.job import Job, parse_job
from atoll.wire.manifest import Manifest
from atoll.wire.model_file import create

APP = """
import os, time
import torch
from torch import nn
from torch.utils.data import TensorDataset
import atoll

class Judge(atoll.App):
    def model(self):
        return nn.Linear(1, 1, bias=False)
    def data(self, split):
        assert split == "test", "training data is not the server's business"
        assert self.source["size"] == 4
        x = torch.ones(4, 1)
        return TensorDataset(x, 3 * x)
    def loss(self, output, batch):
        match output[0].item():  # the model's only weight, so that a version can ask for a fault
            case -1:
                raise RuntimeError("the judge is ill")
            case -2:
                time.sleep(600)
            case -3:
                os._exit(7)
        return nn.functional.mse_loss(output, batch[1])
    def optimizer(self, params):
        return torch.optim.SGD(params, lr=0.1)
"""
RUN = "01RUN"
RAISE, SLEEP, DIE = -1.0, -2.0, -3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Court:
    folder: Path
    store: Store
    manifest: Manifest
    app_hash: str

    def settings(self, **changes: Any) -> ServerSettings:
        values = {
            "federation": "demo",
            "address": "a.example:1",
            "enrolment_address": "a.example:2",
            "apps": {"judge": {"distribution": "judge-apps", "entry_point": "judge"}},
            "data": {"judge": {"size": 4}},
        }
        return ServerSettings.model_validate(values | changes)

    def job(self, app: str) -> Job:
        return parse_job({"job": {"name": "t", "app": app, "rounds": 1}})

    def evaluator(self, **changes: Any) -> Evaluator:
        return Evaluator(settings=self.settings(**changes), folder=ServerFolder(root=self.folder), store=self.store)

    async def evaluate(
        self, evaluator: Evaluator, *, weight: float = 3.0, app: str = "judge"
    ) -> dict[str, tuple[float, float]]:
        path = self.folder / f"{weight}.safetensors"
        if not path.exists():
            with create(path, self.manifest, {}) as data:
                data[:] = struct.pack("<f", weight)
        return await evaluator.evaluate(RUN, self.job(app), self.manifest, 1, path)


@pytest.fixture
async def court(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Court]:
    installed = tmp_path / "installed"
    about = installed / "judge_apps-1.0.dist-info"
    about.mkdir(parents=True)
    (installed / "judge_app.py").write_text(APP)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: judge-apps\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[atoll.apps]\njudge = judge_app:Judge\n")
    (about / "RECORD").write_text("judge_app.py,,\n")
    monkeypatch.syspath_prepend(str(installed))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(installed), *(path for path in sys.path if path)]))
    manifest = Manifest.build([("weight", "float32", (1, 1), "parameter")])
    store = Store.open(f"sqlite:///{tmp_path / 'state.sqlite'}")
    court = Court(folder=tmp_path, store=store, manifest=manifest, app_hash=hash_distribution("judge-apps"))
    store.create_run(run_row(court.app_hash), manifest=manifest.encode(), request="r")
    yield court
    store.close()


def run_row(app_hash: str) -> RunRow:
    return RunRow(
        run=RUN,
        name="t",
        job=b"{}",
        app_hash=app_hash,
        submitted_by="ada",
        crc32=0,
        status="running",
        reason=None,
        submitted_at=datetime.now(UTC),
    )


async def test_a_run_of_versions_good_and_bad(court: Court) -> None:
    evaluator = court.evaluator(evaluation={"timeout_s": 5})
    assert (await court.evaluate(evaluator))["loss"] == (0.0, 4.0)
    assert (await court.evaluate(evaluator, weight=5.0))["loss"] == pytest.approx((16.0, 4.0))
    with pytest.raises(AppFailed, match="the judge is ill"):
        await court.evaluate(evaluator, weight=RAISE)
    assert (await court.evaluate(evaluator))["loss"] == (0.0, 4.0)
    with pytest.raises(WorkerDied, match=r"ended during evaluate \(exit code 7\)"):
        await court.evaluate(evaluator, weight=DIE)
    assert (await court.evaluate(evaluator))["loss"] == (0.0, 4.0)
    with pytest.raises(AppFailed, match=r"took longer than evaluation.timeout_s = 5 s of server.toml; raise it"):
        await court.evaluate(evaluator, weight=SLEEP)
    assert (await court.evaluate(evaluator))["loss"] == (0.0, 4.0)
    running = asyncio.create_task(court.evaluate(evaluator, weight=SLEEP))
    await asyncio.sleep(0)
    await evaluator.close()
    with pytest.raises(WorkerDied):
        await running
    await evaluator.release(RUN)


@pytest.mark.parametrize(
    ("changes", "app", "message"),
    [
        ({"apps": {}}, "judge", r"this server has no \[apps.judge\]; add it to server.toml"),
        ({"data": {}}, "judge", r"this server has no \[data.judge\]"),
        ({}, "other", r"this server has no \[apps.other\].*or set evaluation.server = false in the job"),
    ],
)
async def test_what_the_settings_lack(court: Court, changes: dict[str, Any], app: str, message: str) -> None:
    evaluator = court.evaluator(**changes)
    with pytest.raises(Unknown, match=message):
        await court.evaluate(evaluator, app=app)


async def test_other_code_than_the_researchers(court: Court) -> None:
    evaluator = court.evaluator()
    (court.folder / "installed" / "judge_app.py").write_text(APP + "\n# changed\n")
    with pytest.raises(NotAllowed, match="another hash than the run's"):
        await court.evaluate(evaluator)
    await evaluator.close()
