"""FedNova against the equations of Wang et al. 2020 (arXiv:2007.07481), written out here with their closed forms of a_i."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from samples.paper_rounds import LR, Problem, Rounds, problems
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from atoll.aggregation.lanes import FACTOR_UNIT
from atoll.wire.errors import AppFailed

SITES = ("a", "b", "c")
STEPS = {"a": 2, "b": 9, "c": 5}
WEIGHTS = {"a": 3, "b": 1, "c": 4}
TOTAL = sum(WEIGHTS.values())
STEPS_LANE = "fednova.steps"


def by_hand(given: dict[str, Problem], w: Tensor, *, momentum: float = 0.0, mu: float = 0.0) -> Tensor:
    """x - tau_eff sum_i p_i lr d_i with d_i = G_i a_i / ||a_i||_1 and tau_eff = sum_i p_i ||a_i||_1."""
    direction, tau_eff = torch.zeros_like(w), 0.0
    for site in SITES:
        y, velocity, gradients, tau = w.clone(), torch.zeros_like(w), [], STEPS[site]
        for _ in range(tau):
            gradient = given[site].gradient(y)
            gradients.append(gradient)
            velocity = momentum * velocity + gradient + mu * (y - w)
            y = y - LR * velocity
        if momentum:
            a = [(1 - momentum ** (tau - k)) / (1 - momentum) for k in range(tau)]
        else:
            a = [(1 - LR * mu) ** (tau - 1 - k) for k in range(tau)]
        p = WEIGHTS[site] / TOTAL
        direction += p * sum(g * weight for g, weight in zip(gradients, a, strict=True)) / sum(a)
        tau_eff += p * sum(a)
    return w - tau_eff * LR * direction


@pytest.mark.parametrize(("momentum", "mu"), [(0.0, 0.0), (0.9, 0.0), (0.0, 0.5)], ids=["sgd", "momentum", "proximal"])
def test_rounds_are_those_of_the_paper(momentum: float, mu: float) -> None:
    given = problems(*SITES)
    rounds = Rounds(
        {"kind": "fednova", "rule": {"kind": "fednova", "mu": mu}},
        given,
        STEPS,
        WEIGHTS,
        make_optimizer=lambda params: SGD(params, LR, momentum=momentum),
    )
    w = rounds.w_F
    for _ in range(4):
        w = by_hand(given, w, momentum=momentum, mu=mu)
        rounds.play(*SITES)
        assert (rounds.w_F - w).abs().max() < 1e-11


def test_the_number_of_steps_that_a_version_went_is_their_mean_whatever_the_codec() -> None:
    for codec in ("native", "bfloat16", "int4"):
        rounds = Rounds({"kind": "fednova", "codec": {"kind": codec}}, problems(*SITES), STEPS, WEIGHTS)
        rounds.play(*SITES)
        wanted = sum(WEIGHTS[site] * STEPS[site] for site in SITES) / TOTAL
        assert rounds.tensor(STEPS_LANE).item() / FACTOR_UNIT == pytest.approx(wanted, rel=1e-12)


def test_with_equal_steps_it_is_fedavg() -> None:
    equal: dict[str, int] = dict.fromkeys(SITES, 3)
    found = {kind: Rounds({"kind": kind}, problems(*SITES), equal, WEIGHTS) for kind in ("fednova", "fedavg")}
    for rounds in found.values():
        rounds.play(*SITES)
        rounds.play(*SITES)
    assert (found["fednova"].w_F - found["fedavg"].w_F).abs().max() < 1e-13


def test_a_schedule_of_the_learning_rate_counts_in_units_of_its_first() -> None:
    rounds = Rounds({"kind": "fednova"}, problems("a"), {"a": 3})
    rule, model = rounds.resolved().rule, rounds.model
    optimizer = SGD(model.parameters(), LR)
    rule.watch(optimizer)  # type: ignore[attr-defined]
    rule.begin(model)
    for lr in (LR, LR / 2, LR / 4):
        optimizer.param_groups[0]["lr"] = lr
        model.weight.grad = torch.ones_like(model.weight)
        rule.before_step(model)
        optimizer.step()
        rule.after_step(model)
    rule.end(model)
    sent = rule.differences()  # type: ignore[attr-defined]
    assert sent[STEPS_LANE].item() / FACTOR_UNIT == pytest.approx(1.75, rel=1e-12)
    assert torch.allclose(sent["weight"], torch.full_like(model.weight, -LR), rtol=1e-12)


def two_rates(params: Sequence[nn.Parameter]) -> Optimizer:
    groups: list[dict[str, Any]] = [{"params": params}, {"params": [nn.Parameter(torch.ones(1))], "lr": 1.0}]
    return SGD(groups, lr=LR)


def used(params: Sequence[nn.Parameter]) -> Optimizer:
    optimizer = SGD(params, LR, momentum=0.9)
    optimizer.state[params[0]]["momentum_buffer"] = torch.ones_like(params[0])
    return optimizer


@pytest.mark.parametrize(
    ("make", "mu", "field", "value"),
    [
        (partial(Adam, lr=LR), 0.0, "optimizer", "Adam"),
        (partial(SGD, lr=LR, momentum=0.9, nesterov=True), 0.0, "nesterov", "True"),
        (partial(SGD, lr=LR, momentum=0.9, dampening=0.5), 0.0, "dampening", "0.5"),
        (partial(SGD, lr=LR, momentum=0.9), 0.1, "momentum", "0.9 with mu = 0.1"),
        (two_rates, 0.0, "lr", "0.1, 1"),
        (used, 0.0, "momentum", "kept over rounds"),
        (partial(SGD, lr=LR), 11.0, "lr", "0.1 with mu = 11"),
    ],
    ids=["adam", "nesterov", "dampening", "both", "rates", "kept", "overshoots"],
)
def test_steps_without_a_formula_are_refused(make: Any, mu: float, field: str, value: str) -> None:
    table = {"kind": "fednova", "rule": {"kind": "fednova", "mu": mu}}
    rounds = Rounds(table, problems("a"), {"a": 1}, make_optimizer=make)
    with pytest.raises(AppFailed, match=r"fednova cannot say what a local step counts with .* wanted") as caught:
        rounds.play("a")
    assert (caught.value.field, caught.value.value) == (field, value)
