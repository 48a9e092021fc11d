"""Two groups with FedAvg inside and momentum outside, against the same written by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from samples.bench import MakeBench
from samples.whole_rounds import Rounds, require_same_bits
from torch import Tensor, nn

from atoll.cluster.batches import batches
from atoll.cluster.run_session import RunSession
from atoll.cluster.seeds import training_seed

SITES = {"a": 24, "b": 40, "c": 32, "d": 48, "e": 16}
GROUPS = {"a": 0, "b": 0, "c": 1, "d": 1, "e": 1}
SCHEDULE = {"kind": "hierarchical", "label": "region", "groups": ["north", "south"], "rounds": 3}
OUTER = {"kind": "sgd", "lr": 0.8, "momentum": 0.9}


def rounds_of(make_bench: MakeBench, app: Mapping[str, Any], schedule: Mapping[str, Any], **strategy: Any) -> Rounds:
    bench = make_bench(
        app=dict(app),
        work={"epochs": 1, "batch_size": 8},
        sites=SITES,
        schedule={**SCHEDULE, **schedule},
        optimizer=OUTER,
        **strategy,
    )
    return Rounds(bench, tuple(SITES), dict(GROUPS))


def train_by_hand(session: RunSession, base: Mapping[str, Tensor], round_: int) -> Mapping[str, Tensor]:
    """A site's model after one epoch of plain SGD from `base`, with the data in the session's order."""
    model: nn.Module = session.app.model()
    model.load_state_dict(dict(base))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert session.training is not None
    seed = training_seed(session.job.job.seed, session.site, round_)
    for x, y in batches(session.app, session.training.dataset, session.training.work, seed):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]  # of torch
        optimizer.step()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def mean(models: list[Mapping[str, Tensor]], weights: list[int]) -> dict[str, Tensor]:
    return {
        name: torch.stack([model[name] * weight for model, weight in zip(models, weights, strict=True)]).sum(0)
        / sum(weights)
        for name in models[0]
    }


def test_fedavg_inside_and_momentum_outside_equal_the_same_by_hand(make_bench: MakeBench) -> None:
    """In float64, where the exact sum and this mean differ by less than 1e-12 after six rounds."""
    rounds = rounds_of(make_bench, {"dtype": "float64"}, {})
    shared = {name: nn.Parameter(tensor.clone()) for name, tensor in rounds.tensors(0).items()}
    outer = torch.optim.SGD(shared.values(), lr=0.8, momentum=0.9)
    for lap in range(2):
        start = {name: parameter.detach().clone() for name, parameter in shared.items()}
        groups = [dict(start), dict(start)]
        for number in range(1, 4):
            round_ = 3 * lap + number
            for group in range(2):
                sites = [site for site in SITES if GROUPS[site] == group]
                trained = [train_by_hand(rounds.sessions[site], groups[group], round_) for site in sites]
                groups[group] = mean(trained, [SITES[site] for site in sites])
            rounds.play()
            if number < 3:
                for group in range(2):
                    close(rounds.tensors(branch=group), groups[group])
                require_same_bits(rounds.tensors(), rounds.tensors(3 * lap))  # the common version stays
        combined = mean([groups[0], groups[1]], [64, 96])
        for name, parameter in shared.items():
            parameter.grad = start[name] - combined[name]
        outer.step()
        close(rounds.tensors(), {name: parameter.detach() for name, parameter in shared.items()})


def close(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, wanted[name], rtol=0, atol=1e-12)


def test_a_restart_at_any_round_changes_no_bit(make_bench: MakeBench) -> None:
    """The groups' optimizers go on, and so does the outer one."""
    options = {"rounds": 3, "inner_optimizer": {"kind": "adam", "lr": 0.05}}
    undisturbed = rounds_of(make_bench, {"batch_norm": True}, options)
    for _ in range(6):
        undisturbed.play()
    wanted = [undisturbed.tensors(), undisturbed.tensors(5, 0), undisturbed.tensors(5, 1)]
    again = rounds_of(make_bench, {"batch_norm": True}, options)
    for _ in range(6):
        again.play()
        again.start_again()
    for found, one in zip([again.tensors(), again.tensors(5, 0), again.tensors(5, 1)], wanted, strict=True):
        require_same_bits(found, one)
    assert not torch.equal(wanted[1]["1.weight"], wanted[2]["1.weight"])
