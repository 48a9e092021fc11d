"""SCAFFOLD against algorithm 1, option II, of Karimireddy et al. 2020 (arXiv:1910.06378), written out here."""

from __future__ import annotations

import pytest
import torch
from contracts.updates import whole_mean
from samples.paper_rounds import LR, NUM_FEATURES, Rounds, problems
from torch import Tensor

from atoll.aggregation.lanes import Share
from atoll.aggregation.reducers.reduction import Mergeable, RoundTerms

SITES = ("a", "b", "c")
STEPS = {"a": 4, "b": 7, "c": 2}
COHORTS = (("a", "b"), ("b", "c"), ("a", "b", "c"), ("c",), ("a", "c"))
CONTROL = "scaffold.control/weight"


def control(rounds: Rounds) -> Tensor:
    return rounds.tensor(CONTROL).reshape(-1)


def own(rounds: Rounds, site: str) -> Tensor:
    return rounds.kept[site].get("weight", torch.zeros(1, 3, dtype=torch.float64)).reshape(-1)


def close(found: Tensor, wanted: Tensor, most: float = 1e-11) -> bool:
    return bool((found - wanted).abs().max() < most)


def test_rounds_of_some_sites_are_those_of_the_paper() -> None:
    given = problems(*SITES)
    rounds = Rounds({"kind": "scaffold"}, given, STEPS)
    x, c = rounds.w_F, torch.zeros(3, dtype=torch.float64)
    controls = {site: torch.zeros(3, dtype=torch.float64) for site in SITES}
    for cohort in COHORTS:
        moves, shifts = [], []
        for site in cohort:
            y, k = x.clone(), STEPS[site]
            for _ in range(k):
                y = y - LR * (given[site].gradient(y) - controls[site] + c)  # line 10
            new = controls[site] - c + (x - y) / (k * LR)  # line 12, option II
            moves.append(y - x)
            shifts.append(new - controls[site])
            controls[site] = new
        x = x + sum(moves) / len(cohort)  # line 16, with a global step of 1
        c = c + len(cohort) / len(SITES) * sum(shifts) / len(cohort)  # line 17
        rounds.play(*cohort, share=Share(cohort=len(cohort) / len(SITES)))
        assert close(rounds.w_F, x)
        assert close(control(rounds), c)
        assert all(close(own(rounds, site), controls[site]) for site in SITES)
    assert c.abs().max() > 0.1


def test_sites_of_unequal_data_reach_the_optimum_that_fedavg_misses() -> None:
    given = problems(*SITES)
    a = sum(p.x.T @ p.x for p in given.values())
    optimum = torch.linalg.solve(a, sum(p.x.T @ p.y for p in given.values()))
    found = {kind: Rounds({"kind": kind}, given, STEPS) for kind in ("scaffold", "fedavg")}
    for rounds in found.values():
        for _ in range(40):
            rounds.play(*SITES)
    assert (found["scaffold"].w_F - optimum).norm() < 0.1 * (found["fedavg"].w_F - optimum).norm()


def test_the_servers_control_is_the_weighted_mean_of_the_sites_even_where_a_site_joins_late() -> None:
    weights = {"a": 1, "b": 5, "c": 2}
    rounds = Rounds({"kind": "scaffold"}, problems(*SITES), STEPS, weights)
    for cohort, share in (
        (("a", "b"), Share(cohort=1.0)),
        (("b",), Share(cohort=5 / 8, before=6 / 8)),  # c has joined
        (("a", "c"), Share(cohort=3 / 8)),
    ):
        rounds.play(*cohort, share=share)
    wanted = torch.stack([weights[site] * own(rounds, site) for site in SITES]).sum(0) / 8
    assert close(control(rounds), wanted)


def test_a_tree_makes_the_version_of_a_flat_federation() -> None:
    rounds = Rounds({"kind": "scaffold"}, problems(*SITES), STEPS)
    terms = RoundTerms(num_sites=3, max_weight=1, bound=1024.0)
    flat, tree, region = (rounds.made.reducer.init(rounds.layout, terms) for _ in range(3))
    assert isinstance(tree, Mergeable)
    assert isinstance(region, Mergeable)
    for site in SITES:
        payload = rounds.update(site)
        flat.fold(site, payload, 1)
        (tree if site == "a" else region).fold(site, payload, 1)
    partial = bytearray(region.partial_bytes)
    region.write_partial(partial)
    tree.check_partial(partial, 2, num_sites=2)
    tree.merge_partial("north", partial)
    assert torch.equal(whole_mean(flat), whole_mean(tree))
    assert whole_mean(flat).numel() == 2 * NUM_FEATURES


@pytest.mark.parametrize("codec", ["float32", "bfloat16", "int8", "int4"])
def test_a_lossy_codec_takes_the_two_sides_no_further_apart(codec: str) -> None:
    rounds = Rounds({"kind": "scaffold", "codec": {"kind": codec}}, problems(*SITES), STEPS, dtype=torch.float32)
    for cohort in COHORTS:
        rounds.play(*cohort, share=Share(cohort=len(cohort) / len(SITES)))
    wanted = torch.stack([own(rounds, site) for site in SITES]).mean(0)
    assert close(control(rounds), wanted, 1e-6)


def test_any_optimizer_takes_the_corrected_gradient_and_the_control_is_the_mean_gradient() -> None:
    """With weight decay option II would put the decay into the control; it is the same at every site."""
    given = problems("a")
    seen: list[Tensor] = []

    def adam(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        params[0].register_hook(lambda gradient: seen.append(gradient.clone()))  # type: ignore[no-untyped-call]
        return torch.optim.AdamW(params, lr=0.05, weight_decay=0.1)

    rounds = Rounds({"kind": "scaffold"}, given, STEPS, make_optimizer=adam)  # type: ignore[arg-type]
    rounds.play("a")
    assert close(own(rounds, "a"), torch.stack(seen).mean(0).reshape(-1))


def test_a_parameter_without_gradients_keeps_its_control() -> None:
    rounds = Rounds({"kind": "scaffold"}, problems("a"), STEPS)
    rounds.play("a")
    before = own(rounds, "a")
    rounds.model.weight.requires_grad_(False)
    rule = rounds.resolved().rule
    rule.begin(rounds.model)
    rule.before_step(rounds.model)
    rule.end(rounds.model)
    assert before.abs().max() > 0
    rounds.model.weight.requires_grad_(True)
    rounds.num_steps = {"a": 0}
    rounds.play("a")
    assert close(own(rounds, "a"), before, 1e-15)


def test_the_rule_goes_around_a_loop_of_ones_own_without_a_server() -> None:
    rounds, plain = (Rounds({"kind": kind}, problems("a"), STEPS) for kind in ("scaffold", "fedavg"))
    rounds.train("a", rounds.resolved().rule)
    plain.train("a", plain.resolved().rule)
    assert torch.equal(rounds.model.weight, plain.model.weight)
