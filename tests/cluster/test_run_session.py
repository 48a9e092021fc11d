"""Rounds of real training in this process: the mathematics, the bytes, and what is refused before it is sent."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from samples.bench import Bench, MakeBench

from atoll.aggregation.next_model import next_model
from atoll.aggregation.round_sum import RoundSum
from atoll.cluster.messages import Trained
from atoll.cluster.open_session import open_session
from atoll.cluster.run_session import RunSession
from atoll.wire.errors import AppFailed, BadManifest, BadUpdate, ConfigError, LocalError, Malformed, NotAllowed
from atoll.wire.job import parse_job
from atoll.wire.model_file import create, open_model
from atoll.wire.tensors import load_state, views


def ignore(done: int, total: int) -> None:
    pass


def combine(bench: Bench, sessions: list[RunSession], results: list[Trained], out: Path) -> None:
    """What the server does with a round's updates: check, fold, next model."""
    strategy, manifest = sessions[0].strategy, sessions[0].manifest
    largest = max(result.weight for result in results)
    total = RoundSum(sessions[0].layout, num_sites=len(sessions), max_weight=largest, bound=strategy.bound)
    for session, result in zip(sessions, results, strict=True):
        payload = bench.update(session.site)
        total.check(payload, result.weight)
        total.fold(session.site, payload, result.weight)
    with open_model(bench.base) as base, create(out, manifest) as new:
        state = strategy.optimizer.init(sessions[0].layout)
        next_model(total, optimizer=strategy.optimizer, state=state, base=base.map, out=new, manifest=manifest)


def test_three_sites_one_full_batch_step_equal_one_central_step(make_bench: MakeBench, tmp_path: Path) -> None:
    sites = {"north": 13, "south": 40, "west": 7}
    bench = make_bench(sites=sites, work={"epochs": 1, "full_batch": True})
    sessions = [open_session(bench.prepare(site)) for site in sites]
    assert [session.prepared().max_weight for session in sessions] == [13, 40, 7]
    results = [session.train(bench.train(session.site), ignore) for session in sessions]
    assert [result.weight for result in results] == [13, 40, 7]
    combine(bench, sessions, results, tmp_path / "version-1.safetensors")

    arrays = [np.load(bench.data(site)) for site in sites]
    x = torch.from_numpy(np.concatenate([a["x_train"] for a in arrays]))
    y = torch.from_numpy(np.concatenate([a["y_train"] for a in arrays]))
    model = sessions[0].app.model()
    with open_model(bench.base) as base:
        load_state(sessions[0].manifest, base.map, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]  # of torch
    optimizer.step()

    with open_model(tmp_path / "version-1.safetensors") as federated:
        found = views(federated.manifest, federated.map, writable=False)
        for name, central in model.state_dict().items():
            assert central.dtype is torch.float64
            torch.testing.assert_close(found[name], central, rtol=0, atol=1e-12)


def test_batch_norm_keeps_its_dtypes_and_loads_strictly(make_bench: MakeBench, tmp_path: Path) -> None:
    sites = {"north": 24, "south": 40}
    bench = make_bench(app={"batch_norm": True, "dtype": "float32"}, sites=sites)
    sessions = [open_session(bench.prepare(site)) for site in sites]
    results = [session.train(bench.train(session.site), ignore) for session in sessions]
    combine(bench, sessions, results, tmp_path / "version-1.safetensors")
    model = sessions[0].app.model()
    with open_model(tmp_path / "version-1.safetensors") as version:
        found = {name: tensor.clone() for name, tensor in views(version.manifest, version.map, writable=False).items()}
    model.load_state_dict(found, strict=True)
    assert found["0.num_batches_tracked"].dtype is torch.int64
    assert found["0.num_batches_tracked"].item() == 2 * 5
    assert found["0.running_mean"].dtype is torch.float32


def test_local_buffers_stay_at_the_site_over_rounds_and_restarts(make_bench: MakeBench) -> None:
    bench = make_bench(app={"batch_norm": True}, buffers="local")
    session = open_session(bench.prepare("north"))
    session.train(bench.train("first"), ignore)
    own = session.model.state_dict()["0.running_mean"].clone()
    assert own.abs().max() > 0
    session.train(bench.train("second", round=2), ignore)
    again = open_session(bench.prepare("north"))
    again.evaluate(bench.evaluate(round=1), ignore)
    assert torch.equal(again.model.state_dict()["0.running_mean"], own)
    again.train(bench.train("second-again", round=2), ignore)
    assert bench.update("second") == bench.update("second-again")


def test_tensors_of_its_own_stay_at_the_site_over_rounds_and_restarts(make_bench: MakeBench) -> None:
    """FedBN by name: a norm's weights and statistics are trained here, and neither sent nor replaced by the base's."""
    bench = make_bench(app={"batch_norm": True, "dtype": "float32"}, local=["0.*"])
    session = open_session(bench.prepare("north"))
    assert not session.layout.raws
    assert {entry.spec.name for entry in session.layout.means} == {"1.weight", "1.bias", "4.weight", "4.bias"}
    before = session.model.state_dict()["0.weight"].clone()
    session.train(bench.train("first"), ignore)
    own = {name: value.clone() for name, value in session.model.state_dict().items() if name.startswith("0.")}
    assert not torch.equal(own["0.weight"], before)
    session.train(bench.train("second", round=2), ignore)
    again = open_session(bench.prepare("north"))
    again.evaluate(bench.evaluate(round=1), ignore)
    assert all(torch.equal(again.model.state_dict()[name], value) for name, value in own.items())
    again.train(bench.train("second-again", round=2), ignore)
    assert bench.update("second") == bench.update("second-again")


@pytest.mark.parametrize("codec", ["native", "float32", "bfloat16", "int8"])
def test_equal_seeds_give_equal_bytes(make_bench: MakeBench, codec: str) -> None:
    bench = make_bench(app={"dropout": 0.3}, codec={"kind": codec})
    session = open_session(bench.prepare("north"))
    session.train(bench.train("first"), ignore)
    torch.rand(3)  # what happens in between does not matter
    session.train(bench.train("other", round=2), ignore)
    session.train(bench.train("again"), ignore)
    fresh = open_session(bench.prepare("north"))
    fresh.train(bench.train("fresh"), ignore)
    assert bench.update("first") == bench.update("again") == bench.update("fresh")
    assert bench.update("first") != bench.update("other")


@pytest.mark.parametrize(("entry_point", "same"), [("probe", True), ("keeping", False)])
def test_momentum_starts_anew_unless_the_app_keeps_it(make_bench: MakeBench, entry_point: str, same: bool) -> None:
    work = {"steps": 1, "full_batch": True}  # the same gradient in each round
    bench = make_bench(app={"momentum": 0.9}, entry_point=entry_point, work=work)
    session = open_session(bench.prepare("north"))
    session.train(bench.train("first"), ignore)
    session.train(bench.train("second", round=2), ignore)
    assert (bench.update("first") == bench.update("second")) is same
    session.train(bench.train("second-again", round=2), ignore)
    assert bench.update("second") == bench.update("second-again")


def test_a_value_beyond_the_bound_is_refused_before_it_is_sent(make_bench: MakeBench) -> None:
    bench = make_bench(app={"fault": "explode"})
    session = open_session(bench.prepare("north"))
    with pytest.raises(BadUpdate, match=r'tensor "\d\.\w+" moved by .* the bound is 1024') as refused:
        session.train(bench.train("update"), ignore)
    assert refused.value.field in {"0.weight", "0.bias", "3.weight", "3.bias"}
    assert not (bench.folder / "update").exists()


def test_a_loss_that_is_not_a_number_is_refused(make_bench: MakeBench) -> None:
    bench = make_bench(app={"fault": "nan"})
    with pytest.raises(BadUpdate, match="'loss' is nan") as refused:
        open_session(bench.prepare("north")).train(bench.train("update"), ignore)
    assert refused.value.field == "loss"


def test_a_task_may_change_the_work_within_the_promise(make_bench: MakeBench) -> None:
    bench = make_bench(work={"steps": 10, "batch_size": 8})
    session = open_session(bench.prepare("north"))
    assert session.prepared().max_weight == 80
    assert session.train(bench.train("less", config={"steps": 4}), ignore).weight == 32
    assert session.train(bench.train("pass", config={"epochs": 3}), ignore).weight == 40
    with pytest.raises(Malformed, match="at most 80"):
        session.train(bench.train("more", config={"steps": 11}), ignore)
    with pytest.raises(Malformed, match="did you mean 'steps'"):
        session.train(bench.train("typo", config={"step": 1}), ignore)


def test_evaluation_only_opens_no_training_data(make_bench: MakeBench) -> None:
    bench = make_bench()
    np.savez(bench.data("server"), x_test=np.zeros((5, 4)), y_test=np.zeros(5, dtype=np.int64))
    session = open_session(bench.prepare("server", training=False, rounding_seed_hex=""))
    assert (session.prepared().max_weight, session.prepared().update_bytes) == (0, 0)
    metrics = session.evaluate(bench.evaluate(), ignore).metrics
    assert metrics["accuracy"][1] == metrics["loss"][1] == 5
    with pytest.raises(NotAllowed, match="evaluation only"):
        session.train(bench.train("update"), ignore)


def test_evaluation_without_test_data_has_no_metrics(make_bench: MakeBench) -> None:
    bench = make_bench()
    arrays = np.load(bench.data("north"))
    np.savez(bench.data("untested"), x_train=arrays["x_train"], y_train=arrays["y_train"])
    session = open_session(bench.prepare("untested"))
    assert session.evaluate(bench.evaluate(), ignore).metrics == {}


def test_the_models_must_be_the_runs(make_bench: MakeBench) -> None:
    bench = make_bench()
    other = make_bench(app={"batch_norm": True})
    with pytest.raises(BadManifest):
        open_session(other.prepare("north", job=bench.job.canonical().decode()))
    session = open_session(other.prepare("north"))
    with pytest.raises(LocalError, match="cannot be read"):
        session.train(dataclasses.replace(other.train("update"), base_path="/nowhere.safetensors"), ignore)


def test_a_site_without_training_data_says_so(make_bench: MakeBench) -> None:
    bench = make_bench()
    np.savez(bench.data("empty"), x_train=np.zeros((0, 4)), y_train=np.zeros(0, dtype=np.int64))
    np.savez(bench.data("none"), x_test=np.zeros((5, 4)), y_test=np.zeros(5, dtype=np.int64))
    with pytest.raises(AppFailed, match="is empty"):
        open_session(bench.prepare("empty"))
    with pytest.raises(AppFailed, match="nothing to train on"):
        open_session(bench.prepare("none"))


def test_room_for_the_update_is_taken_before_the_work_is_done(make_bench: MakeBench, tmp_path: Path) -> None:
    bench = make_bench()
    session = open_session(bench.prepare("north"))
    steps: list[int] = []
    request = dataclasses.replace(bench.train("north"), out_path=str(tmp_path / "absent" / "update"))
    with pytest.raises(LocalError, match="cannot be written"):
        session.train(request, lambda done, total: steps.append(done))
    assert not steps


def test_rounding_needs_its_secret(make_bench: MakeBench) -> None:
    bench = make_bench()
    with pytest.raises(Malformed, match="32"):
        open_session(bench.prepare("north", rounding_seed_hex="07"))


def test_a_round_is_as_had_the_job_said_so_from_the_start(make_bench: MakeBench) -> None:
    """Work, rule and values of the app, from a round on; what the site promises is the most of all rounds."""
    changed = make_bench(app={"lr": 0.5}, work={"steps": 2, "batch_size": 8}, rule={"kind": "fedprox", "mu": 0.3})
    session = open_session(changed.prepare("north"))
    session.train(changed.train("wanted", round=3), ignore)
    wanted = changed.update("wanted")

    bench = make_bench(work={"steps": 1, "batch_size": 8}, rule={"kind": "fedprox", "mu": 0.1})
    overrides = [
        {"from_round": 2, "strategy": {"work": {"steps": 9}}},
        {"from_round": 3, "app": {"lr": 0.5}, "strategy": {"work": {"steps": 2}, "rule": {"mu": 0.3}}},
    ]
    whole = parse_job({**bench.job.model_dump(mode="json", exclude_none=True), "control": {"override": overrides}})
    told = bench.prepare("north", job=whole.canonical().decode())
    session = open_session(told)
    assert session.prepared().max_weight == 72, "9 steps of 8 are the most"
    assert session.at(1) is session
    second = session.at(2)
    assert second is not None
    assert second.app is session.app
    assert second.train(bench.train("second", round=2), ignore).weight == 72
    assert second.prepared().max_weight == 72
    assert second.at(3) is None, "other values of the app: all is loaded anew"
    open_session(told, 3).train(bench.train("third", round=3), ignore)
    assert bench.update("third") == wanted
    assert second.at(1) is not None


def test_values_that_the_app_does_not_take_are_refused_on_joining(make_bench: MakeBench) -> None:
    bench = make_bench()
    table = {
        **bench.job.model_dump(mode="json", exclude_none=True),
        "control": {"override": [{"from_round": 2, "app": {"rl": 1}}]},
    }
    with pytest.raises(ConfigError, match=r"app\.rl"):
        open_session(bench.prepare("north", job=parse_job(table).canonical().decode()))
