"""Which reducers keep a model's accuracy where a fifth of the sites attack: scikit-learn's digits over ten sites.

Two sites train as all others do and send their difference the other way round, `--strength` times as long. All goes
through the objects that server and sites use, in one process.

    python benchmarks/attacks.py                  # a table, three seeds: the one in docs/strategies.md
    python benchmarks/attacks.py --seeds 1 --json
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from atoll.aggregation.encode import encode_update
from atoll.aggregation.layout import update_layout
from atoll.aggregation.next_model import next_model
from atoll.aggregation.reducers.reduction import RoundTerms
from atoll.aggregation.rounding import Rounding, rounding_key
from atoll.aggregation.strategy import resolve
from atoll.wire.job import Job, parse_job
from atoll.wire.tensors import load_state, manifest_of, views, write_state

NUM_ATTACKERS: Final = 2
NUM_SITES: Final = 10
NUM_TESTED: Final = 397  # of 1,797 digits; the sites share the others
STEPS: Final = 10  # of each site in each round
LENGTH: Final = 1.5  # about that of an honest update, for reducers that want a length

REDUCERS: Final[Mapping[str, Mapping[str, Any]]] = {
    "mean": {},
    "norm_bound": {"norm": LENGTH},
    "median": {},
    "trimmed_mean": {"fraction": 0.2},
    "krum": {"faulty": NUM_ATTACKERS},
    "multi_krum": {"faulty": NUM_ATTACKERS},
    "bulyan": {"faulty": NUM_ATTACKERS},
    "geometric_median": {},
    "centered_clipping": {"radius": LENGTH, "iterations": 5},
    "bucketing": {"size": 2, "inner": {"kind": "median"}},
    "fltrust": {"trusted": "site-00"},
}
"""Options of every reducer; qfedavg is left out, since it is for fairness and gives a site of a high loss more weight."""


def job_of(reducer: str, num_sites: int) -> Job:
    schedule = {"kind": "rounds", "min": num_sites}
    strategy = {"schedule": schedule, "reducer": {"kind": reducer, **REDUCERS[reducer]}}
    return parse_job({"job": {"name": "attacks", "app": "digits", "rounds": 1}, "strategy": strategy})


def sites_of(reducer: str) -> int:
    """Ten; eleven for Bulyan, which needs 4 f + 3."""
    return max(NUM_SITES, int(resolve(job_of(reducer, 1000)).reducer.fewest_updates))


def accuracy_under_attack(reducer: str, *, num_rounds: int, strength: float, num_attackers: int, seed: int) -> float:
    """Share of the test digits that the last version knows; chance is 0.1."""
    num_sites = sites_of(reducer)
    strategy = resolve(job_of(reducer, num_sites))
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    x, y, tested = digits(seed)
    shares = torch.arange(NUM_TESTED, len(x)).tensor_split(num_sites)
    attackers = range(num_sites - num_attackers, num_sites)
    manifest = manifest_of(model)
    layout = update_layout(manifest, strategy.codec, strategy.buffers)
    data, optimizer = bytearray(manifest.num_bytes), strategy.optimizer.init(layout)
    write_state(manifest, model, data)
    for round_ in range(1, num_rounds + 1):
        terms = RoundTerms(num_sites=num_sites, max_weight=1, bound=strategy.bound, seed=seed + round_)
        reduction = strategy.reducer.init(layout, terms)
        base = {name: tensor.clone() for name, tensor in views(manifest, data, writable=True).items()}
        for number, share in enumerate(shares):
            load_state(manifest, data, model)
            train(model, x[share], y[share], seed=(seed * 1000 + round_) * 1000 + number)
            trained = {name: value.detach().clone() for name, value in model.state_dict().items()}
            if number in attackers:
                trained = {name: base[name] - strength * (trained[name] - base[name]) for name in base}
            payload = bytearray(layout.num_bytes)
            rounding = Rounding(rounding_key(bytes([number]) * 32, round_))
            encode_update(layout, base, trained, payload, rounding=rounding, bound=strategy.bound)
            reduction.check(payload, 1, site=f"site-{number:02d}", round=round_)
            reduction.fold(f"site-{number:02d}", payload, 1)
        out = bytearray(manifest.num_bytes)
        optimizer = next_model(
            reduction, optimizer=strategy.optimizer, state=optimizer, base=data, out=out, manifest=manifest
        )
        data = out
    load_state(manifest, data, model)
    return float((model(x[tested]).argmax(dim=1) == y[tested]).float().mean())


def digits(seed: int) -> tuple[Tensor, Tensor, slice]:
    """Pixels from 0 to 1, labels, and which of them are for the test; in an order of the seed."""
    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(labels))
    x = torch.from_numpy(pixels[order] / 16).float()
    return x, torch.from_numpy(labels[order]).long(), slice(0, NUM_TESTED)


def train(model: nn.Module, x: Tensor, y: Tensor, *, seed: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        batch = torch.randint(len(x), (32,), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--strength", type=float, default=5.0, help="length of an attacker's step, in honest ones")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="one line of JSON: accuracies by reducer, without and with")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {
        reducer: {
            f"{num_attackers} attackers": [
                accuracy_under_attack(
                    reducer,
                    num_rounds=options.rounds,
                    strength=options.strength,
                    num_attackers=num_attackers,
                    seed=seed,
                )
                for seed in range(options.seeds)
            ]
            for num_attackers in (0, NUM_ATTACKERS)
        }
        for reducer in REDUCERS
    }
    if options.json:
        print(json.dumps(found))
        return
    print(f"| reducer | sites | nobody attacks | {NUM_ATTACKERS} attack |\n|---|---|---|---|")
    for reducer, columns in found.items():
        cells = [f"{statistics.mean(seeds):.3f}" for seeds in columns.values()]
        print(f"| `{reducer}` | {sites_of(reducer)} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
