"""Federations whose sites meet directly, and D-PSGD written by hand for comparison."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from integration.federation import Federation, free_ports
from numpy.typing import NDArray
from torch import nn

NAMES = ("site-1", "site-2", "site-3", "site-4")
POLICY = (
    'allowed_apps = [{ name = "trial", hash = "any-installed" }]\nresearchers = ["*"]\nmin_cohort = 2\n'
    'max_rounds = 10_000\nzones = ["reef"]\n'
)
LR = 0.1  # of the trial app
Model = dict[str, NDArray[Any]]


def start_reef(federation: Federation, *, listening: Sequence[str] = NAMES, names: Sequence[str] = NAMES) -> None:
    """Server, researcher and sites of zone "reef", signed and running.

    Args:
        listening: sites that open a port for neighbours; the others only call.
    """
    federation.start_server()
    federation.enrol_researcher()
    for name in names:
        federation.enrol_site(name, policy=POLICY)
        settings = federation.home(name) / "site.toml"
        text = settings.read_text().replace("[capacity]\n", '[capacity]\nlabels = { zone = "reef" }\n')
        if name in listening:
            text = text.replace("[gossip]\n", f'[gossip]\nlisten = "127.0.0.1:{free_ports()[0]}"\n')
        settings.write_text(text)
    federation.sign()
    for name in names:
        federation.start_site(name)


def gossip_job(*, rounds: int = 3, schedule: str = "min = 4", more: str = "") -> str:
    """A job of one full step a round at each site."""
    return f"""
[job]
name = "reef"
app = "trial"
data = "trial"
rounds = {rounds}
seed = 3
wait_for_sites = "60s"

[strategy]
schedule = {{ kind = "gossip", zone = "reef", {schedule} }}
work = {{ epochs = 1, full_batch = true }}

{more}
"""


def d_psgd(federation: Federation, first: Model, weights: NDArray[np.float64], rounds: int) -> list[Model]:
    """Each site's model after so many rounds: a full step of SGD at each, then x_i <- sum_j W_ij z_j."""
    models = [first] * len(NAMES)
    data = [np.load(federation.root / f"{name}.npz") for name in NAMES]
    for _ in range(rounds):
        trained = [step(model, site["x_train"], site["y_train"]) for model, site in zip(models, data, strict=True)]
        models = [
            {
                name: np.sum(
                    [w * z[name].astype(np.float64) for w, z in zip(row, trained, strict=True)], axis=0
                ).astype(np.float32)
                for name in first
            }
            for row in weights
        ]
    return models


def step(model: Model, x: NDArray[Any], y: NDArray[Any]) -> Model:
    """One step of gradient descent on all examples, written with torch alone."""
    net = nn.Sequential(nn.Linear(30, 16), nn.Tanh(), nn.Linear(16, 2))
    net.load_state_dict({name: torch.from_numpy(value.copy()) for name, value in model.items()})
    loss = nn.functional.cross_entropy(net(torch.from_numpy(x)), torch.from_numpy(y))
    loss.backward()  # type: ignore[no-untyped-call]  # of torch
    with torch.no_grad():
        for value in net.parameters():
            assert value.grad is not None
            value.sub_(LR * value.grad)
        return {name: value.numpy() for name, value in net.state_dict().items()}


def weights_of(*pairs: tuple[int, int]) -> NDArray[np.float64]:
    """Metropolis-Hastings over pairs of sites, numbered from 1."""
    joined = np.zeros((4, 4), dtype=bool)
    for one, two in pairs:
        joined[one - 1, two - 1] = joined[two - 1, one - 1] = True
    degrees = joined.sum(axis=1)
    weights = np.where(joined, 1 / (1 + np.maximum(degrees[:, None], degrees[None, :])), 0.0)
    return weights + np.diag(1 - weights.sum(axis=1))


def mean_of(models: Sequence[Model]) -> Model:
    return {name: np.mean([model[name].astype(np.float64) for model in models], axis=0) for name in models[0]}


def spread_of(models: Sequence[Model]) -> float:
    """Mean over sites of the squared distance to the mean model."""
    mean = mean_of(models)
    return float(np.mean([sum(float(((m[name] - mean[name]) ** 2).sum()) for name in mean) for m in models]))
