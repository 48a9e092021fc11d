from __future__ import annotations

import torch
from torch import nn

from atoll.aggregation.parts import build
from atoll.aggregation.rules.rule import LocalRule


def rule(kind: str, **options: object) -> LocalRule:
    made: LocalRule = build("rule", kind, options)
    return made


def trained(by: LocalRule, *, mu: float = 0.0, steps: int = 5) -> nn.Linear:
    """A model after some steps; with `mu`, the proximal term stands in the loss and no rule is needed."""
    torch.manual_seed(0)
    model, inputs, targets = nn.Linear(4, 2), torch.randn(16, 4), torch.randn(16, 2)
    base = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    by.begin(model)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        for parameter, start in zip(model.parameters(), base, strict=True):
            loss = loss + mu / 2 * (parameter - start).square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        by.before_step(model)
        optimizer.step()
        by.after_step(model)
    by.end(model)
    return model


def test_none_changes_nothing() -> None:
    none = rule("none")
    assert none.name == "none"
    assert torch.equal(trained(none).weight, trained(rule("fedprox", mu=0.0)).weight)


def test_fedprox_equals_its_term_in_the_loss() -> None:
    by_rule, by_loss = trained(rule("fedprox", mu=0.7)), trained(rule("none"), mu=0.7)
    assert torch.allclose(by_rule.weight, by_loss.weight, rtol=0, atol=1e-6)
    assert torch.allclose(by_rule.bias, by_loss.bias, rtol=0, atol=1e-6)
    assert not torch.allclose(by_rule.weight, trained(rule("none")).weight, rtol=0, atol=1e-3)


def test_fedprox_starts_each_round_from_its_own_base() -> None:
    by = rule("fedprox", mu=0.7)
    first = trained(by)
    assert torch.equal(trained(by).weight, first.weight)


def test_parameters_without_a_gradient_stay_as_they_are() -> None:
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    by = rule("fedprox", mu=1.0)
    by.begin(model)
    by.before_step(model)
    assert model.weight.grad is None
    by.end(model)
