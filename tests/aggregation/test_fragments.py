"""Fragments of a model: which tensors and bytes are in which, and the state of the server optimizer of each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from contracts.updates import SMALL, encoded, random_state

from atoll.aggregation.fragments import Fragments
from atoll.aggregation.next_model import next_model
from atoll.aggregation.optimizer_state import OptimizerState
from atoll.aggregation.parts import build
from atoll.aggregation.round_sum import RoundSum
from atoll.aggregation.strategy import resolve
from atoll.wire.errors import ConfigError
from atoll.wire.job import parse_job
from atoll.wire.manifest import Manifest
from atoll.wire.tensors import views, write_state

MANIFEST = Manifest.build(
    [
        ("embed.weight", "float32", (40, 10), "parameter"),
        ("block.weight", "float32", (10, 10), "parameter"),
        ("block.mean", "float32", (10,), "buffer"),
        ("wide", "float64", (100,), "parameter"),
        ("steps", "int64", (), "buffer"),
        ("head.weight", "float32", (40, 10), "parameter"),
    ]
)
NATIVE = build("codec", "native", {})


def fragments(count: int, manifest: Manifest = MANIFEST, local: tuple[str, ...] = ()) -> Fragments:
    return Fragments(manifest, NATIVE, "mean", local, count=count)


def names(found: Fragments) -> list[list[str]]:
    return [[spec.name for spec in found.manifest if spec.name in fragment.names] for fragment in found.all]


def test_one_fragment_is_the_whole_model_with_the_layout_of_ever() -> None:
    found = fragments(1)
    assert found.all[0].layout is found.whole
    assert (found.all[0].start, found.all[0].stop) == (0, MANIFEST.num_bytes)


def test_fragments_are_neighbours_of_about_the_same_bytes() -> None:
    assert names(fragments(3)) == [
        ["wide", "steps"],  # a manifest has the widest items first
        ["embed.weight", "block.weight", "block.mean"],
        ["head.weight"],
    ]
    whole = Manifest.build([(f"t{number}", "float32", (100,), "parameter") for number in range(64)])
    sizes = [fragment.stop - fragment.start for fragment in fragments(7, whole).all]
    assert sum(sizes) == whole.num_bytes
    assert max(sizes) - min(sizes) <= 400


def test_each_tensor_that_travels_is_in_one_fragment_and_each_fragment_has_one() -> None:
    for count in range(1, 6):
        found = fragments(count, local=("wide",))
        every = [name for part in names(found) for name in part]
        assert every == [spec.name for spec in MANIFEST if spec.name != "wide"]
        assert all(names(found))
        assert all("wide" in {spec.name for spec in fragment.layout.absent} for fragment in found.all)
    with pytest.raises(ConfigError, match=r"strategy\.schedule\.fragments = 6: the model has 5 tensors that travel"):
        fragments(6, local=("wide",))


def test_updates_of_two_fragments_are_told_apart_by_their_header() -> None:
    assert len({fragment.layout.header for fragment in fragments(3).all} | {fragments(1).whole.header}) == 4


def test_rounds_take_turns() -> None:
    found = fragments(3)
    assert [found.all.index(found.of_round(round_)) for round_ in range(1, 8)] == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize("kind", ["sgd", "adam", "yogi", "adagrad"])
def test_each_fragment_moves_as_if_it_were_a_model_of_its_own(kind: str, tmp_path: Any) -> None:
    """Steps are counted by fragment, and the state of the others stays; over a save and a load too."""
    optimizer = build("optimizer", kind, {"lr": 0.1, **({"momentum": 0.9} if kind == "sgd" else {})})
    found = fragments(3)
    base = bytearray(MANIFEST.num_bytes)
    write_state(MANIFEST, random_state(MANIFEST, 0), base)
    state = optimizer.init(found.whole)
    alone = {place: (bytes(base), optimizer.init(fragment.layout)) for place, fragment in enumerate(found.all)}
    for round_ in range(1, 8):
        layout, place = found.of_round(round_).layout, (round_ - 1) % 3
        total = summed(layout, base, round_)
        before, out = found.state_of(round_, state, optimizer), bytearray(MANIFEST.num_bytes)
        after = next_model(total, optimizer=optimizer, state=before, base=base, out=out, manifest=MANIFEST)
        old_base, old_state = alone[place]
        own = bytearray(MANIFEST.num_bytes)
        new_state = next_model(total, optimizer=optimizer, state=old_state, base=old_base, out=own, manifest=MANIFEST)
        alone[place] = (bytes(own), new_state)
        state = found.with_state_of(round_, state, after, optimizer)
        state.save(tmp_path / "state")
        state = OptimizerState.load(tmp_path / "state", optimizer, found.whole)
        base = out
        tensors, wanted = views(MANIFEST, base, writable=False), views(MANIFEST, own, writable=False)
        assert all(torch.equal(tensors[name], wanted[name]) for name in found.of_round(round_).names)
    assert state.num_steps == 7


def summed(layout: Any, base: bytearray, seed: int) -> RoundSum:
    total = RoundSum(layout, num_sites=1, max_weight=1, bound=1024.0)
    state = {name: tensor.clone() for name, tensor in views(MANIFEST, base, writable=False).items()}
    moved = {
        name: tensor + random_state(MANIFEST, seed)[name].to(tensor.dtype) if tensor.is_floating_point() else tensor
        for name, tensor in state.items()
    }
    total.fold("a", encoded(layout, state, moved), 1)
    return total


def test_every_dtype_is_in_a_fragment() -> None:
    manifest = Manifest.build(SMALL)
    assert sum(map(len, names(fragments(4, manifest)))) == len(list(manifest))


JOB = {"job": {"name": "a", "app": "a", "rounds": 9}}


def job(schedule: dict[str, Any], **strategy: Any) -> Any:
    return parse_job({**JOB, "strategy": {"schedule": {"kind": "every_steps", **schedule}, **strategy}})


def test_the_schedule_says_how_many_steps_a_round_has() -> None:
    assert resolve(job({"steps": 500})).work.steps == 500
    assert resolve(job({"steps": 500, "fragments": 4})).work.steps == 125
    work = {"batch_size": 7}
    assert resolve(job({"steps": 6, "fragments": 2}, work=work)).work.batch_size == 7
    assert resolve(parse_job({**JOB, "strategy": {"kind": "diloco"}})).exchange.steps == 500
    assert resolve(parse_job({**JOB, "strategy": {"kind": "local_sgd"}})).exchange.steps == 16
    assert resolve(parse_job(JOB)).exchange.steps is None


@pytest.mark.parametrize(
    ("schedule", "strategy", "key", "words"),
    [
        ({}, {}, "strategy.schedule.steps", "is missing"),
        ({"steps": 0}, {}, "strategy.schedule.steps", "wanted"),
        ({"steps": 10, "fragments": 4}, {}, "strategy.schedule", "a multiple of fragments"),
        ({"steps": 10, "fragments": 0}, {}, "strategy.schedule.fragments", "wanted"),
        ({"steps": 10, "overlap": 3}, {}, "strategy.schedule.overlap", "a site waits for the outcome of its fragment"),
        ({"steps": 10, "alpha": 0}, {}, "strategy.schedule.alpha", "wanted"),
        ({"steps": 10, "quorum": 9}, {}, "strategy.schedule", "quorum is at most min"),
        ({"steps": 10}, {"work": {"epochs": 1}}, "strategy.work.epochs", "remove it here"),
        ({"steps": 10}, {"work": {"steps": 10}}, "strategy.work.steps", "remove it here"),
        (
            {"steps": 10, "fragments": 2},
            {"download": {"kind": "bfloat16"}},
            "strategy.schedule",
            "a codec of downloads writes versions whole",
        ),
    ],
)
def test_bad_options_name_their_key(schedule: dict[str, Any], strategy: dict[str, Any], key: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(job(schedule, **strategy))
    assert caught.value.key == key
    assert words in str(caught.value)
