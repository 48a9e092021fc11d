"""Faults and attackers: who is struck and when, what a lie does to batches and updates, and which reducers stand it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from samples.simulated import Points, points_job
from torch.utils.data import DataLoader, TensorDataset

import atoll
from atoll.simulations.clock import Speeds
from atoll.simulations.faults import Backdoor, Fail, Faults, FreeRide, SignFlip, Slow, load_faults
from atoll.simulations.lies import triggered
from atoll.simulations.results import Result
from atoll.wire.errors import ConfigError

SITES = 6
NAMES = [f"site-{number}" for number in range(1, SITES + 1)]
QUORUM = {"kind": "rounds", "min": SITES, "quorum": 1}


def run(job: dict[str, Any] | None = None, **options: Any) -> Result:
    return atoll.simulate(job or points_job(), **{"app": Points, "sites": SITES, "source": {}, **options})


def moved(result: Result, start: Result) -> dict[str, torch.Tensor]:
    """What one round has changed in the model, by trained tensor."""
    names = [name for name, tensor in result.model.items() if tensor.is_floating_point() and "running" not in name]
    return {name: result.model[name].double() - start.model[name].double() for name in names}


@pytest.fixture(scope="module")
def start() -> Result:
    """The first version, as a run has it in which nobody moves."""
    job = points_job(rounds=1) | {"app": {"lr": 0.0}}
    return run(job)


def test_faults_strike_the_sites_and_rounds_that_they_say() -> None:
    faults = Faults(
        [
            Fail(sites=["site-2"], rounds=[2, 4]),
            SignFlip(share=0.5, from_round=3, to_round=5, seed=1),
            Slow(sites=["site-2"], factor=2.0, chance=0.5),
        ],
        NAMES,
    )
    fails = [round_ for round_ in range(1, 8) if any(f.kind == "fail" for f in faults.of("site-2", round_))]
    assert fails == [2, 4]
    for round_, number in [(2, 0), (3, 3), (5, 3), (6, 0)]:
        assert sum(any(f.kind == "sign_flip" for f in faults.of(name, round_)) for name in NAMES) == number
    slow = [any(f.kind == "slow" for f in faults.of("site-2", round_)) for round_ in range(1, 400)]
    assert 0.4 < np.mean(slow) < 0.6


def test_a_site_that_fails_after_some_steps_is_missing_with_its_reason_and_takes_their_time() -> None:
    result = run(
        points_job(schedule=QUORUM), speeds=Speeds(step_s=1.0), faults=[Fail(sites=["site-2"], rounds=[2], step=2)]
    )
    assert [list(entry.missing) for entry in result.rounds] == [[], ["site-2"]]
    assert result.rounds[1].missing["site-2"] == "failed round 2 after 2 steps, as its fault says"
    alone = run(points_job(rounds=1, min_sites=1), speeds=Speeds(step_s=1.0), sites=1, faults=[Fail(share=1.0, step=2)])
    assert (alone.status, alone.simulated_s) == ("failed", 2.0)


def test_a_site_that_is_slow_from_a_step_on_takes_longer_by_what_follows() -> None:
    slow = Slow(sites=["site-6"], rounds=[1], step=1, factor=10.0, seconds=5.0)
    result = run(speeds=Speeds(step_s=1.0), faults=[slow])  # three steps
    assert [entry.simulated_s for entry in result.rounds] == [1.0 + 2 * 10.0 + 5.0, 26.0 + 3.0]
    with pytest.raises(ConfigError, match=r"fault\.0\.factor = 10: optimizer steps take no simulated time"):
        run(faults=[Slow(sites=["site-6"], factor=10.0)])


@pytest.mark.parametrize("codec", ["native", "int8", "top_k"])
def test_updates_that_all_sites_lie_about_move_the_model_as_the_lie_says(start: Result, codec: str) -> None:
    options = {"top_k": {"kind": "top_k", "fraction": 0.5}}.get(codec, {"kind": codec})
    job = points_job(rounds=1, codec=options)
    honest = moved(run(job), start)
    flipped = moved(run(job, faults=[SignFlip(share=1.0, strength=2.0)]), start)
    scaled = moved(run(job, faults=[{"kind": "scale", "share": 1.0, "strength": 2.0}]), start)
    still = moved(run(job, faults=[FreeRide(share=1.0)]), start)
    assert max(float(tensor.abs().max()) for tensor in honest.values()) > 0.01
    for name, tensor in honest.items():
        tolerance = 1e-6 if codec != "int8" else 0.03 * float(tensor.abs().max()) + 1e-6
        assert torch.allclose(flipped[name], -2.0 * tensor, atol=tolerance), name
        assert torch.allclose(scaled[name], 2.0 * tensor, atol=tolerance), name
        assert not still[name].any()


def test_a_free_rider_takes_no_time_and_its_noise_repeats(start: Result) -> None:
    ride = [FreeRide(share=1.0, deviation=0.1)]
    one, again = (run(points_job(rounds=1), speeds=Speeds(step_s=1.0), faults=ride) for _ in range(2))
    assert one.simulated_s == 0.0
    assert one.model_bytes == again.model_bytes
    values = torch.cat([tensor.flatten() for tensor in moved(one, start).values()])
    assert 0.02 < float(values.std()) < 0.07  # 0.1 / sqrt(6)


def test_flipped_labels_are_those_of_the_batches_and_of_nothing_else() -> None:
    """A class that is trained as itself: 2 - c swaps 0 and 2, which the model then takes for each other."""
    flip = {"kind": "label_flip", "share": 1.0, "classes": 3}
    result = run(points_job(rounds=10), faults=[flip])
    assert result.metrics("accuracy")[10] < 0.45  # honest: above 0.6; the test data is not flipped
    some = run(faults=[{**flip, "fraction": 0.0}])
    assert some.model_bytes == run().model_bytes
    late = run(faults=[{**flip, "from_round": 3}])
    assert late.model_bytes == run().model_bytes
    failed = run(faults=[{**flip, "classes": 2}])
    assert "label_flip at site-1: a label is 2, and classes = 2 says 0 to 1" in failed.reason


def test_a_backdoor_is_learnt_and_leaves_the_rest() -> None:
    door = Backdoor(sites=["site-1", "site-2"], features=[3], value=8.0, target=1, fraction=0.5, strength=3.0)
    success = {}
    for name, faults in {"honest": [], "attacked": [door]}.items():
        result = run(points_job(rounds=12), faults=faults)
        model = Points(Points.Config(), {}).model()
        model.load_state_dict(result.model)
        model.eval()
        dataset = Points(Points.Config(), {}).data("test")
        assert isinstance(dataset, TensorDataset)
        ((x, y),) = DataLoader(triggered(dataset, door), batch_size=1000)
        success[name] = float((model(x).argmax(dim=1) == y).float().mean())
        assert result.metrics("accuracy")[12] > 0.6
    assert success["attacked"] > 0.9
    assert success["honest"] < 0.6


def test_a_robust_reducer_keeps_what_the_mean_loses() -> None:
    liars = [SignFlip(share=1 / 3, strength=10.0)]
    accuracy = {
        reducer: run(points_job(rounds=10, reducer={"kind": reducer}), faults=liars).metrics("accuracy").get(10, 0.0)
        for reducer in ("mean", "median")
    }
    assert accuracy["median"] > 0.6
    assert accuracy["mean"] < 0.45


def test_the_same_lies_come_from_every_engine() -> None:
    faults = [
        {"kind": "label_flip", "share": 0.5, "classes": 3, "fraction": 0.5},
        {"kind": "noise", "sites": ["site-1"], "deviation": 0.1},
        {"kind": "fail", "sites": ["site-2"], "rounds": [1]},
    ]
    job = points_job(schedule=QUORUM)
    one, several = (run(job, faults=faults, engine=engine) for engine in ("sequential", "processes"))
    assert one.model_bytes == several.model_bytes
    assert one.model_bytes != run(job).model_bytes


BAD = {
    'kind = "sign_flop"\nsites = ["site-1"]': (
        "fault.0.kind",
        r"line 2: fault\.0\.kind = 'sign_flop': wanted one of fail, slow,",
    ),
    'kind = "scale"\nsites = ["site-1"]\nstrenght = 2': ("fault.0.strenght", r"strength"),
    'kind = "fail"\nshare = 1.5': ("fault.0.share", r"wanted at most 1"),
    'kind = "fail"\nshare = "0.5"': ("fault.0.share", r"wanted a number"),
    'kind = "fail"\nsites = ["site-1"]\nshare = 0.5': ("fault.0", r"wanted either sites"),
    'kind = "fail"': ("fault.0", r"wanted either sites"),
    'kind = "fail"\nshare = 0.5\nfrom_round = 3\nto_round = 2': ("fault.0", r"to_round = 2 is before from_round = 3"),
    'kind = "label_flip"\nshare = 0.5': ("fault.0.classes", r"classes"),
}


@pytest.mark.parametrize(("text", "key", "words"), [(text, *wanted) for text, wanted in BAD.items()], ids=list(BAD))
def test_a_bad_fault_names_file_key_and_bound(tmp_path: Path, text: str, key: str, words: str) -> None:
    path = tmp_path / "faults.toml"
    path.write_text(f"[[fault]]\n{text}\n")
    with pytest.raises(ConfigError, match=words) as caught:
        load_faults(path)
    assert str(path) in str(caught.value)
    assert caught.value.key == key


def test_a_file_of_faults_is_read_and_names_its_strangers(tmp_path: Path) -> None:
    path = tmp_path / "faults.toml"
    path.write_text('[[fault]]\nkind = "fail"\nsites = ["site-1"]\nrounds = [1]\n')
    assert list(run(points_job(schedule=QUORUM), faults=path).rounds[0].missing) == ["site-1"]
    path.write_text('[[fault]]\nkind = "fail"\nsites = ["harbour"]\n')
    with pytest.raises(ConfigError, match=r"fault\.0\.sites names harbour, which no site is called"):
        run(faults=path)
    path.write_text("[faults]\n")
    with pytest.raises(ConfigError, match=r"wanted tables \[\[fault\]\] and nothing else; it has faults"):
        load_faults(path)
