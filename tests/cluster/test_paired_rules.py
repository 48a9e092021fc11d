"""Rules with a part at each site, through sessions as a worker holds them: what is kept, what counts, what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from samples.bench import Bench, MakeBench

from atoll.aggregation.lanes import ALL, Share
from atoll.aggregation.next_model import next_model
from atoll.aggregation.reducers.reduction import RoundTerms
from atoll.aggregation.sent import Sent
from atoll.cluster.messages import Train
from atoll.cluster.open_session import open_session
from atoll.cluster.run_session import RunSession
from atoll.wire.errors import AppFailed, BadManifest, LocalError
from atoll.wire.model_file import create, open_model
from atoll.wire.tensors import manifest_of, views

SITES = {"north": 16, "south": 24}
CONTROL = "scaffold.control/3.weight"


def ignore(done: int, total: int) -> None:
    pass


def next_version(bench: Bench, session: RunSession, updates: dict[str, int], *, base: Path, share: Share) -> Path:
    """The version that these updates, by file and weight, make of `base`."""
    strategy, manifest = session.strategy, session.manifest
    terms = RoundTerms(num_sites=len(updates), max_weight=max(updates.values()), bound=strategy.bound)
    total = strategy.reducer.init(session.layout, terms)
    for out, weight in updates.items():
        total.check(bench.update(out), weight)
        total.fold(out, bench.update(out), weight)
    path = bench.folder / f"{'-'.join(updates)}.safetensors"
    with open_model(base) as before, create(path, manifest) as new:
        state = strategy.optimizer.init(session.layout)
        next_model(
            total,
            optimizer=strategy.optimizer,
            state=state,
            base=before.map,
            out=new,
            manifest=manifest,
            lanes=strategy.lanes,
            share=share,
        )
    return path


def rule_state(bench: Bench, site: str) -> list[str]:
    return sorted(path.name for path in (bench.folder / f"state-{site}" / "rule").iterdir())


def sent(session: RunSession, bench: Bench, out: str, name: str) -> torch.Tensor:
    return Sent(session.layout, bench.update(out))[name]


def test_two_rounds_of_scaffold_with_the_second_round_done_again_after_a_restart(make_bench: MakeBench) -> None:
    bench = make_bench(kind="scaffold", sites=SITES, codec={"kind": "int8"})
    sessions = {site: open_session(bench.prepare(site)) for site in SITES}
    north = sessions["north"]
    weights = {site: s.train(bench.train(site), ignore).weight for site, s in sessions.items()}
    base = next_version(bench, north, weights, base=bench.base, share=ALL)
    with open_model(base) as version:
        control = views(version.manifest, version.map, writable=False)[CONTROL].clone()
    wanted = sum(weight * sent(sessions[site], bench, site, CONTROL) for site, weight in weights.items())
    torch.testing.assert_close(control, wanted / sum(weights.values()), rtol=0, atol=1e-12)
    assert control.abs().max() > 0

    def second(out: str) -> Train:
        return bench.train(out, base=base, round=2, counted_round=1)

    north.train(second("second"), ignore)
    north.train(second("twice"), ignore)
    restarted = open_session(bench.prepare("north"))
    restarted.train(second("restarted"), ignore)
    assert bench.update("second") == bench.update("twice") == bench.update("restarted")
    restarted.train(bench.train("third", base=base, round=3, counted_round=2), ignore)
    assert rule_state(bench, "north") == ["00000002.state.safetensors", "00000003.state.safetensors"]


@pytest.mark.parametrize("kind", ["scaffold", "feddyn"])
def test_a_round_whose_update_did_not_count_leaves_no_trace_in_the_next(make_bench: MakeBench, kind: str) -> None:
    bench = make_bench(kind=kind, work={"steps": 4, "batch_size": 8})
    session = open_session(bench.prepare("north"))
    session.train(bench.train("first"), ignore)
    session.train(bench.train("wanted", round=4, counted_round=1), ignore)
    wanted, before = bench.update("wanted"), bench.folder / "state-north"
    shutil.rmtree(before)

    session.train(bench.train("first"), ignore)
    for lost in (2, 3):  # late, and not in their versions
        session.train(bench.train(f"lost-{lost}", round=lost, counted_round=1), ignore)
        assert rule_state(bench, "north") == ["00000001.state.safetensors", f"{lost:08d}.state.safetensors"]
    session.train(bench.train("found", round=4, counted_round=1), ignore)
    assert bench.update("found") == wanted
    session.train(bench.train("none", round=4, counted_round=0), ignore)
    assert bench.update("none") != wanted


def test_state_that_is_gone_is_an_error_and_not_a_fresh_start(make_bench: MakeBench) -> None:
    bench = make_bench(kind="scaffold")
    session = open_session(bench.prepare("north"))
    with pytest.raises(LocalError, match="state of round 3 cannot be read"):
        session.train(bench.train("north", round=5, counted_round=3), ignore)


def test_lanes_are_no_part_of_the_model_that_is_judged(make_bench: MakeBench) -> None:
    bench = make_bench(kind="scaffold")
    session = open_session(bench.prepare("north"))
    plain = make_bench(kind="fedavg")
    metrics = open_session(plain.prepare("north")).evaluate(plain.evaluate(), ignore).metrics
    bench = make_bench(kind="scaffold")
    session = open_session(bench.prepare("north"))
    assert session.evaluate(bench.evaluate(), ignore).metrics == metrics
    assert manifest_of(session.model) == session.manifest.model
    lanes = [spec.name for spec in session.manifest if spec.role == "control"]
    assert sorted(lanes) == sorted(f"scaffold.control/{name}" for name, _ in session.model.named_parameters())


def test_tensors_that_stay_at_the_site_have_no_control(make_bench: MakeBench) -> None:
    bench = make_bench(kind="scaffold", local=["3.*"])
    session = open_session(bench.prepare("north"))
    lanes = {spec.name for spec in session.manifest if spec.role == "control"}
    assert lanes == {"scaffold.control/0.weight", "scaffold.control/0.bias"}
    session.train(bench.train("north"), ignore)


def test_the_first_round_of_scaffold_moves_the_model_as_fedavg_does(make_bench: MakeBench) -> None:
    values: dict[str, Any] = {}
    for kind in ("fedavg", "scaffold"):
        bench = make_bench(kind=kind)
        session = open_session(bench.prepare("north"))
        session.train(bench.train("north"), ignore)
        values[kind] = sent(session, bench, "north", "3.weight")
    assert torch.equal(values["fedavg"], values["scaffold"])


def test_a_site_whose_steps_have_no_formula_does_not_take_part(make_bench: MakeBench) -> None:
    bench = make_bench(app={"momentum": 0.9}, kind="fednova", rule={"kind": "fednova", "mu": 0.1})
    with pytest.raises(AppFailed, match=r"fednova cannot say .* momentum = 0\.9 with mu = 0\.1"):
        open_session(bench.prepare("north"))
    bench = make_bench(app={"momentum": 0.9}, kind="fednova", entry_point="keeping")
    session = open_session(bench.prepare("north"))
    session.train(bench.train("first"), ignore)
    with pytest.raises(AppFailed, match="keeps_optimizer = False in the app"):
        session.train(bench.train("second", round=2), ignore)


def test_fednova_goes_the_mean_of_the_steps(make_bench: MakeBench) -> None:
    bench = make_bench(kind="fednova", sites=SITES, work={"epochs": 1, "batch_size": 8})
    sessions = {site: open_session(bench.prepare(site)) for site in SITES}
    weights = {site: s.train(bench.train(site), ignore).weight for site, s in sessions.items()}
    path = next_version(bench, sessions["north"], weights, base=bench.base, share=ALL)
    with open_model(path) as new, open_model(bench.base) as old:
        found = views(new.manifest, new.map, writable=False)["0.weight"]
        before = views(old.manifest, old.map, writable=False)["0.weight"]
        by_step = sum(w * sent(sessions[site], bench, site, "0.weight") for site, w in weights.items()) / 40
        mean_steps = (16 * 2 + 24 * 3) / 40
        torch.testing.assert_close(found, before + mean_steps * by_step, rtol=0, atol=1e-12)


def test_a_model_without_the_lanes_of_its_rule_is_refused(make_bench: MakeBench) -> None:
    bench = make_bench(kind="fedavg")
    scaffold = bench.job.model_copy(update={"strategy": bench.job.strategy.model_copy(update={"kind": "scaffold"})})
    with pytest.raises(BadManifest, match=r'tensor "scaffold\.control/\d\.\w+" is a control of float64'):
        open_session(bench.prepare("north", job=scaffold.canonical().decode()))
