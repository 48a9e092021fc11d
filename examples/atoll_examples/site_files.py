"""The files that the `prepare` commands write: one for each site, one for the server, one for comparison.

site-1.npz ...   what a site has: its training data and its share of the test data
test.npz         the whole test set, for evaluation on the server's side
central.npz      everything in one place, as no federation has it: for a central training to compare with
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from atoll.simulations.partition import dirichlet, iid


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrays:
    """Examples and their labels: x is N x features, y is N class numbers (int64)."""

    x: NDArray[np.generic]
    y: NDArray[np.int64]

    def named(self, split: str, only: NDArray[np.int64] | slice = slice(None)) -> dict[str, NDArray[np.generic]]:
        return {f"x_{split}": self.x[only], f"y_{split}": self.y[only]}


def hold_back(data: Arrays, *, fraction: float = 0.2, seed: int = 0) -> tuple[Arrays, Arrays]:
    """Training and test data: a random part of the examples is held back for the test."""
    order = np.random.default_rng(seed).permutation(len(data.y))
    test, train = np.split(order, [round(fraction * len(order))])
    return Arrays(x=data.x[train], y=data.y[train]), Arrays(x=data.x[test], y=data.y[test])


def parse(
    description: str | None, *, sites: int, alpha: float, argv: Sequence[str] | None = None
) -> argparse.Namespace:
    """The options that all examples take, with this example's defaults: `sites`, `alpha`, `seed`, `out`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, required=True, help="folder for the files; made when absent")
    parser.add_argument("--sites", type=int, default=sites, help=f"how many sites (default {sites})")
    parser.add_argument("--alpha", type=float, default=alpha,
                        help=f"how alike the sites are: 0.1 few classes each, 100 all alike (default {alpha})")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="another seed is another split (default 0)")
    return parser.parse_args(argv)


def write(name: str, train: Arrays, test: Arrays, options: argparse.Namespace) -> None:
    """Split the data, write the files, and print what each site has and puts into its settings."""
    out: Path = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    parts = dirichlet(train.y, options.sites, alpha=options.alpha, seed=options.seed)
    test_parts = iid(test.y, options.sites, seed=options.seed)
    for site, (part, test_part) in enumerate(zip(parts, test_parts, strict=True), start=1):
        path = out / f"site-{site}.npz"
        save(path, **train.named("train", part), **test.named("test", test_part))
        labels = np.bincount(train.y[part], minlength=int(train.y.max()) + 1)
        print(f"site-{site}: {len(part)} examples, by class {labels.tolist()}; in its site.toml:")
        print(f'  [data.{name}]\n  path = "{path}"')
    save(out / "test.npz", **test.named("test"))
    save(out / "central.npz", **train.named("train"), **test.named("test"))


def save(path: Path, **arrays: NDArray[np.generic]) -> None:
    """Arrays by name, without pickle."""
    np.savez(path, allow_pickle=False, **arrays)
