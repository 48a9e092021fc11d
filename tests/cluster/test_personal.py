"""Personal models at a site: trained as the paper writes it, judged beside the global one, and never sent."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from samples.bench import Bench, MakeBench
from torch import Tensor

from atoll.aggregation.strategy import resolve
from atoll.cluster.open_session import open_session
from atoll.cluster.run_session import RunSession
from atoll.cluster.site_state import SiteState
from atoll.wire.errors import ConfigError
from atoll.wire.job import parse_job

WORK = {"steps": 3, "full_batch": True}
LR, LAM = 0.1, 0.7
ROUNDS = 3


def ignore(done: int, total: int) -> None:
    pass


def personal_of(bench: Bench, round: int) -> dict[str, Tensor]:
    state = SiteState(bench.folder / "state-north").load(round + 1)
    return {name.removeprefix("personal/"): t for name, t in state.tensors.items() if name.startswith("personal/")}


def loss_of(session: RunSession, weights: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss on all of the site's data, and its gradients, at `weights`."""
    session.model.load_state_dict(weights)
    session.model.train()
    session.model.zero_grad()
    assert session.training is not None
    x, y = session.training.dataset[:]
    loss = session.app.loss(session.model(x), (x, y))
    loss.backward()  # type: ignore[no-untyped-call]  # of torch
    return loss.detach(), {name: p.grad.clone() for name, p in session.model.named_parameters() if p.grad is not None}


def test_ditto_is_the_algorithm_of_the_paper_over_rounds_and_a_restart(make_bench: MakeBench) -> None:
    """v <- v - lr (g(v) + lam (v - w)), with the version w that each round begins with."""
    bench = make_bench(kind="ditto", work=WORK, personal={"kind": "ditto", "lam": LAM})
    session, other = open_session(bench.prepare("north")), open_session(bench.prepare("north"))
    session.evaluate(bench.evaluate(), ignore)
    w = {name: tensor.clone() for name, tensor in session.model.state_dict().items()}  # version 0, in each round here
    v = dict(w)
    for round in range(1, ROUNDS + 1):
        for _ in range(WORK["steps"]):
            _, gradients = loss_of(other, v)
            v = {name: v[name] - LR * (gradients[name] + LAM * (v[name] - w[name])) for name in v}
        if round == ROUNDS:
            session = open_session(bench.prepare("north"))
        metrics = session.train(bench.train(f"r{round}", round=round), ignore).metrics
        assert metrics.keys() == {"loss", "personal_loss"}
        found = personal_of(bench, round)
        assert all((found[name] - v[name]).abs().max() < 1e-12 for name in v)
    found = personal_of(bench, ROUNDS)
    session.train(bench.train("again", round=ROUNDS), ignore)
    again = personal_of(bench, ROUNDS)
    assert all(torch.equal(again[name], found[name]) for name in v)


def test_what_is_sent_is_what_would_be_sent_without(make_bench: MakeBench) -> None:
    sent: list[bytes] = []
    for personal in ({"kind": "none"}, {"kind": "ditto"}, {"kind": "fine_tune", "epochs": 2}):
        bench = make_bench(app={"dropout": 0.3, "momentum": 0.9}, entry_point="keeping", personal=personal)
        session = open_session(bench.prepare("north"))
        session.train(bench.train("first"), ignore)
        session.evaluate(bench.evaluate(round=1), ignore)
        session.train(bench.train("second", round=2), ignore)
        sent.append(bench.update("first") + bench.update("second"))
    assert sent[0] == sent[1] == sent[2]


def test_both_models_are_judged_under_their_own_names(make_bench: MakeBench) -> None:
    plain = make_bench()
    wanted = open_session(plain.prepare("north")).evaluate(plain.evaluate(round=1), ignore).metrics
    bench = make_bench(kind="ditto")
    session = open_session(bench.prepare("north"))
    assert session.evaluate(bench.evaluate(), ignore).metrics == wanted  # there is no personal model yet
    session.train(bench.train("first"), ignore)
    metrics = session.evaluate(bench.evaluate(round=1), ignore).metrics
    assert metrics.keys() == {"accuracy", "loss", "personal_accuracy", "personal_loss"}
    assert {name: metrics[name] for name in wanted} == wanted
    assert metrics["personal_loss"] != metrics["loss"]
    restarted = open_session(bench.prepare("north"))
    assert restarted.evaluate(bench.evaluate(round=1), ignore).metrics == metrics


def test_fine_tuning_is_local_training_of_the_version_that_is_judged(make_bench: MakeBench) -> None:
    bench = make_bench(work={"steps": 1}, personal={"kind": "fine_tune", "steps": 3})
    session, other = open_session(bench.prepare("north")), open_session(bench.prepare("north"))
    assert session.training is not None
    own = session.training.personal
    assert own is not None
    assert own.work.num_steps == 3
    metrics = session.evaluate(bench.evaluate(), ignore).metrics
    tuned = {name: tensor.clone() for name, tensor in session.model.state_dict().items()}
    assert session.evaluate(bench.evaluate(), ignore).metrics == metrics
    other.evaluate(bench.evaluate(), ignore)
    assert all(torch.equal(other.model.state_dict()[name], value) for name, value in tuned.items())
    assert not (bench.folder / "state-north").exists()
    assert metrics["personal_loss"][0] < metrics["loss"][0]
    assert math.isfinite(metrics["personal_accuracy"][0])


def test_a_tensor_of_the_sites_own_is_not_pulled_to_what_nobody_trains(make_bench: MakeBench) -> None:
    bench = make_bench(work=WORK, local=["3.*"], personal={"kind": "ditto", "lam": 1e3, "steps": 1})
    session = open_session(bench.prepare("north"))
    session.train(bench.train("first"), ignore)
    session.train(bench.train("second", round=2), ignore)
    session.train(bench.train("third", round=3), ignore)
    largest = {name: tensor.abs().max().item() for name, tensor in personal_of(bench, 3).items()}
    assert largest["0.weight"] > 10  # lr lam = 100 overshoots by as much in each step
    assert largest["3.weight"] < 2


@pytest.mark.parametrize(
    ("personal", "key", "words"),
    [
        ({"kind": "ditto", "lam": -1}, "strategy.personal.lam", "wanted at least 0"),
        ({"kind": "ditto", "epochs": 1, "steps": 1}, "strategy.personal", "give epochs or steps, not both"),
        ({"kind": "fine_tune", "epochs": 0}, "strategy.personal.epochs", ""),
        ({"kind": "dito"}, "strategy.personal.kind", "did you mean 'ditto'"),
    ],
)
def test_bad_values_are_named(personal: dict[str, Any], key: str, words: str) -> None:
    table = {"job": {"name": "x", "app": "x", "rounds": 1}, "strategy": {"personal": personal}}
    with pytest.raises(ConfigError) as caught:
        resolve(parse_job(table))
    assert caught.value.key == key
    assert words in str(caught.value)
