"""FedDyn against algorithm 1 of Acar et al. 2021 (arXiv:2111.04263), written out here."""

from __future__ import annotations

import pytest
import torch
from samples.paper_rounds import LR, Rounds, problems

from atoll.aggregation.lanes import Share
from atoll.aggregation.strategy import resolve
from atoll.wire.errors import ConfigError
from atoll.wire.job import parse_job

SITES = ("a", "b", "c", "d")
STEPS = {"a": 4, "b": 7, "c": 2, "d": 5}
COHORTS = (("a", "b"), ("b", "c", "d"), ("a", "b", "c", "d"), ("c",), ("a", "c"))
ALPHA = 0.3


def feddyn(**more: object) -> dict[str, object]:
    return {"kind": "feddyn", "rule": {"kind": "feddyn", "alpha": ALPHA}, **more}


def test_rounds_of_some_sites_are_those_of_the_paper() -> None:
    given = problems(*SITES)
    rounds = Rounds(feddyn(), given, STEPS)
    theta, h = rounds.w_F, torch.zeros(3, dtype=torch.float64)
    gradients = {site: torch.zeros(3, dtype=torch.float64) for site in SITES}
    for cohort in COHORTS:
        local = {}
        for site in cohort:
            y = theta.clone()
            for _ in range(STEPS[site]):  # descends L_k(y) - <gradient_k, y> + alpha / 2 ||y - theta||^2
                y = y - LR * (given[site].gradient(y) - gradients[site] + ALPHA * (y - theta))
            gradients[site] = gradients[site] - ALPHA * (y - theta)
            local[site] = y
        h = h - ALPHA / len(SITES) * sum(y - theta for y in local.values())
        theta = sum(local.values()) / len(cohort) - h / ALPHA
        rounds.play(*cohort, share=Share(cohort=len(cohort) / len(SITES)))
        assert (rounds.w_F - theta).abs().max() < 1e-10
        assert all((rounds.kept[s]["weight"] - gradients[s]).abs().max() < 1e-11 for s in SITES if rounds.kept[s])
    assert h.abs().max() > 0.01


def test_the_servers_state_is_the_mean_of_the_sites_through_a_lossy_codec() -> None:
    rounds = Rounds(feddyn(codec={"kind": "int8"}), problems(*SITES), STEPS, dtype=torch.float32)
    for cohort in COHORTS:
        rounds.play(*cohort, share=Share(cohort=len(cohort) / len(SITES)))
    h = ALPHA * rounds.optimizer_state.tensors["float32.h"]
    mean = sum(rounds.kept[site]["weight"] for site in SITES) / len(SITES)
    assert (h - mean.reshape(-1)).abs().max() < 1e-5  # type: ignore[union-attr]
    assert h.abs().max() > 0.01


def test_it_stays_at_the_optimum_that_fedavg_leaves() -> None:
    given = problems(*SITES)
    a = sum(p.x.T @ p.x for p in given.values())
    optimum = torch.linalg.solve(a, sum(p.x.T @ p.y for p in given.values()))
    many: dict[str, int] = dict.fromkeys(SITES, 12)
    found = {"feddyn": Rounds(feddyn(), given, many), "fedavg": Rounds({"kind": "fedavg"}, given, many)}
    for rounds in found.values():
        for _ in range(25):
            rounds.play(*SITES)
    assert (found["feddyn"].w_F - optimum).norm() < 0.1 * (found["fedavg"].w_F - optimum).norm()


@pytest.mark.parametrize(
    "strategy",
    [
        {"rule": {"kind": "feddyn"}},
        {"optimizer": {"kind": "feddyn"}},
        {"kind": "feddyn", "optimizer": {"kind": "adam"}},
        {"kind": "feddyn", "rule": {"kind": "fedprox", "mu": 0.1}},
    ],
)
def test_one_half_of_it_is_refused(strategy: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"strategy\.rule = .* with strategy\.optimizer = .*take feddyn for both"):
        resolve(parse_job({"job": {"name": "x", "app": "x", "rounds": 1}, "strategy": strategy}))


@pytest.mark.parametrize("alpha", [0, -1, 1e7, "much"])
def test_a_bad_alpha_is_named(alpha: object) -> None:
    strategy = {"kind": "feddyn", "rule": {"kind": "feddyn", "alpha": alpha}}
    with pytest.raises(ConfigError, match=r"strategy\.rule\.alpha") as caught:
        resolve(parse_job({"job": {"name": "x", "app": "x", "rounds": 1}, "strategy": strategy}))
    assert caught.value.key == "strategy.rule.alpha"
