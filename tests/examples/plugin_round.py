"""Rounds of the plugin's strategy in one process, for test_plugin.py: prints what happened as JSON.

Four sites of one parameter each, of which one sends an update that is a thousand times as long as the others'.
"""

from __future__ import annotations

import json

import torch

from atoll.aggregation.encode import encode_update
from atoll.aggregation.layout import update_layout
from atoll.aggregation.next_model import next_model
from atoll.aggregation.reducers.reduction import RoundTerms
from atoll.aggregation.rounding import Rounding
from atoll.aggregation.schedule import Accepted, Close, Committed, Dispatch, Joined, Ready, Stop
from atoll.aggregation.strategy import resolve
from atoll.wire.job import parse_job
from atoll.wire.manifest import Manifest
from atoll.wire.tensors import views

STEPS = {"a": [3.0, 4.0], "b": [4.0, 3.0], "c": [0.0, 5.0], "d": [-3000.0, 4000.0]}


def main() -> None:
    table = {"job": {"name": "x", "app": "x", "rounds": 3}, "strategy": {"kind": "careful", "sum": {"bound": 8192.0}}}
    strategy = resolve(parse_job(table))
    manifest = Manifest.build([("w", "float32", (2,), "parameter")])
    layout = update_layout(manifest, strategy.codec, strategy.buffers)
    data, optimizer = bytearray(manifest.num_bytes), strategy.optimizer.init(layout)
    state = strategy.schedule.init(num_rounds=3, seed=1)
    for site in STEPS:
        state, _ = strategy.schedule.on(state, Joined(site=site, max_weight=1, labels={}))
    state, actions = strategy.schedule.on(state, Ready())
    cohorts, moves = [], []
    while not any(isinstance(action, Stop) for action in actions):
        [asked] = [action for action in actions if isinstance(action, Dispatch)]
        cohorts.append(asked.sites)
        base = {name: tensor.clone() for name, tensor in views(manifest, data, writable=True).items()}
        terms = RoundTerms(num_sites=len(asked.sites), max_weight=1, bound=strategy.bound)
        reduction = strategy.reducer.init(layout, terms)
        for site in asked.sites:
            payload = bytearray(layout.num_bytes)
            trained = {"w": base["w"] + torch.tensor(STEPS[site])}
            encode_update(layout, base, trained, payload, rounding=Rounding(bytes(32)), bound=strategy.bound)
            reduction.check(payload, 1, site=site)
            reduction.fold(site, payload, 1)
            accepted = Accepted(site=site, round=asked.round, base_version=asked.base_version, weight=1)
            state, actions = strategy.schedule.on(state, accepted)
        assert any(isinstance(action, Close) for action in actions)
        out = bytearray(manifest.num_bytes)
        optimizer = next_model(
            reduction, optimizer=strategy.optimizer, state=optimizer, base=data, out=out, manifest=manifest
        )
        data = out
        moves.append((views(manifest, data, writable=True)["w"] - base["w"]).tolist())
        state, actions = strategy.schedule.on(state, Committed(round=asked.round, version=asked.round))
    print(json.dumps({"cohorts": cohorts, "moves": moves}))


main()
