"""Federated rounds of a local rule on a problem that a test can also write down as the paper does.

Each site has a least-squares loss f(w) = 1/(2n) ||X w - y||^2 and makes steps of torch.optim on all of its data. What
it sends goes the way of every update: encoded, checked, summed exactly, and made into the next version.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from atoll.aggregation.encode import encode_update
from atoll.aggregation.lanes import ALL, Share, lane_values, run_manifest
from atoll.aggregation.layout import update_layout
from atoll.aggregation.next_model import next_model
from atoll.aggregation.reducers.reduction import RoundTerms
from atoll.aggregation.rounding import Rounding, rounding_key
from atoll.aggregation.rules.rule import LocalRule, Paired, Watching
from atoll.aggregation.sent import Sent
from atoll.aggregation.strategy import Strategy, resolve
from atoll.wire.job import parse_job
from atoll.wire.tensors import load_state, manifest_of, views, write_state

NUM_FEATURES = 3
LR = 0.1
MakeOptimizer = Callable[[Sequence[nn.Parameter]], Optimizer]


@dataclass(frozen=True)
class Problem:
    x: Tensor
    y: Tensor

    def gradient(self, w_F: Tensor) -> Tensor:
        return self.x.T @ (self.x @ w_F - self.y) / len(self.y)


def problems(*sites: str, num_examples: int = 12) -> dict[str, Problem]:
    """A problem for each site, all of them unlike."""
    found = {}
    for seed, site in enumerate(sites, 1):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(num_examples, NUM_FEATURES, generator=generator, dtype=torch.float64)
        found[site] = Problem(x, seed * torch.randn(num_examples, generator=generator, dtype=torch.float64))
    return found


def plain_sgd(params: Sequence[nn.Parameter]) -> Optimizer:
    return SGD(params, LR)


@dataclass
class Rounds:
    """The sites, what they keep, and the versions that come of it."""

    strategy: Mapping[str, Any]
    problems: Mapping[str, Problem]
    num_steps: Mapping[str, int]
    weights: Mapping[str, int] = field(default_factory=dict)
    make_optimizer: MakeOptimizer = plain_sgd
    dtype: torch.dtype = torch.float64

    def __post_init__(self) -> None:
        self.made = self.resolved()
        self.model = nn.Linear(NUM_FEATURES, 1, bias=False).to(self.dtype)
        nn.init.constant_(self.model.weight, 0.5)
        self.manifest = run_manifest(manifest_of(self.model), self.made.lanes)
        self.layout = update_layout(self.manifest, self.made.codec, self.made.buffers)
        self.version = bytearray(self.manifest.num_bytes)
        write_state(self.manifest, self.model, self.version)
        self.optimizer_state = self.made.optimizer.init(self.layout)
        self.kept: dict[str, dict[str, Tensor]] = {site: {} for site in self.problems}
        self.payloads: dict[str, bytearray] = {}
        self.number = 0

    def resolved(self) -> Strategy:
        return resolve(parse_job({"job": {"name": "p", "app": "p", "rounds": 9}, "strategy": dict(self.strategy)}))

    def tensor(self, name: str) -> Tensor:
        return views(self.manifest, self.version, writable=False)[name].clone()

    @property
    def w_F(self) -> Tensor:
        return self.tensor("weight").reshape(-1)

    def play(self, *cohort: str, share: Share = ALL) -> None:
        """One round of these sites."""
        self.number += 1
        terms = RoundTerms(num_sites=len(cohort), max_weight=max(self.weights.get(s, 1) for s in cohort), bound=1024.0)
        total = self.made.reducer.init(self.layout, terms)
        for site in cohort:
            payload, weight = self.update(site), self.weights.get(site, 1)
            total.check(payload, weight)
            total.fold(site, payload, weight)
        out = bytearray(self.manifest.num_bytes)
        self.optimizer_state = next_model(
            total,
            optimizer=self.made.optimizer,
            state=self.optimizer_state,
            base=self.version,
            out=out,
            manifest=self.manifest,
            lanes=self.made.lanes,
            share=share,
        )
        self.version = out

    def update(self, site: str) -> bytearray:
        """What a site sends, trained from the present version; it keeps what its rule says."""
        rule, base = self.resolved().rule, views(self.manifest, self.version, writable=False)  # as after a restart
        load_state(self.manifest, self.version, self.model)
        if isinstance(rule, Paired):
            rule.resume(self.kept[site], lane_values(base, rule.lanes))
        self.train(site, rule)
        payload = bytearray(self.layout.num_bytes)
        encode_update(
            self.layout,
            base,
            dict(self.model.named_parameters()),
            payload,
            rounding=Rounding(rounding_key(site.encode().ljust(32), self.number)),
            bound=1024.0,
            differences=rule.differences() if isinstance(rule, Paired) else {},
        )
        if isinstance(rule, Paired):
            self.kept[site] = dict(rule.settle(Sent(self.layout, payload)))
        self.payloads[site] = payload
        return payload

    def train(self, site: str, rule: LocalRule) -> None:
        problem, optimizer = self.problems[site], self.make_optimizer(list(self.model.parameters()))
        x, y = problem.x.to(self.dtype), problem.y.to(self.dtype)
        if isinstance(rule, Watching):
            rule.watch(optimizer)
        rule.begin(self.model)
        for _ in range(self.num_steps[site]):
            optimizer.zero_grad()
            loss = (self.model(x).reshape(-1) - y).square().mean() / 2
            loss.backward()
            rule.before_step(self.model)
            optimizer.step()
            rule.after_step(self.model)
        rule.end(self.model)
