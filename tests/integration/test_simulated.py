"""A simulation gives the bytes of the same job done by a server and agents as processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from integration.federation import Federation
from integration.trial import REPRODUCIBLE
from numpy.typing import NDArray
from sklearn.datasets import load_digits

import atoll

ROUNDING_SEED = 7  # as REPRODUCIBLE has it
JOB = """
[job]
name = "digits"
app = "digits"
rounds = 3
seed = 11
wait_for_sites = "60s"
[app]
hidden = 32
[strategy]
{strategy}
schedule = {{ kind = "rounds", min = 3 }}
work = {{ epochs = 1, batch_size = 16 }}
[training]
threads = 1
device = "cpu"
"""
STRATEGIES = {
    "fedavg": 'kind = "fedavg"',
    "int8-fedadam": 'kind = "fedadam"\ncodec = { kind = "int8" }\ndownload = { kind = "bfloat16" }',
    "masked-scaffold": 'kind = "scaffold"',
}
MASKED = "[privacy]\nsecure_aggregation = { fewest_survivors = 3, corrupt = 0.0 }\n"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Digits at three sites of different sizes."""
    pixels, labels = load_digits(return_X_y=True)
    x, y = np.asarray(pixels / 16, dtype=np.float32), np.asarray(labels, dtype=np.int64)
    folder, cuts = tmp_path_factory.mktemp("digits"), {"site-1": (0, 200), "site-2": (200, 330), "site-3": (330, 601)}
    for site, (start, stop) in cuts.items():
        arrays: dict[str, NDArray[Any]] = {
            "x_train": x[start:stop],
            "y_train": y[start:stop],
            "x_test": x[1500:1600],
            "y_test": y[1500:1600],
        }
        np.savez(folder / f"{site}.npz", allow_pickle=False, **arrays)
    return {site: folder / f"{site}.npz" for site in cuts}


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory, data: dict[str, Path]) -> Iterator[Federation]:
    """A running server and three running sites with the digits and reproducible rounding."""
    federation = Federation(tmp_path_factory.mktemp("deployed"))
    try:
        federation.make()
        federation.start_server()
        federation.enrol_researcher()
        for site, path in data.items():
            tables = f'[apps.digits]\ndistribution = "atoll-examples"\nentry_point = "digits"\n[data.digits]\npath = "{path}"\n'
            policy = (
                'allowed_apps = [{ name = "digits", hash = "any-installed" }]\nresearchers = ["*"]\nmin_cohort = 1\n'
                "max_rounds = 100\n"
            )
            federation.enrol_site(site, settings=tables + REPRODUCIBLE, policy=policy)
        federation.sign()
        for site in data:
            federation.start_site(site)
        yield federation
    finally:
        federation.close()


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(strategy, id=name, marks=pytest.mark.chaos if name == "fedavg" else ())
        for name, strategy in STRATEGIES.items()
    ],
)
def test_simulated_and_deployed_models_have_equal_bytes(
    federation: Federation, data: dict[str, Path], tmp_path: Path, strategy: str
) -> None:
    text = JOB.format(strategy=strategy) + (MASKED if "scaffold" in strategy else "")
    path = tmp_path / "job.toml"
    path.write_text(text)
    state = federation.finish(text)
    simulated = atoll.simulate(
        path, sites={site: {"path": str(file)} for site, file in data.items()}, rounding_seed=ROUNDING_SEED
    )
    assert simulated.status == "finished", simulated.reason
    deployed = federation.model(state["run"])
    model = {name: tensor for name, tensor in simulated.model.items() if not name.startswith("scaffold.control/")}
    assert deployed.keys() == model.keys()  # the rule's own tensors stay on the server
    for name, tensor in model.items():
        assert deployed[name].tobytes() == tensor.numpy().tobytes(), name
    for mine, theirs in zip(simulated.rounds, state["rounds"], strict=True):
        assert (mine.sites, mine.weight, dict(mine.train)) == (theirs["sites"], theirs["weight"], theirs["train"])
        assert dict(mine.evaluate) == theirs["evaluate"]
        assert mine.bytes_up == theirs["bytes_up"]
        assert dict(mine.secure) == theirs.get("secure", {})
