"""The examples do what their jobs promise, on the data that their `prepare` writes."""

from __future__ import annotations

import copy
import gzip
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module, resources
from pathlib import Path

import numpy as np
import pytest
import torch

from atoll.aggregation.strategy import resolve
from atoll.cluster.app import App, build_app, build_model
from atoll.cluster.batches import plan_work
from atoll.cluster.central import train_centrally
from atoll.cluster.evaluate import evaluate
from atoll.cluster.local_loop import train_locally
from atoll.cluster.registry import AppEntry, hash_distribution, load_app
from atoll.cluster.seeds import training_seed
from atoll.wire.job import Job, load_job

EXAMPLES = ("digits", "breast_cancer", "fashion")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As the jobs say; afterwards torch is as it was."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


def job_of(example: str) -> Job:
    with resources.as_file(resources.files(f"atoll_examples.{example}") / "job.toml") as path:
        return load_job(path)


def app_of(job: Job, path: Path) -> App:
    entry = AppEntry(name=job.job.code, distribution="atoll-examples", entry_point=job.job.code)
    return build_app(load_app(entry, hash_distribution("atoll-examples")), job.app, {"path": str(path)})


def prepare(example: str, out: Path, *options: str) -> str:
    command = [sys.executable, "-m", f"atoll_examples.{example}.prepare", "--out", str(out), *options]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def federate(job: Job, sites: list[App]) -> torch.nn.Module:
    """Federated averaging as the server does it, in plain torch: the mean of the sites' models by weight."""
    model, work = build_model(sites[0], job.job.seed), resolve(job).work
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for round in range(1, job.job.rounds + 1):
        total, weights = {name: torch.zeros_like(t, dtype=torch.float64) for name, t in state.items()}, 0
        for number, app in enumerate(sites, start=1):
            model.load_state_dict(state)
            dataset = app.data("train")
            assert dataset is not None
            outcome = train_locally(
                app, model, app.optimizer(model.parameters()), dataset,
                work=plan_work(app, dataset, work), rule=resolve(job).rule, device=CPU,
                seed=training_seed(job.job.seed, f"site-{number}", round),
            )  # fmt: skip
            weights += outcome.weight
            for name, tensor in model.state_dict().items():
                total[name] += tensor.double() * outcome.weight
        state = {name: (tensor / weights).to(state[name].dtype) for name, tensor in total.items()}
    model.load_state_dict(state)
    return model


def accuracy(sums: dict[str, tuple[float, float]]) -> float:
    total, count = sums["accuracy"]
    return total / count


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_job_can_be_resolved_and_its_app_fits_a_page(example: str) -> None:
    job = job_of(example)
    resolve(job)
    assert job.job.code == example
    source = Path(str(import_module(f"atoll_examples.{example}.app").__file__)).read_text()
    assert len(source.splitlines()) < 40


def test_digits_reaches_what_its_job_promises(tmp_path: Path) -> None:
    printed = prepare("digits", tmp_path, "--sites", "3")
    assert "[data.digits]" in printed
    job = job_of("digits")
    model = federate(job, [app_of(job, tmp_path / f"site-{number}.npz") for number in (1, 2, 3)])
    server = app_of(job, tmp_path / "test.npz")
    federated = accuracy(evaluate(server, model, server.data("test"), device=CPU))
    epochs = job.job.rounds * (job.strategy.work.num_epochs or 1)
    central = accuracy(train_centrally(app_of(job, tmp_path / "central.npz"), job, epochs))
    assert federated >= 0.95
    assert central - federated <= 0.015


def test_breast_cancer_learns_over_five_hospitals(tmp_path: Path) -> None:
    prepare("breast_cancer", tmp_path)
    job = job_of("breast_cancer")
    model = federate(job, [app_of(job, tmp_path / f"site-{number}.npz") for number in range(1, 6)])
    server = app_of(job, tmp_path / "test.npz")
    assert accuracy(evaluate(server, model, server.data("test"), device=CPU)) >= 0.93
    assert model.state_dict()["0.num_batches_tracked"].dtype is torch.int64


def test_prepare_spreads_all_examples_and_nothing_twice(tmp_path: Path) -> None:
    prepare("digits", tmp_path, "--sites", "4", "--alpha", "1.0", "--seed", "3")
    sites = [np.load(tmp_path / f"site-{number}.npz") for number in range(1, 5)]
    central = np.load(tmp_path / "central.npz")
    for split in ("train", "test"):
        joined = np.concatenate([site[f"x_{split}"] for site in sites])
        whole = central[f"x_{split}"]
        assert sorted(map(bytes, joined)) == sorted(map(bytes, whole))
    assert sorted(np.load(tmp_path / "test.npz").files) == ["x_test", "y_test"]


def test_fashion_trains_on_the_bytes_of_images(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (8, 28, 28), dtype=np.uint8), rng.integers(0, 10, 8)
    np.savez(tmp_path / "site.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    job = job_of("fashion")
    app = app_of(job, tmp_path / "site.npz")
    model = build_model(app, 0)
    before = copy.deepcopy(model.state_dict())
    dataset = app.data("train")
    assert dataset is not None
    train_locally(
        app, model, app.optimizer(model.parameters()), dataset,
        work=plan_work(app, dataset, job.strategy.work), rule=resolve(job).rule, seed=1, device=CPU,
    )  # fmt: skip
    assert not torch.equal(model.state_dict()["2.weight"], before["2.weight"])
    assert evaluate(app, model, app.data("test"), device=CPU)["accuracy"][1] == 8


@pytest.mark.skipif(not Path("/usr/share/datasets/fashion-mnist").exists(), reason="needs dataset-fashion-mnist")
def test_fashion_spreads_the_images_of_the_package(tmp_path: Path) -> None:
    printed = prepare("fashion", tmp_path, "--sites", "10")
    assert "[data.fashion]" in printed
    sites = [np.load(tmp_path / f"site-{number}.npz") for number in range(1, 11)]
    assert sum(len(site["y_train"]) for site in sites) == 60_000
    assert sum(len(site["y_test"]) for site in sites) == 10_000
    assert sites[0]["x_train"].shape[1:] == (28, 28)
    assert np.load(tmp_path / "test.npz")["y_test"].shape == (10_000,)


def test_fashion_says_how_to_install_its_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = import_module("atoll_examples.fashion.prepare")
    monkeypatch.setattr(module, "FOLDER", tmp_path / "absent")
    monkeypatch.setattr(sys, "argv", ["prepare", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="apt-get install dataset-fashion-mnist"):
        module.main()


def test_fashion_reads_idx_files(tmp_path: Path) -> None:
    read_idx = import_module("atoll_examples.fashion.prepare").read_idx
    array = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    header = bytes([0, 0, 8, 3]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    (tmp_path / "x.gz").write_bytes(gzip.compress(header + array.tobytes()))
    assert np.array_equal(read_idx(tmp_path / "x.gz"), array)
