"""Runs that go well: real processes, mutual TLS, real data."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from integration.federation import Federation
from integration.trial import breast_cancer, trial_job
from safetensors.numpy import load_file


def test_a_run_trains_evaluates_and_exports(trio: Federation) -> None:
    state = trio.finish(trial_job(rounds=3))
    assert [record["round"] for record in state["rounds"]] == [1, 2, 3]
    assert state["version"] == 3
    for record in state["rounds"]:
        assert record["sites"] == 3
        assert record["missing"] == {}
        assert record["bytes_up"] > 0
        assert "loss" in record["train"]
        assert set(record["evaluate"]) >= {"loss", "accuracy"}
    assert state["rounds"][-1]["evaluate"]["accuracy"] > 0.9
    model = trio.model(state["run"])
    assert {name: array.shape for name, array in model.items()} == {
        "0.weight": (16, 30),
        "0.bias": (16,),
        "2.weight": (2, 16),
        "2.bias": (2,),
    }


def test_a_site_opens_its_data_once_a_run(trio: Federation) -> None:
    names = ("site-1", "site-2", "site-3")
    for name in names:
        trio.opened(name).unlink(missing_ok=True)
    trio.finish(trial_job(rounds=3))
    for name in names:
        lines = [line.split() for line in trio.opened(name).read_text().splitlines()]
        assert sorted(split for split, _ in lines) == ["test", "train"]
        assert len({pid for _, pid in lines}) == 1


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param('kind = "fedavg"', id="fedavg", marks=pytest.mark.chaos),
        pytest.param('kind = "fedavg"\ncodec = { kind = "int8" }', id="int8", marks=pytest.mark.chaos),
        pytest.param('kind = "fedavg"\ncodec = { kind = "bfloat16" }', id="bfloat16", marks=pytest.mark.chaos),
        pytest.param('kind = "fedavg"\ndownload = { kind = "int8" }', id="int8 down", marks=pytest.mark.chaos),
        pytest.param('kind = "fedprox"\nrule = { kind = "fedprox", mu = 0.1 }', id="fedprox", marks=pytest.mark.chaos),
        pytest.param(
            'kind = "fedadam"\noptimizer = { kind = "adam", lr = 0.01 }\ncodec = { kind = "int8" }', id="fedadam int8"
        ),
    ],
)
def test_equal_seeds_give_byte_equal_models(trio: Federation, strategy: str) -> None:
    first = trio.finish(trial_job(strategy=strategy))
    second = trio.finish(trial_job(strategy=strategy))
    other = trio.finish(trial_job(strategy=strategy, seed=4))
    assert trio.model_hash(first["run"]) == trio.model_hash(second["run"])
    assert trio.model_hash(first["run"]) != trio.model_hash(other["run"])


def test_versions_travel_by_the_codec_of_downloads(trio: Federation) -> None:
    """A quarter of the bytes; the model learns all the same, and people fetch it in full."""
    strategy = 'kind = "fedavg"\ndownload = { kind = "int8" }\ncodec = { kind = "int8" }'
    values = "hidden = 4096"
    plain, coded = (trio.finish(trial_job(rounds=3, values=values, strategy=s)) for s in ('kind = "fedavg"', strategy))
    for before, after in zip(plain["rounds"], coded["rounds"], strict=True):
        assert 0.25 < after["bytes_up"] / before["bytes_up"] < 0.28
    # Of a round, those bytes count that moved until its commit: the first version is fetched before the first round is.
    down_before, down_after = (sum(record["bytes_down"] for record in run["rounds"]) for run in (plain, coded))
    assert 0.25 < down_after / down_before < 0.28
    assert coded["rounds"][-1]["evaluate"]["accuracy"] > 0.9
    assert {array.dtype for array in trio.model(coded["run"]).values()} == {np.dtype("float32")}


def test_one_full_batch_step_of_three_sites_equals_one_central_step(trio: Federation) -> None:
    """float64, weighted by examples: to 1e-12."""
    job = trial_job(rounds=1, values='dtype = "float64"', work="steps = 1, full_batch = true")
    run = trio.finish(job)["run"]
    federated = trio.model(run)
    before = trio.model_of_version(run, 0)

    x, y = breast_cancer()
    mine = np.concatenate([np.arange(450)[start : 450 : 3 + start] for start in range(3)])
    model = torch.nn.Sequential(torch.nn.Linear(30, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2)).double()
    model.load_state_dict({name: torch.from_numpy(array) for name, array in before.items()})
    loss = torch.nn.functional.cross_entropy(model(torch.from_numpy(x[mine]).double()), torch.from_numpy(y[mine]))
    loss.backward()  # type: ignore[no-untyped-call]
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for name, tensor in model.state_dict().items():
        np.testing.assert_allclose(federated[name], tensor.numpy(), rtol=0, atol=1e-12)


def test_batch_norm_counters_keep_their_dtype_and_the_state_loads_strictly(trio: Federation) -> None:
    run = trio.finish(trial_job(values="batch_norm = true"))["run"]
    state = {name: torch.from_numpy(array) for name, array in trio.model(run).items()}
    assert state["1.num_batches_tracked"].dtype is torch.int64
    assert state["1.num_batches_tracked"].item() > 1
    assert state["1.running_mean"].abs().sum() > 0
    model = torch.nn.Sequential(
        torch.nn.Linear(30, 16), torch.nn.BatchNorm1d(16), torch.nn.Tanh(), torch.nn.Linear(16, 2)
    )
    model.load_state_dict(state, strict=True)


def test_runs_queue_for_the_places_of_the_sites(trio: Federation) -> None:
    """Each site works on one run at once: the second run waits for the first and then is done."""
    first, second = trio.submit(trial_job(rounds=200)), trio.submit(trial_job(rounds=1))
    trio.wait_until(first, lambda state: state["round"] >= 2)
    assert trio.status(second)["status"] == "queued"
    trio.atoll("stop", first, "--home", trio.researcher)
    assert trio.wait_for_end(first)["status"] == "stopped"
    assert trio.wait_for_end(second)["status"] == "finished"


def test_a_run_can_be_stopped_and_the_sites_are_free_again(trio: Federation) -> None:
    run = trio.submit(trial_job(rounds=100_000 // 2000, work="steps = 2000"))
    trio.wait_until(run, lambda state: state["status"] == "running")
    trio.atoll("stop", run, "--home", trio.researcher)
    state = trio.wait_for_end(run)
    assert state["status"] == "stopped"
    assert "ada" in state["reason"]["message"]
    trio.finish(trial_job(rounds=1))


def test_what_was_submitted_wrongly_is_said_before_anything_runs(trio: Federation) -> None:
    for job, words in {
        trial_job().replace("rounds = 2", "roundz = 2"): ["job.roundz", "'rounds'"],
        trial_job(more="[privacy]\ndifferential_privacy = { epsilon = 1.0 }"): ["not in this version"],
        trial_job(app="absent"): ["absent"],
        trial_job(values="learning_rate = 0.1"): ["learning_rate", "lr"],
        trial_job(schedule="min = 0"): ["min", "0"],
    }.items():
        path = trio.root / "bad.toml"
        path.write_text(job)
        done = trio.atoll("run", path, "--detach", "--home", trio.researcher, check=False)
        assert done.code != 0
        assert done.out == ""
        assert "Traceback" not in done.err
        for word in words:
            assert word in done.err, done.err


def test_a_run_that_improves_no_more_ends_early_and_its_best_version_is_kept(trio: Federation, tmp_path: Path) -> None:
    path, events = tmp_path / "job.toml", tmp_path / "events.jsonl"
    control = (
        '[control]\nbest = { metric = "accuracy", mode = "max" }\nearly_stop = { patience = 3, min_delta = 0.001 }\n'
    )
    path.write_text(trial_job(rounds=40, values="lr = 0.0", more=control))
    settings = trio.researcher / "user.toml"
    before = settings.read_text()
    settings.write_text(f'{before}\n[callbacks.log]\nkind = "json_lines"\npath = "{tmp_path / "log.jsonl"}"\n')
    try:
        run = trio.atoll("run", path, "--events", events, "--home", trio.researcher).out.strip()
    finally:
        settings.write_text(before)
    state = trio.status(run)
    assert (state["status"], state["version"], state["best_version"]) == ("finished", 4, 1)
    assert (
        "early stop after round 4: accuracy at the sites has not improved by more than 0.001"
        in state["reason"]["message"]
    )

    said = [json.loads(line) for line in events.read_text().splitlines()]
    assert [one["event"] for one in said if one["event"] != "Evaluated"] == [
        "RunStarted", *["RoundClosed", "VersionCommitted"] * 4, "RunEnded",
    ]  # fmt: skip
    heard = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [one["event"] for one in heard] == [one["event"] for one in said]
    assert [one["best"] for one in said if one["event"] == "Evaluated"] == [True, False, False, False]

    out = tmp_path / "best.safetensors"
    assert trio.atoll("model", run, "--best", "--out", out, "--home", trio.researcher).err.count("version 1") == 1
    for name, array in trio.model_of_version(run, 0).items():
        np.testing.assert_array_equal(load_file(out)[name], array)
    on_disk = {path.name for path in (trio.server_folder / "models" / run).glob("?.safetensors")}
    assert on_disk == {f"{version}.safetensors" for version in (0, 1, 2, 3, 4)}, "0, the best, and the newest three"
