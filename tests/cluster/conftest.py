from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import atoll
from atoll.cluster.app import build_app, build_model
from atoll.cluster.messages import Evaluate, Prepare, Train
from atoll.cluster.registry import AppEntry, hash_distribution, load_app
from atoll.wire.job import Job, parse_job
from atoll.wire.model_file import create
from atoll.wire.tensors import manifest_of, write_state

DISTRIBUTION = "probe-distribution"
ENTRY_POINTS = {"probe": "probe_app:Probe", "keeping": "probe_app:Keeping", "no_app": "probe_app:not_an_app"}


def install(folder: Path, *, name: str, files: dict[str, str], entry_points: dict[str, str]) -> None:
    """Lays a distribution into `folder` as pip does: files, METADATA, entry points, RECORD."""
    metadata = f"{name.replace('-', '_')}-1.0.dist-info"
    points = "".join(f"{point} = {value}\n" for point, value in entry_points.items())
    written = {
        **files,
        f"{metadata}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{metadata}/entry_points.txt": f"[atoll.apps]\n{points}",
        f"{metadata}/INSTALLER": "pip\n",
    }
    written[f"{metadata}/RECORD"] = "".join(f"{path},,\n" for path in [*written, f"{metadata}/RECORD"])
    for path, text in written.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder on the path with the tests' app installed in it."""
    folder = tmp_path_factory.mktemp("installed")
    source = (Path(__file__).parent / "distribution" / "probe_app.py").read_text()
    install(folder, name=DISTRIBUTION, files={"probe_app.py": source}, entry_points=ENTRY_POINTS)
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))


@pytest.fixture(autouse=True)
def torch_as_it_was() -> Iterator[None]:
    """Sessions set up torch for their process; here that process is everybody's."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    if torch.are_deterministic_algorithms_enabled() != deterministic:
        torch.use_deterministic_algorithms(deterministic)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """A run on one machine: version 0, its manifest, and each site's requests."""

    folder: Path
    job: Job
    entry: AppEntry
    app_hash: str
    environment: dict[str, str]

    @property
    def base(self) -> Path:
        return self.folder / "version-0.safetensors"

    def data(self, site: str) -> Path:
        return self.folder / f"{site}.npz"

    def prepare(self, site: str, **changes: Any) -> Prepare:
        fields: dict[str, Any] = {
            "run": "run-1",
            "site": site,
            "app_name": self.entry.name,
            "distribution": self.entry.distribution,
            "entry_point": self.entry.entry_point,
            "app_hash": self.app_hash,
            "data": {"path": str(self.data(site))},
            "job": self.job.canonical().decode(),
            "manifest_path": str(self.folder / "manifest"),
            "state_folder": str(self.folder / f"state-{site}"),
            "rounding_seed_hex": "07" * 32,
        }
        return Prepare(**{**fields, **changes})

    def train(self, out: str, *, round: int = 1, config: dict[str, Any] | None = None) -> Train:
        return Train(
            key=f"train/{out}",
            round=round,
            base_version=0,
            base_path=str(self.base),
            out_path=str(self.folder / out),
            config=config or {},
        )

    def evaluate(self, *, round: int = 0) -> Evaluate:
        return Evaluate(key="evaluate", round=round, base_version=0, base_path=str(self.base))

    def update(self, out: str) -> bytes:
        return (self.folder / out).read_bytes()


def write_data(path: Path, *, num_train: int, num_test: int = 20, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    for split, count in (("train", num_train), ("test", num_test)):
        x = rng.normal(size=(count, 4))
        arrays |= {f"x_{split}": x, f"y_{split}": (x[:, :3] + rng.normal(size=(count, 3))).argmax(axis=1)}
    np.savez(path, allow_pickle=False, **arrays)


MakeBench = Callable[..., Bench]


@pytest.fixture
def make_bench(tmp_path: Path, installed: Path) -> MakeBench:
    """Makes a run: `make_bench(app={...}, work={...}, entry_point="probe", sites={"north": 40}, **strategy)`."""

    def make(
        *,
        app: dict[str, Any] | None = None,
        work: dict[str, Any] | None = None,
        entry_point: str = "probe",
        sites: dict[str, int] | None = None,
        **strategy: Any,
    ) -> Bench:
        folder = tmp_path / "run"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        job = parse_job(
            {
                "job": {"name": "probe", "app": "probe", "rounds": 3, "seed": 5},
                "app": app or {},
                "strategy": {"work": work or {"epochs": 2, "batch_size": 8}, **strategy},
                "training": {"threads": 1, "device": "cpu"},
            }
        )
        for number, (site, num_train) in enumerate((sites or {"north": 40}).items()):
            write_data(folder / f"{site}.npz", num_train=num_train, seed=number)
        entry = AppEntry(name="probe", distribution=DISTRIBUTION, entry_point=entry_point)
        app_hash = hash_distribution(DISTRIBUTION)
        model = build_model(build_app(load_app(entry, app_hash), job.app, {}), job.job.seed)
        manifest = manifest_of(model)
        (folder / "manifest").write_bytes(manifest.encode())
        with create(folder / "version-0.safetensors", manifest) as data:
            write_state(manifest, model, data)
        source = Path(str(atoll.__file__)).parent.parent
        path = os.pathsep.join([str(installed), str(source)])
        return Bench(folder=folder, job=job, entry=entry, app_hash=app_hash, environment={"PYTHONPATH": path})

    return make
