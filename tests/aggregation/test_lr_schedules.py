"""Learning rates of server optimizers over versions, and Yogi, which torch does not have."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from atoll.aggregation.lr_schedules import SCHEDULES, LearningRate
from atoll.aggregation.parts import build
from atoll.aggregation.strategy import resolve
from atoll.wire.errors import ConfigError
from atoll.wire.job import Part, parse_job

OPTIONS: dict[str, dict[str, Any]] = {
    "step": {"step_size": 3, "gamma": 0.5},
    "multi_step": {"milestones": [2, 5], "gamma": 0.1},
    "exponential": {"gamma": 0.9},
    "cosine": {"T_max": 8},
    "linear": {"start_factor": 0.25, "total_iters": 4},
    "constant": {"factor": 0.5, "total_iters": 3},
    "polynomial": {"total_iters": 6, "power": 2.0},
}
CLOSED_FORMS: dict[str, Any] = {
    "step": lambda n: 0.5 ** (n // 3),
    "multi_step": lambda n: 0.1 ** ((n >= 2) + (n >= 5)),
    "exponential": lambda n: 0.9**n,
    "cosine": lambda n: (1 + math.cos(math.pi * n / 8)) / 2,
    "linear": lambda n: 0.25 + 0.75 * min(n, 4) / 4,
    "constant": lambda n: 0.5 if n < 3 else 1.0,
    "polynomial": lambda n: (1 - min(n, 6) / 6) ** 2,
}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_the_closed_form_of_every_schedule_in_any_order_of_asking(kind: str) -> None:
    rate = LearningRate(0.4, Part(kind=kind, **OPTIONS[kind]))
    for steps in (5, 0, 8, 3, 1, 7, 2, 6, 4):
        assert rate.at(steps) == pytest.approx(0.4 * CLOSED_FORMS[kind](steps), abs=1e-12)


@pytest.mark.parametrize("kind", ["sgd", "adam", "adamw", "adagrad", "yogi"])
def test_an_optimizer_moves_by_the_rate_of_its_version(kind: str) -> None:
    schedule = {"kind": "step", "step_size": 1, "gamma": 0.5}
    fixed, falling = (
        build("optimizer", kind, {"lr": 0.1}),
        build("optimizer", kind, {"lr": 0.4, "lr_schedule": schedule}),
    )
    start = torch.linspace(-1, 1, 7, dtype=fixed.precision(wide=False))
    moves = []
    for optimizer in (fixed, falling):
        values = start.clone()
        state = {name: torch.full_like(values, 0.5) for name in _states(kind)}
        optimizer.step(values, torch.linspace(1, 2, 7, dtype=values.dtype), state, 2)
        moves.append(values)
    assert torch.equal(moves[0], moves[1])  # 0.4 halved twice


def _states(kind: str) -> tuple[str, ...]:
    return {"sgd": (), "adagrad": ("sum",)}.get(kind, ("exp_avg", "exp_avg_sq"))


def test_yogi_is_its_formula() -> None:
    yogi = build("optimizer", "yogi", {"lr": 0.3, "betas": [0.8, 0.9], "eps": 0.01})
    start = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    values = start.clone()
    state: dict[str, torch.Tensor] = {}
    w, m, v = start.tolist(), [0.0] * 3, [0.0] * 3
    for steps, x in enumerate(([0.5, -1.0, 0.0], [0.1, 2.0, -3.0], [0.0, 0.0, 1.0])):
        state = yogi.step(values, torch.tensor(x, dtype=torch.float64), state, steps)
        for i in range(3):
            m[i] = 0.8 * m[i] + 0.2 * x[i]
            v[i] -= 0.1 * math.copysign(1.0, v[i] - x[i] ** 2) * x[i] ** 2 if v[i] != x[i] ** 2 else 0.0
            w[i] += 0.3 * m[i] / (math.sqrt(v[i]) + 0.01)
        assert values.tolist() == pytest.approx(w, abs=1e-12)


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        ({"kind": "cosinus"}, ["cosinus", "cosine"]),
        ({"kind": "step", "gama": 0.5, "step_size": 2}, ["gama", "gamma", "step_size"]),
        ({"kind": "step"}, ["step", "step_size"]),
        ({"kind": "linear", "start_factor": -1.0}, ["linear"]),
        ({"kind": "cosine", "T_max": 0}, ["cosine"]),
        ({"kind": "multi_step", "milestones": 3}, ["multi_step"]),
    ],
)
def test_bad_schedules_name_what_is_wrong(schedule: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        build("optimizer", "sgd", {"lr_schedule": schedule})
    assert caught.value.key == "strategy.optimizer.lr_schedule"
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("optimizer", "rate"),
    [
        ({"kind": "adam", "lr_schedule": {"kind": "step", "step_size": 5, "gamma": -1}}, "version 6 would be -0.01"),
        ({"kind": "sgd", "lr_schedule": {"kind": "cosine", "T_max": 10, "eta_min": -1}}, "would be -"),
        ({"kind": "sgd", "lr_schedule": {"kind": "exponential", "gamma": 1e300}}, "would be inf"),
    ],
)
def test_a_rate_that_goes_wrong_in_a_later_round_is_refused_when_the_job_is_read(
    optimizer: dict[str, Any], rate: str
) -> None:
    job = {"name": "x", "app": "x", "rounds": 9}
    with pytest.raises(ConfigError, match=rate) as caught:
        resolve(parse_job({"job": job, "strategy": {"optimizer": optimizer}}))
    assert caught.value.key == "strategy.optimizer.lr_schedule"
    resolve(parse_job({"job": {**job, "rounds": 2}, "strategy": {"optimizer": {"kind": "sgd"}}}))
