"""Runs in which only trainable parameters travel: what is in the bytes, and that the rest must be the same everywhere."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from contracts.updates import decoded
from samples.bench import Bench, MakeBench
from torch import nn

from atoll.cluster.open_session import open_session
from atoll.wire.errors import BadManifest
from atoll.wire.job import Job
from atoll.wire.manifest import Manifest
from atoll.wire.tensors import frozen_of, manifest_of


def ignore(done: int, total: int) -> None:
    pass


def trainable_bench(make_bench: MakeBench, frozen: str = "0.", **app: object) -> Bench:
    return make_bench(app={"frozen": frozen, **app}, parameters="trainable")


def test_only_trainable_parameters_travel(make_bench: MakeBench) -> None:
    bench = trainable_bench(make_bench)
    session = open_session(bench.prepare("north"))
    assert [spec.name for spec in session.manifest] == ["3.weight", "3.bias"]
    assert [tensor.name for tensor in session.manifest.frozen] == ["0.weight", "0.bias"]
    before = {name: tensor.clone() for name, tensor in session.model.state_dict().items()}
    trained = session.train(bench.train("update"), ignore)
    after = session.model.state_dict()
    assert trained.num_bytes == session.prepared().update_bytes == 64 + 27 * 8
    moved = torch.cat([(after[name] - before[name]).flatten() for name in ("3.weight", "3.bias")])
    assert torch.equal(decoded(session.layout, bench.update("update")), moved)
    assert moved.abs().max() > 0
    assert all(torch.equal(after[name], before[name]) for name in ("0.weight", "0.bias"))
    assert session.evaluate(bench.evaluate(), ignore).metrics["accuracy"][1] == 20


def test_the_same_steps_as_when_everything_travels(make_bench: MakeBench) -> None:
    bench = trainable_bench(make_bench)
    open_session(bench.prepare("north")).train(bench.train("update"), ignore)
    few = bench.update("update")[64:]
    bench = make_bench(app={"frozen": "0."})
    session = open_session(bench.prepare("north"))
    session.train(bench.train("update"), ignore)
    entry = next(entry for entry in session.layout.means if entry.spec.name == "3.weight")
    assert bench.update("update")[entry.offset : entry.offset + len(few)] == few


def test_buffers_travel_as_ever(make_bench: MakeBench) -> None:
    session = open_session(trainable_bench(make_bench, frozen="1.", batch_norm=True).prepare("north"))
    names = {spec.name: spec.role for spec in session.manifest}
    assert {
        "0.running_mean": "buffer",
        "0.num_batches_tracked": "buffer",
        "0.weight": "parameter",
    }.items() <= names.items()
    assert not names.keys() & {"1.weight", "1.bias"}


def test_a_site_with_other_frozen_weights_is_told_which(make_bench: MakeBench) -> None:
    bench = trainable_bench(make_bench)
    request = bench.prepare("north")
    other = dataclasses.replace(request, data={**request.data, "shift": 1e-7})
    with pytest.raises(BadManifest, match=r'frozen tensor "0\.weight" differs from that of the run') as refused:
        open_session(other)
    assert refused.value.field == "0.weight"
    assert refused.value.value != refused.value.bound


def test_what_is_frozen_must_be_the_same_too(make_bench: MakeBench) -> None:
    bench = trainable_bench(make_bench)
    job = bench.job.model_copy(update={"app": {"frozen": "0.w"}})
    with pytest.raises(BadManifest, match=r'tensor "0\.bias" is a parameter of float64 \[8\], manifest says absent'):
        open_session(bench.prepare("north", job=job.canonical().decode()))
    job = Job.model_validate({**bench.job.model_dump(), "strategy": {"work": bench.job.strategy.work}})
    with pytest.raises(BadManifest, match="manifest says absent"):
        open_session(bench.prepare("north", job=job.canonical().decode()))
    manifest = Manifest.decode((bench.folder / "manifest").read_bytes())
    (bench.folder / "manifest").write_bytes(Manifest(manifest.tensors, manifest.frozen[:1]).encode())
    with pytest.raises(BadManifest, match=r'"0\.bias" differs .* there'):
        open_session(bench.prepare("north"))


def test_a_model_with_nothing_to_train_is_refused() -> None:
    with pytest.raises(BadManifest, match="no parameter of the model requires gradients") as refused:
        manifest_of(nn.Linear(2, 2).requires_grad_(False), "trainable")
    assert refused.value.field == "strategy.parameters"


def test_every_bit_of_a_frozen_tensor_counts() -> None:
    """Type and shape too, and of parameters alone."""
    linear = nn.Linear(2, 3)
    model = nn.Sequential(linear, nn.BatchNorm1d(3)).requires_grad_(False)
    (weight, *_), names = frozen_of(model), [tensor.name for tensor in frozen_of(model)]
    assert names == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert frozen_of(model)[0] == weight
    digests = {weight.sha256, frozen_of(copy.deepcopy(model).double())[0].sha256}
    linear.weight.data.view(torch.uint8)[0, 0] ^= 1
    digests.add(frozen_of(model)[0].sha256)
    linear.weight = nn.Parameter(linear.weight.data.T.contiguous(), requires_grad=False)
    digests.add(frozen_of(model)[0].sha256)
    assert len(digests) == 4
    for dtype in (torch.bfloat16, torch.complex64, torch.float8_e4m3fn):
        empty = nn.Module()
        empty.p = nn.Parameter(torch.zeros(2, dtype=dtype), requires_grad=False)
        empty.none = nn.Parameter(torch.zeros(0, dtype=dtype), requires_grad=False)
        assert len({tensor.sha256 for tensor in frozen_of(empty)}) == 2
