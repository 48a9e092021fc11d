"""The path of an update in an asynchronous run, and what a run's folder holds of a process that was killed."""

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


def test_the_first_update_of_a_round_may_come_before_the_round_is_opened(tmp_path: Path) -> None:
    """A carried task belongs to the next round at once; that its sum is ready is said a little later."""
    strategy = resolve(parse_job({"job": {"name": "a", "app": "a", "rounds": 9}, "strategy": {"kind": "fedbuff"}}))
    pipeline = Pipeline(
        run="run", strategy=strategy, seed=0, manifest=MANIFEST, models=RunModels(tmp_path, "run", MANIFEST)
    )
    layout = update_layout(MANIFEST, strategy.codec, strategy.buffers)
    payload = memoryview(encoded(layout, random_state(MANIFEST, 0), random_state(MANIFEST, 1)))
    round_ = Round(number=2, base_version=1, asked={}, max_weight=9, room=3).carrying("c", 1, 0)
    pipeline.check(round_, "c", 5, payload)
    round_ = round_.accepted("c", Update(task="r1.c", attempt=1, weight=5, metrics={}))
    pipeline.fold(round_, "c", 5, payload)
    pipeline.open_round(round_)
    assert pipeline.lacks(round_) == ()


def test_what_a_killed_server_left_half_made_or_unsynced_is_removed(tmp_path: Path) -> None:
    models = RunModels(tmp_path, "run", MANIFEST)
    models.prepare()
    with models.create(1, {}) as out:
        write_state(MANIFEST, random_state(MANIFEST, 0), out)
    for name in (".2.safetensors.0a1b2c3d.draft", "1.draft", "1.download"):
        (tmp_path / "run" / name).write_bytes(bytes(9))
    RunModels(tmp_path, "run", MANIFEST).prepare()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["1.safetensors"]
