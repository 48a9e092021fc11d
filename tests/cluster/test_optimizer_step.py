"""Steps of optimizers: the bytes of torch's own, whatever is done in its place."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer

from atoll.cluster.optimizer_step import _OwnStep, _PlainDescent, optimizer_step

Make = Callable[[Iterable[nn.Parameter]], Optimizer]


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2), nn.Linear(2, 2))


def trained(make: Make, *, ours: bool) -> list[bytes]:
    """A model's bytes after steps in which one layer has no gradient, and the rate changes."""
    net = model()
    optimizer = make(net.parameters())
    step = optimizer_step(optimizer) if ours else _OwnStep(optimizer)
    for number in range(5):
        step.clear()
        assert all(parameter.grad is None for parameter in net.parameters())
        layers = net[:3] if number % 2 else net  # type: ignore[index]
        layers(torch.full((4, 5), float(number))).pow(2).mean().backward()
        step.move()
        optimizer.param_groups[0]["lr"] *= 0.7
    return [parameter.detach().numpy().tobytes() for parameter in net.parameters()]


MAKES: dict[str, tuple[Make, type]] = {
    "sgd": (lambda params: SGD(params, lr=0.1), _PlainDescent),
    "groups": (lambda params: SGD([{"params": [p], "lr": 0.1 / (n + 1)} for n, p in enumerate(params)]), _PlainDescent),
    "momentum": (lambda params: SGD(params, lr=0.1, momentum=0.9), _OwnStep),
    "decay": (lambda params: SGD(params, lr=0.1, weight_decay=0.1), _OwnStep),
    "maximize": (lambda params: SGD(params, lr=0.1, maximize=True), _OwnStep),
    "fused": (lambda params: SGD(params, lr=0.1, fused=True), _OwnStep),
    "tensor-rate": (lambda params: SGD(params, lr=torch.tensor(0.1)), _OwnStep),
    "adam": (lambda params: Adam(params, lr=0.1), _OwnStep),
}


@pytest.mark.parametrize("name", MAKES)
def test_a_step_has_the_bytes_of_torchs(name: str) -> None:
    make, kind = MAKES[name]
    assert type(optimizer_step(make(model().parameters()))) is kind
    assert trained(make, ours=True) == trained(make, ours=False)


def test_what_hangs_on_a_step_is_called() -> None:
    class Counting(SGD):
        def step(self, closure: Any = None) -> Any:
            calls.append("step")
            return super().step(closure)

    calls: list[str] = []
    hooked = SGD(model().parameters(), lr=0.1)
    hooked.register_step_pre_hook(lambda *given: calls.append("hook"))
    scheduled = SGD(model().parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(scheduled, 1)
    for optimizer in (hooked, Counting(model().parameters(), lr=0.1), scheduled):
        step = optimizer_step(optimizer)
        assert isinstance(step, _OwnStep)
        step.move()
    assert calls == ["hook", "step"]


def test_sparse_gradients_are_left_to_torch() -> None:
    results = []
    for ours in (True, False):
        torch.manual_seed(1)
        table = nn.Embedding(10, 3, sparse=True)
        optimizer = SGD(table.parameters(), lr=0.1)
        step = optimizer_step(optimizer) if ours else _OwnStep(optimizer)
        table(torch.tensor([1, 4, 4])).sum().backward()
        step.move()
        results.append(table.weight.detach().clone())
    assert torch.equal(*results)
