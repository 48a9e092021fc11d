"""Time to an accuracy with one slow site: FedAvg, which waits for it, beside FedBuff, which does not, in one run.

    python benchmarks/asynchronous.py --sites 5 --slowdown 10 --target 0.93 --json

Real server, agent and worker processes on loopback, mutual TLS, scikit-learn's digits spread at random. The app of this
file sleeps at each step, so that a site has the speed that its settings say whatever else the machine does. Time is
counted from the first dispatch to the commit of the first version of at least the target's accuracy, judged at the server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import atoll

SLOW = "site-1"
JOB = """
[job]
name = "{strategy}"
app = "sleepy"
rounds = {rounds}
[strategy]
kind = "{strategy}"
schedule = {schedule}
work = {{ steps = {steps}, batch_size = 16 }}
[evaluation]
sites = false
server = true
[training]
threads = 1
device = "cpu"
"""
SITE = """
[apps.sleepy]
distribution = "atoll-sleepy"
entry_point = "sleepy"
[data.sleepy]
path = "{path}"
step_s = {step_s}
"""
POLICY = """
allowed_apps = [{ name = "sleepy", hash = "any-installed" }]
researchers = ["ada"]
min_cohort = 1
max_rounds = 100_000
"""


class Sleepy(atoll.App):
    """A small network whose every training step takes `source["step_s"]` seconds more."""

    class Config(BaseModel):
        lr: float = 0.1

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def data(self, split: str) -> TensorDataset:
        with np.load(self.source["path"]) as file:
            return TensorDataset(torch.from_numpy(file[f"x_{split}"]), torch.from_numpy(file[f"y_{split}"]))

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        if torch.is_grad_enabled():
            time.sleep(self.source["step_s"])
        return nn.functional.cross_entropy(output, batch[1])

    def optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=self.config.lr)

    def metrics(self, output: Tensor, batch: Any) -> dict[str, tuple[Tensor, float]]:
        correct = output.argmax(dim=1) == batch[1]
        return {"accuracy": (correct.sum(), len(correct))}


def install(folder: Path) -> Path:
    """Makes the app of this file an installed distribution below `folder`, which goes on PYTHONPATH."""
    info = folder / "atoll_sleepy-1.dist-info"
    info.mkdir(parents=True)
    (folder / "atoll_sleepy.py").write_text(Path(__file__).read_text())
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: atoll-sleepy\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[atoll.apps]\nsleepy = atoll_sleepy:Sleepy\n")
    (info / "RECORD").write_text("atoll_sleepy.py,,\natoll_sleepy-1.dist-info/RECORD,,\n")
    return folder


def main() -> None:
    options = _parse()
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as folder:
        record = run(Path(folder), options)
    print(json.dumps(record) if options.json else "\n".join(f"{key:24} {value}" for key, value in record.items()))


def run(root: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One federation, and both jobs in it, one after the other."""
    from atoll.cli.demonstration.crew import Crew

    path = os.pathsep.join([str(install(root / "installed")), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    with Crew(root / "logs", os.environ | {"PYTHONPATH": path}) as crew:
        _start(root, crew, options)
        waits = f'{{ kind = "rounds", min = {options.sites} }}'
        buffers = f'{{ kind = "buffered", k = {options.k}, min = {options.sites}, max_staleness = 100 }}'
        fedavg = _measure(root, crew, options, "fedavg", waits, options.rounds)
        fedbuff = _measure(root, crew, options, "fedbuff", buffers, options.rounds * options.sites)
    return {
        "sites": options.sites,
        "slowdown": options.slowdown,
        "step_s": options.step_s,
        "steps": options.steps,
        "target": options.target,
        "fedavg_s": round(fedavg[0], 2),
        "fedavg_rounds": fedavg[1],
        "fedbuff_s": round(fedbuff[0], 2),
        "fedbuff_versions": fedbuff[1],
        "ratio": round(fedbuff[0] / fedavg[0], 3),
    }


def _measure(
    root: Path, crew: Any, options: argparse.Namespace, strategy: str, schedule: str, rounds: int
) -> tuple[float, int]:
    """Seconds to the target, and rounds."""
    from atoll.cli.demonstration.crew import atoll_command

    job = root / f"{strategy}.toml"
    job.write_text(JOB.format(strategy=strategy, schedule=schedule, rounds=rounds, steps=options.steps))
    home = ("--home", root / "ada")
    submitted = crew.ask(strategy, atoll_command("run", job, "--detach", *home)).strip()
    found = asyncio.run(_follow(root / "ada", submitted, options.target))
    if found is None:
        sys.exit(f"{strategy} has not reached {options.target} in {rounds} rounds: raise --rounds or lower --target")
    crew.ask(f"{strategy}-stop", atoll_command("stop", submitted, *home))
    return found


async def _follow(home: Path, run: str, target: float) -> tuple[float, int] | None:
    """Seconds from the first dispatch to the commit of the first good version, and its round."""
    from atoll.client.people import load_person
    from atoll.client.researcher import watch

    began_s, committed_s = 0.0, dict[int, float]()
    async with aclosing(watch(load_person(home), run)) as snapshots:
        async for snapshot in snapshots:
            now_s = time.monotonic()
            if snapshot.status == "running":
                began_s = began_s or now_s
            for record in snapshot.rounds:
                committed_s.setdefault(record.round, now_s)
                if "accuracy" not in record.server_metrics:
                    continue
                metric = record.server_metrics["accuracy"]
                if metric.sum / metric.count >= target:
                    return committed_s[record.round] - began_s, record.round
    return None


def _start(root: Path, crew: Any, options: argparse.Namespace) -> None:
    from atoll.cli.demonstration.crew import atoll_command, free_ports

    ports = free_ports(2)
    address, enrolment = (f"127.0.0.1:{port}" for port in ports)
    places = ("--address", address, "--listen", address)
    enrol = ("--enrolment-address", enrolment, "--enrolment-listen", enrolment)
    name = ("--name", "bench", "--key-folder", root / "key")
    crew.ask("init", atoll_command("server", "init", root / "server", *name, *places, *enrol))
    homes = _write_data(root, options.sites)
    with (root / "server" / "server.toml").open("a") as settings:
        settings.write(SITE.format(path=root / "server.npz", step_s=0.0))
    crew.start("server", "server", "run", root / "server")
    for port in ports:
        crew.await_port("server", port)
    operator = root / "server" / "operator"
    for site, path in homes.items():
        home = root / site
        add = atoll_command("site", "add", site, "--organisation", "bench", "--home", operator)
        crew.ask("join", atoll_command("site", "join", "-", "--home", home), text=crew.ask("add", add))
        step_s = options.step_s * (options.slowdown if site == SLOW else 1.0)
        with (home / "site.toml").open("a") as settings:
            settings.write(SITE.format(path=path, step_s=step_s))
        (home / "policy.toml").write_text(POLICY)
    token = crew.ask("add", atoll_command("user", "add", "ada", "--home", operator))
    crew.ask("join", atoll_command("user", "join", "-", "--home", root / "ada"), text=token)
    crew.ask("sign", atoll_command("federation", "sign", "--yes", "--key", root / "key", "--home", operator))
    for site in homes:
        crew.start(site, "site", "run", "--home", root / site)


def _write_data(root: Path, num_sites: int) -> dict[str, Path]:
    """Digits, spread at random: each site's file; and test data for the server."""
    from sklearn.datasets import load_digits

    from atoll.simulations.partition import iid

    pixels, labels = load_digits(return_X_y=True)
    x, y = np.asarray(pixels / 16, dtype=np.float32), np.asarray(labels, dtype=np.int64)
    order = np.random.default_rng(0).permutation(len(y))
    test, train = order[:360], order[360:]
    homes = {f"site-{number}": root / f"site-{number}.npz" for number in range(1, num_sites + 1)}
    for path, mine in zip(homes.values(), iid(y[train], num_sites), strict=True):
        np.savez(path, allow_pickle=False, x_train=x[train[mine]], y_train=y[train[mine]])
    np.savez(root / "server.npz", allow_pickle=False, x_test=x[test], y_test=y[test])
    return homes


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time to an accuracy with one slow site.")
    parser.add_argument("--sites", type=int, default=5)
    parser.add_argument("--slowdown", type=float, default=10.0, help="of site-1")
    parser.add_argument(
        "--step-s", type=float, default=0.02, help="seconds that a step takes at the other sites, and more"
    )
    parser.add_argument("--steps", type=int, default=10, help="steps of a round")
    parser.add_argument("--k", type=int, default=2, help="updates in a version of fedbuff")
    parser.add_argument("--target", type=float, default=0.9, help="accuracy")
    parser.add_argument("--rounds", type=int, default=60, help="of fedavg, at most; fedbuff gets as many updates")
    parser.add_argument("--json", action="store_true", help="one JSON line")
    return parser.parse_args()


if __name__ == "__main__":
    main()
