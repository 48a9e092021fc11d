"""Accuracy by rounds of named strategies on fashion-mnist over 20 unlike sites, simulated: the table of docs/strategies.md.

    python benchmarks/convergence.py --seeds 3 --write docs/strategies.md --json

Each strategy is tuned first: every pair of a local and a server learning rate of its grid, for half of the rounds, on a
seed that the table does not use; the pair with the best last accuracy stands. Needs Debian's dataset-fashion-mnist.
With --results FILE what is there is not run again, and what is run is added: an interrupted command goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from atoll_examples.fashion.prepare import read
from pydantic import BaseModel
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import atoll
from atoll.aggregation.compositions import BUILT_IN
from atoll.simulations.clock import Speeds
from atoll.simulations.sites import Partition

SITES, ALPHA = 20, 0.1
STEPS, BATCH = 10, 32  # of a site in a round
STEP_S = 0.01  # simulated
EVERY = 2  # rounds from one evaluation to the next
STRAGGLERS, SLOWDOWN = 0.1, 10.0
TUNING_SEED = 100
BUFFER = 5  # updates in a version of fedbuff
STALEST = 100  # versions; a straggler is about 36 behind
LOCAL_RATES = (0.01, 0.03, 0.1, 0.3)
TARGET = 0.7  # accuracy whose simulated time is told
STRATEGIES = ("fedavg", "fedprox", "scaffold", "fedadam", "fedbuff")
MARKS = ("<!-- benchmarks/convergence.py -->", "<!-- end -->")


class Clothes(atoll.App):
    """784 pixels, 100 hidden units, 10 classes."""

    class Config(BaseModel):
        lr: float

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10))

    def data(self, split: str) -> TensorDataset:
        return images(split)

    def inputs(self, batch: Sequence[Tensor]) -> tuple[Tensor]:
        return (batch[0].flatten(1).float() / 255,)

    def loss(self, output: Tensor, batch: Sequence[Tensor]) -> Tensor:
        return F.cross_entropy(output, batch[1])

    def optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=self.config.lr)

    def metrics(self, output: Tensor, batch: Sequence[Tensor]) -> dict[str, tuple[Tensor, float]]:
        correct = output.argmax(dim=1) == batch[1]
        return {"accuracy": (correct.sum(), len(correct))}


@cache
def images(split: str) -> TensorDataset:
    """Pixels from 0 to 255, and labels."""
    found = read("train" if split == "train" else "t10k")
    return TensorDataset(torch.from_numpy(found.x.copy()), torch.from_numpy(found.y))


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run."""

    strategy: str
    local_lr: float
    server_lr: float
    seed: int
    rounds: int  # of all sites; as many updates for fedbuff

    def job(self) -> dict[str, Any]:
        """The job file, as a table."""
        strategy: dict[str, Any] = {"kind": self.strategy, "work": {"steps": STEPS, "batch_size": BATCH}}
        strategy["optimizer"] = {"kind": BUILT_IN[self.strategy].part("optimizer")["kind"], "lr": self.server_lr}
        if self.strategy == "fedbuff":
            strategy["schedule"] = {"kind": "buffered", "k": BUFFER, "min": SITES, "max_staleness": STALEST}
        else:
            strategy["schedule"] = {"kind": "rounds", "min": SITES}
        return {
            "job": {"name": self.strategy, "app": "clothes", "rounds": self.rounds * self.stride, "seed": self.seed},
            "app": {"lr": self.local_lr},
            "strategy": strategy,
            "evaluation": {"sites": False, "server": True, "every": EVERY * self.stride},
            "training": {"threads": 1, "device": "cpu"},
        }

    @property
    def stride(self) -> int:
        """Versions in which every site has counted once, on average."""
        return SITES // BUFFER if self.strategy == "fedbuff" else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Accuracy and simulated seconds of every version that was judged: after EVERY rounds, twice as many, and so on."""

    accuracy: Sequence[float]
    simulated_s: Sequence[float]

    def seconds_to(self, accuracy: float) -> float | None:
        return next((s for s, a in zip(self.simulated_s, self.accuracy, strict=True) if a >= accuracy), None)


def do(trial: Trial) -> Outcome:
    """Simulate one run; another seed is another split, other first weights and other orders of the data."""
    result = atoll.simulate(
        trial.job(),
        app=Clothes,
        sites=SITES,
        source={},
        partition=Partition(kind="dirichlet", alpha=ALPHA, min_examples=BATCH, seed=trial.seed),
        speeds=Speeds(step_s=STEP_S, stragglers=STRAGGLERS, slowdown=SLOWDOWN, seed=trial.seed),
    )
    if result.status != "finished":  # the model has left the bounds
        judged = trial.rounds // EVERY
        return Outcome(accuracy=[0.0] * judged, simulated_s=[0.0] * judged)
    judged = [entry for entry in result.rounds if entry.server]
    return Outcome(
        accuracy=[float(entry.server["accuracy"] or 0.0) for entry in judged],
        simulated_s=[entry.simulated_s for entry in judged],
    )


def grid(strategy: str) -> tuple[float, ...]:
    """Server learning rates that are tried."""
    return (0.003, 0.01, 0.03, 0.1) if BUILT_IN[strategy].part("optimizer")["kind"] != "sgd" else (0.5, 1.0)


class Runs:
    """What was run, in a file where one is named."""

    def __init__(self, path: Path | None, jobs: int) -> None:
        self._path, self._jobs = path, jobs
        self._known: dict[str, Outcome] = {}
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                found = json.loads(line)
                self._known[json.dumps(found["trial"])] = Outcome(**found["outcome"])

    def of(self, trials: Sequence[Trial]) -> list[Outcome]:
        """Their outcomes, in order; what is not known is run, side by side."""
        missing = [trial for trial in trials if _key(trial) not in self._known]
        with ProcessPoolExecutor(self._jobs, mp_context=get_context("spawn")) as pool:
            waiting = {pool.submit(do, trial): trial for trial in missing}
            for number, done in enumerate(as_completed(waiting), start=1):
                self._add(waiting[done], done.result())
                print(f"{number} of {len(missing)}: {waiting[done]}", file=sys.stderr, flush=True)
        return [self._known[_key(trial)] for trial in trials]

    def _add(self, trial: Trial, outcome: Outcome) -> None:
        self._known[_key(trial)] = outcome
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps({"trial": asdict(trial), "outcome": asdict(outcome)}) + "\n")


def _key(trial: Trial) -> str:
    return json.dumps(asdict(trial))


def tuned(runs: Runs, strategies: Sequence[str], rounds: int) -> dict[str, tuple[float, float]]:
    """Local and server learning rate of each strategy."""
    trials = [
        Trial(strategy=name, local_lr=local, server_lr=server, seed=TUNING_SEED, rounds=rounds // 2)
        for name in strategies
        for local in LOCAL_RATES
        for server in grid(name)
    ]
    best: dict[str, tuple[float, Trial]] = {}
    for trial, outcome in zip(trials, runs.of(trials), strict=True):
        last = statistics.mean(outcome.accuracy[-3:])  # one version of unlike sites is noisy
        if trial.strategy not in best or last > best[trial.strategy][0]:
            best[trial.strategy] = (last, trial)
    return {name: (trial.local_lr, trial.server_lr) for name, (_, trial) in best.items()}


def rows(runs: Runs, strategies: Sequence[str], rounds: int, seeds: int) -> Iterator[dict[str, Any]]:
    """One row a strategy."""
    rates = tuned(runs, strategies, rounds)
    trials = {
        name: [
            Trial(strategy=name, local_lr=rates[name][0], server_lr=rates[name][1], seed=seed, rounds=rounds)
            for seed in range(1, seeds + 1)
        ]
        for name in strategies
    }
    runs.of([trial for those in trials.values() for trial in those])
    for name, those in trials.items():
        outcomes = runs.of(those)
        after = {at: [outcome.accuracy[at // EVERY - 1] for outcome in outcomes] for at in marks(rounds)}
        seconds = [outcome.seconds_to(TARGET) for outcome in outcomes]
        yield {
            "strategy": name,
            "local_lr": rates[name][0],
            "server_lr": rates[name][1],
            "accuracy": {at: round(statistics.mean(values), 4) for at, values in after.items()},
            "spread": {at: round(statistics.pstdev(values), 4) for at, values in after.items()},
            "seconds_to_target": None if None in seconds else round(statistics.mean(map(float, seconds)), 1),  # type: ignore[arg-type]
        }


def marks(rounds: int) -> tuple[int, int, int]:
    """Rounds whose accuracy the table tells."""
    return rounds // 4, rounds // 2, rounds


def table(found: Sequence[dict[str, Any]], rounds: int) -> str:
    """The rows as markdown."""
    head = [
        "strategy",
        "lr local, server",
        *(f"after {at} rounds" for at in marks(rounds)),
        f"simulated s to {TARGET:.0%}",
    ]
    lines = [head, ["---"] * len(head)]
    for row in found:
        cells = [f"{100 * row['accuracy'][at]:.1f} ± {100 * row['spread'][at]:.1f}" for at in marks(rounds)]
        seconds = "not always reached" if row["seconds_to_target"] is None else f"{row['seconds_to_target']:.1f}"
        lines.append([f"`{row['strategy']}`", f"{row['local_lr']:g}, {row['server_lr']:g}", *cells, seconds])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write(path: Path, text: str) -> None:
    """Puts the table between its two marks in a file."""
    before, _, rest = path.read_text().partition(MARKS[0])
    _, found, after = rest.partition(MARKS[1])
    if not found:
        sys.exit(f"{path} has no {MARKS[0]} ... {MARKS[1]}")
    path.write_text(f"{before}{MARKS[0]}\n{text}\n{MARKS[1]}{after}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Accuracy by rounds of named strategies on fashion-mnist.")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--strategies", nargs="+", default=[name for name in STRATEGIES if name in BUILT_IN])
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes, of one thread each")
    parser.add_argument("--results", type=Path, help="file of outcomes, one JSON line each: read first, then added to")
    parser.add_argument("--write", type=Path, help="document to put the table into")
    parser.add_argument("--json", action="store_true", help="one JSON line a strategy on stdout")
    options = parser.parse_args(argv)
    if options.rounds < 4 * EVERY or options.rounds % (4 * EVERY):
        parser.error(f"--rounds {options.rounds}: wanted a multiple of {4 * EVERY}")
    found = list(rows(Runs(options.results, options.jobs), options.strategies, options.rounds, options.seeds))
    text = table(found, options.rounds)
    print("\n".join(json.dumps(row) for row in found) if options.json else text)
    if options.write:
        write(options.write, text)


if __name__ == "__main__":
    main()
