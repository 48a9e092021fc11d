"""Adapters of a transformer over two sites, from the text that `prepare` finds to a version: what travels, what learns."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import pytest
import safetensors.torch
import torch

from atoll.aggregation.layout import update_layout
from atoll.aggregation.next_model import next_model
from atoll.aggregation.reducers.reduction import RoundTerms
from atoll.aggregation.strategy import resolve
from atoll.cluster.app import App, build_app, build_model
from atoll.cluster.messages import Evaluate, Prepare, Train
from atoll.cluster.open_session import open_session
from atoll.cluster.registry import AppEntry, hash_distribution, load_app
from atoll.cluster.run_session import RunSession
from atoll.wire.job import Job, load_job
from atoll.wire.manifest import Manifest
from atoll.wire.model_file import create, open_model
from atoll.wire.tensors import frozen_of, manifest_of, write_state

SITES = ("site-1", "site-2")
ENTRY = AppEntry(name="letters", distribution="atoll-examples", entry_point="letters")
ROUNDS, STEPS = 2, 20


@pytest.fixture(autouse=True)
def torch_as_it_was() -> Iterator[None]:
    """Sessions set up torch for their process; here that process is everybody's."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("letters")
    command = [sys.executable, "-m", "atoll_examples.letters.prepare", "--out", str(folder), "--sites", "2"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "[data.letters]" in printed
    return folder


@pytest.fixture(scope="module")
def job() -> Job:
    with resources.as_file(resources.files("atoll_examples.letters") / "job.toml") as path:
        whole = load_job(path)
    work = whole.strategy.work.model_copy(update={"steps": STEPS})
    return whole.model_copy(update={"strategy": whole.strategy.model_copy(update={"work": work})})


@pytest.fixture(scope="module")
def app(job: Job) -> App:
    return build_app(load_app(ENTRY, hash_distribution(ENTRY.distribution)), job.app, {})


def open_site(site: str, job: Job, data: Path, folder: Path) -> RunSession:
    request = Prepare(
        run="run-1",
        site=site,
        app_name=ENTRY.name,
        distribution=ENTRY.distribution,
        entry_point=ENTRY.entry_point,
        app_hash=hash_distribution(ENTRY.distribution),
        data={"path": str(data / f"{site}.npz")},
        job=job.canonical().decode(),
        manifest_path=str(folder / "manifest"),
        state_folder=str(folder / site),
        rounding_seed_hex="07" * 32,
    )
    return open_session(request)


def loss_of(sessions: list[RunSession], path: Path) -> float:
    """Of the version at `path`, over what every site holds back, per character."""
    request = Evaluate(key="evaluate", round=0, base_version=0, base_path=str(path))
    sums = [session.evaluate(request, lambda done, total: None).metrics["loss"] for session in sessions]
    return sum(total for total, _ in sums) / sum(count for _, count in sums)


def test_adapters_learn_and_little_travels(data: Path, job: Job, app: App, tmp_path: Path) -> None:
    model, strategy = build_model(app, job.job.seed), resolve(job)
    manifest = manifest_of(model, "trainable", frozen_of(model))
    (tmp_path / "manifest").write_bytes(manifest.encode())
    with create(tmp_path / "version-0", manifest) as out:
        write_state(manifest, model, out)
    sessions = [open_site(site, job, data, tmp_path) for site in SITES]
    state = strategy.optimizer.init(sessions[0].layout)
    after = tmp_path / "version-0"
    began = loss_of(sessions, after)
    assert began == pytest.approx(math.log(128), rel=0.1)  # nothing is known of 128 characters

    for round in range(1, ROUNDS + 1):
        before, after = tmp_path / f"version-{round - 1}", tmp_path / f"version-{round}"
        terms = RoundTerms(num_sites=len(sessions), max_weight=STEPS * 16, bound=strategy.bound)
        total = strategy.reducer.init(sessions[0].layout, terms)
        for session in sessions:
            path = tmp_path / f"update-{session.site}"
            request = Train(
                key=f"r{round}", round=round, base_version=round - 1, base_path=str(before), out_path=str(path)
            )
            trained = session.train(request, lambda done, total: None)
            total.check(path.read_bytes(), trained.weight, crc32=trained.crc32)
            total.fold(session.site, path.read_bytes(), trained.weight)
        with open_model(before) as base, create(after, manifest) as out:
            state = next_model(
                total, optimizer=strategy.optimizer, state=state, base=base.map, out=out, manifest=manifest
            )
    assert loss_of(sessions, after) < 0.8 * began

    # What travels: a third of this small model, whose base a site never sends; less the larger the base is.
    whole = update_layout(manifest_of(model), strategy.codec, strategy.buffers).num_bytes
    assert sessions[0].prepared().update_bytes < whole / 3
    wide = build_app(type(app), {**job.app, "width": 256}, {}).model()
    parts = [update_layout(manifest_of(wide, p), strategy.codec, "mean").num_bytes for p in ("all", "trainable")]
    assert parts[1] < parts[0] / 10

    # The version is the adapters alone, and fits the app's model.
    exported = safetensors.torch.load_file(after)
    assert exported.keys() == {spec.name for spec in manifest}
    assert not build_model(app, job.job.seed).load_state_dict(exported, strict=False).unexpected_keys
    assert len(manifest.frozen) > len([name for name in exported if "lora" in name]) / 2
    assert Manifest.decode(manifest.encode()) == manifest


def test_the_app_fits_a_page() -> None:
    source = (resources.files("atoll_examples.letters") / "app.py").read_text()
    assert len(source.splitlines()) <= 40
