"""Rounds on a CUDA device: the mathematics of the CPU, and equal bytes for equal seeds."""

from __future__ import annotations

import pytest
import torch
from samples.bench import MakeBench

from atoll.cluster.open_session import open_session

pytestmark = pytest.mark.gpu


def ignore(done: int, total: int) -> None:
    pass


def test_a_step_on_cuda_is_that_of_the_cpu(make_bench: MakeBench) -> None:
    bench = make_bench(work={"epochs": 1, "full_batch": True}, app={"batch_norm": True})
    models = []
    for device in ("cpu", "cuda"):
        session = open_session(bench.prepare("north", device=device))
        trained = session.train(bench.train(device), ignore)
        models.append({name: tensor.cpu() for name, tensor in session.model.state_dict().items()})
        assert trained.weight == 40
    for name, tensor in models[0].items():
        torch.testing.assert_close(models[1][name], tensor, rtol=0, atol=1e-12)


@pytest.mark.parametrize("codec", ["native", "int8"])
def test_equal_seeds_give_equal_bytes(make_bench: MakeBench, codec: str) -> None:
    bench = make_bench(app={"dropout": 0.3, "momentum": 0.9}, entry_point="keeping", codec={"kind": codec})
    for out in ("first", "again"):
        session = open_session(bench.prepare("north", device="cuda", state_folder=str(bench.folder / out) + "-state"))
        assert session.prepared().device == "cuda:0"
        for round in (1, 2):
            session.train(bench.train(f"{out}-{round}", round=round), ignore)
    assert bench.update("first-1") == bench.update("again-1")
    assert bench.update("first-2") == bench.update("again-2")


def test_evaluates_on_cuda(make_bench: MakeBench) -> None:
    bench = make_bench()
    found = [
        open_session(bench.prepare("north", device=device)).evaluate(bench.evaluate(), ignore).metrics
        for device in ("cpu", "cuda")
    ]
    assert found[0]["accuracy"] == found[1]["accuracy"]
    assert found[0]["loss"] == pytest.approx(found[1]["loss"], rel=1e-12)
