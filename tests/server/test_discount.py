"""A stale update on the path: its values are discounted, its weight is not, and nothing else changes."""

from __future__ import annotations

from pathlib import Path

import torch
from contracts.updates import decoded, encoded, random_state

from atoll.aggregation.layout import update_layout
from atoll.aggregation.strategy import resolve
from atoll.server.models import RunModels
from atoll.server.pipeline import Pipeline
from atoll.server.round import Round, Update
from atoll.wire.job import parse_job
from atoll.wire.manifest import Manifest
from atoll.wire.model_file import open_model
from atoll.wire.tensors import views, write_state

MANIFEST = Manifest.build([("w", "float64", (50,), "parameter")])
WEIGHTS = {"fresh": 3, "stale": 5}


def test_values_are_discounted_by_the_versions_between(tmp_path: Path) -> None:
    schedule = {"kind": "buffered", "k": 2, "exponent": 1.0}
    strategy = resolve(
        parse_job(
            {"job": {"name": "a", "app": "a", "rounds": 9}, "strategy": {"kind": "fedbuff", "schedule": schedule}}
        )
    )
    base = random_state(MANIFEST, 0)
    models = RunModels(tmp_path, "run", MANIFEST)
    models.prepare()
    with models.create(3, {}) as out:
        write_state(MANIFEST, base, out)
    pipeline = Pipeline(run="run", strategy=strategy, seed=0, manifest=MANIFEST, models=models)
    layout = update_layout(MANIFEST, strategy.codec, strategy.buffers)
    payloads = {site: encoded(layout, base, random_state(MANIFEST, seed)) for seed, site in enumerate(WEIGHTS, 1)}
    strategy.optimizer.init(layout).save(models.optimizer_path(3))

    round_ = Round(number=4, base_version=3, asked={"fresh": 1}, max_weight=9, room=2).carrying("stale", 1, 0)
    assert [round_.staleness(site) for site in WEIGHTS] == [0, 3]
    for site, weight in WEIGHTS.items():
        round_ = round_.accepted(site, Update(task=f"r.{site}", attempt=1, weight=weight, metrics={}))
    round_ = round_.closed(tuple(WEIGHTS))
    pipeline.open_round(round_)
    for site, weight in WEIGHTS.items():
        pipeline.check(round_, site, weight, memoryview(payloads[site]))
        pipeline.fold(round_, site, weight, memoryview(payloads[site]))
    pipeline.make_version(round_, 3)
    with open_model(models.path(4)) as made:
        found = views(MANIFEST, made.map, writable=False)["w"]
        fresh, stale = (decoded(layout, payloads[site]) for site in WEIGHTS)
        wanted = base["w"] + (3 * fresh + 5 * stale / 4) / 8
        assert (found - wanted).abs().max() < 1e-12
        assert not torch.allclose(found, base["w"] + (3 * fresh + 5 * stale) / 8)
