from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from samples.bench import DISTRIBUTION, ENTRY_POINTS, Bench, MakeBench, install, write_data

import atoll
from atoll.aggregation.lanes import run_manifest
from atoll.aggregation.strategy import resolve
from atoll.cluster.app import build_app, build_model
from atoll.cluster.registry import AppEntry, hash_distribution, load_app
from atoll.wire.job import parse_job
from atoll.wire.model_file import create
from atoll.wire.tensors import frozen_of, manifest_of, write_state


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


@pytest.fixture
def make_bench(tmp_path: Path, installed: Path) -> MakeBench:
    """Makes a run: `make_bench(app={...}, work={...}, entry_point="probe", sites={"north": 40}, **strategy)`."""

    def make(
        *,
        app: dict[str, Any] | None = None,
        work: dict[str, Any] | None = None,
        entry_point: str = "probe",
        sites: dict[str, int] | None = None,
        only: list[str] | None = None,
        **strategy: Any,
    ) -> Bench:
        folder = tmp_path / "run"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        job = parse_job(
            {
                "job": {"name": "probe", "app": "probe", "rounds": 3, "seed": 5, "sites": only or []},
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
        resolved, parameters = resolve(job), job.strategy.parameters or "all"
        frozen = frozen_of(model) if parameters == "trainable" else ()
        manifest = run_manifest(manifest_of(model, parameters, frozen), resolved.lanes, resolved.local)
        (folder / "manifest").write_bytes(manifest.encode())
        with create(folder / "version-0.safetensors", manifest) as data:
            write_state(manifest, model, data)
        source = Path(str(atoll.__file__)).parent.parent
        path = os.pathsep.join([str(installed), str(source)])
        return Bench(folder=folder, job=job, entry=entry, app_hash=app_hash, environment={"PYTHONPATH": path})

    return make
