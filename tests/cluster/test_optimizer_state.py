from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from atoll.cluster.optimizer_state import LocalOptimizer
from atoll.cluster.site_state import Kept, SiteState
from atoll.wire.errors import AppFailed


def rounds(
    kind: type[torch.optim.Optimizer], folder: Path, *, keeps_state: bool, restart: bool, **options: Any
) -> list[float]:
    """Weights after each of three rounds of two steps; with `restart`, by a new worker each round."""
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    state, found = SiteState(folder), []
    optimizer = LocalOptimizer(kind(model.parameters(), **options), keeps_state=keeps_state)
    for round in (1, 2, 3):
        if restart:
            optimizer = LocalOptimizer(kind(model.parameters(), **options), keeps_state=keeps_state)
        optimizer.begin_round(state.load(round))
        for _ in range(2):
            model.weight.grad = torch.ones_like(model.weight)
            optimizer.torch.step()
        state.save(round, optimizer.end_round())
        found.append(model.weight.item())
    return found


@pytest.mark.parametrize(
    ("kind", "options"),
    [(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}), (torch.optim.Adam, {"lr": 0.1}),
     (torch.optim.AdamW, {"lr": 0.1, "amsgrad": True}), (torch.optim.Adagrad, {"lr": 0.1})],
)  # fmt: skip
def test_a_kept_state_survives_a_restart(
    tmp_path: Path, kind: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    stayed = rounds(kind, tmp_path / "a", keeps_state=True, restart=False, **options)
    restarted = rounds(kind, tmp_path / "b", keeps_state=True, restart=True, **options)
    fresh = rounds(kind, tmp_path / "c", keeps_state=False, restart=False, **options)
    assert stayed == restarted
    assert stayed[0] == fresh[0]


def test_a_fresh_state_makes_every_round_the_same(tmp_path: Path) -> None:
    first, second, third = rounds(torch.optim.SGD, tmp_path, keeps_state=False, restart=False, lr=0.1, momentum=0.9)
    assert second - first == pytest.approx(first)
    assert third - second == pytest.approx(first)


def test_hyper_parameters_are_those_it_was_made_with(tmp_path: Path) -> None:
    optimizer = LocalOptimizer(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.5), keeps_state=True)
    optimizer.torch.param_groups[0]["lr"] = 0.001  # as a scheduler leaves it
    optimizer.begin_round(Kept())
    assert optimizer.torch.param_groups[0]["lr"] == 0.5


def test_a_state_that_cannot_be_kept_is_named(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    optimizer = LocalOptimizer(torch.optim.LBFGS(model.parameters()), keeps_state=True)

    def closure() -> float:
        loss = model(torch.ones(1, 1)).square().sum()
        loss.backward()
        return float(loss.detach())

    optimizer.torch.step(closure)
    with pytest.raises(AppFailed, match=r"LBFGS keeps '.*' as list"):
        optimizer.end_round()
