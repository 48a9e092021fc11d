"""Seconds a round of a simulation on fashion-mnist, as `atoll.simulate` does it, and the accuracy that it comes to.

    python benchmarks/simulation.py --workload W2 --rounds 20 --json

W1: 100 sites (Dirichlet 0.5), 10 a round, a CNN of 1.66 M parameters, batches of 32. W1s: the same with 207 k. W2: 1,000
sites of 60 examples, 100 a round, an MLP of 159 k, batches of 10. One local epoch of SGD, learning rate 0.05, one thread
a process. Needs Debian's package dataset-fashion-mnist. The first round is left out of the median: it has the start in it.
"""

from __future__ import annotations

import argparse
import gzip
import json
import resource
import statistics
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import BaseModel
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import atoll
from atoll.simulations.results import Result
from atoll.simulations.sites import Partition

FOLDER = Path("/usr/share/datasets/fashion-mnist")
MEAN, DEVIATION = 0.2860, 0.3530  # of the training images, from 0 to 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is simulated; `alpha` of Dirichlet, None where sites are alike."""

    sites: int
    per_round: int
    batch_size: int
    network: str
    alpha: float | None = None


WORKLOADS = {
    "W1": Workload(sites=100, per_round=10, batch_size=32, network="cnn", alpha=0.5),
    "W1s": Workload(sites=100, per_round=10, batch_size=32, network="small_cnn", alpha=0.5),
    "W2": Workload(sites=1000, per_round=100, batch_size=10, network="mlp"),
}


class Clothes(atoll.App):
    """An ordinary app, as a user would write it."""

    class Config(BaseModel):
        network: str = "mlp"
        lr: float = 0.05
        copies: int = 1  # of the training images, for more sites than there are images

    def model(self) -> nn.Module:
        if self.config.network == "mlp":
            return nn.Sequential(nn.Flatten(), nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 10))
        width, kernel, hidden = (32, 5, 512) if self.config.network == "cnn" else (16, 3, 128)
        return nn.Sequential(
            nn.Conv2d(1, width, kernel, padding="same"), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, kernel, padding="same"), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(2 * width * 49, hidden), nn.ReLU(), nn.Linear(hidden, 10),
        )  # fmt: skip

    def data(self, split: str) -> TensorDataset:
        prefix = "train" if split == "train" else "t10k"
        images = _read(f"{prefix}-images-idx3-ubyte.gz", 16).reshape(-1, 1, 28, 28)
        labels = _read(f"{prefix}-labels-idx1-ubyte.gz", 8)
        scaled = (images.astype(np.float32) / 255 - MEAN) / DEVIATION
        copies = self.config.copies if split == "train" else 1
        images_, labels_ = torch.from_numpy(scaled), torch.from_numpy(labels.astype(np.int64))
        return TensorDataset(images_.repeat(copies, 1, 1, 1), labels_.repeat(copies))

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(output, batch[1])

    def optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=self.config.lr)


def main() -> None:
    options = _parse()
    record = run(options)
    print(json.dumps(record) if options.json else "\n".join(f"{key:24} {value}" for key, value in record.items()))


def run(options: argparse.Namespace) -> dict[str, Any]:
    """One simulation, and its last model judged on the test images."""
    workload = WORKLOADS[options.workload]
    num_sites, per_round = options.sites or workload.sites, options.per_round or workload.per_round
    dirichlet = None if workload.alpha is None else Partition(kind="dirichlet", alpha=workload.alpha)
    ends: list[float] = []
    began_s = time.monotonic()
    result = atoll.simulate(
        job_of(workload, num_sites, per_round, options.rounds),
        app=Clothes,
        source={},
        sites=num_sites,
        partition=dirichlet,
        engine=options.engine,
        processes=options.processes,
        on_round=lambda entry: ends.append(time.monotonic()),
    )
    if result.status != "finished":
        sys.exit(f"the simulation is {result.status}: {result.reason}")
    seconds = [end - start for start, end in pairwise(ends)]
    return {
        "workload": options.workload,
        "sites": num_sites,
        "per_round": per_round,
        "rounds": len(result.rounds),
        "status": result.status,
        "engine": result.engine,
        "seconds_per_round": round(statistics.median(seconds), 4) if seconds else None,
        "seconds_min": round(min(seconds), 4) if seconds else None,
        "first_round_seconds": round(ends[0] - began_s, 3),
        "test_accuracy": accuracy(result, workload),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def job_of(workload: Workload, num_sites: int, per_round: int, rounds: int) -> dict[str, Any]:
    """The job's table."""
    return {
        "job": {"name": "simulation", "app": "clothes", "rounds": rounds, "seed": 1},
        "app": {"network": workload.network, "copies": -(-num_sites // 60_000)},
        "strategy": {
            "kind": "fedavg",
            "schedule": {"kind": "rounds", "min": per_round, "fraction": per_round / num_sites},
            "work": {"epochs": 1, "batch_size": workload.batch_size},
        },
        "evaluation": {"sites": False},
        "training": {"threads": 1, "device": "cpu"},
    }


def accuracy(result: Result, workload: Workload) -> float:
    """Share of the test images that the last model names."""
    app = Clothes(Clothes.Config(network=workload.network), {})
    model, (images, labels) = app.model(), app.data("test").tensors
    model.load_state_dict(dict(result.model))
    model.eval()
    with torch.no_grad():
        named = torch.cat([model(part).argmax(dim=1) for part in torch.split(images, 1000)])
    return round(float((named == labels).double().mean()), 4)


def _read(name: str, header_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    path = FOLDER / name
    if not path.is_file():
        sys.exit(f"{path} is not there; install it: apt-get install dataset-fashion-mnist")
    return np.frombuffer(gzip.decompress(path.read_bytes()), np.uint8, offset=header_bytes)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--workload", choices=WORKLOADS, default="W2")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--sites", type=int, help="another number of sites than the workload's")
    parser.add_argument("--per-round", type=int, help="another number of them a round")
    parser.add_argument("--engine", default="auto", help="as of atoll simulate")
    parser.add_argument("--processes", type=int, help="the same")
    parser.add_argument("--json", action="store_true", help="one JSON line")
    return parser.parse_args()


if __name__ == "__main__":
    main()
