"""Values by round, warm start and resume: with real processes, through the commands of people."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from integration.federation import Federation
from integration.trial import trial_job
from safetensors.numpy import load_file

pytestmark = pytest.mark.chaos  # what they are made of has tests of its own

ADAM = 'kind = "fedadam"\nlocal = ["2.*"]'  # state at the server, and tensors that stay at their site


def follow(federation: Federation, job: str, *arguments: str | Path, code: int = 0) -> str:
    """What `atoll run` says of a job that it follows to its end."""
    path = federation.root / "followed.toml"
    path.write_text(job)
    done = federation.atoll("run", path, *arguments, "--home", federation.researcher, check=False)
    assert done.code == code, f"{done.err}\n{federation.logs()}"
    return done.out.strip() if code == 0 else done.err


def test_values_of_a_job_change_from_a_round_on(trio: Federation, tmp_path: Path) -> None:
    """At the sites (rate and work, which then weighs more) and at the server (its optimizer)."""
    more = """
[[control.override]]
from_round = 2
app.lr = 0.0
strategy.work.steps = 40

[[control.override]]
from_round = 3
app.lr = 0.1
strategy.optimizer.lr = 1e-3
"""
    strategy = 'kind = "fedavg"\noptimizer = { kind = "sgd", lr = 1.0 }'
    state = trio.finish(trial_job(rounds=3, strategy=strategy, more=more))
    examples = sum(len(range(start, 450, 3 + start)) for start in range(3))
    weights = [record["weight"] for record in state["rounds"]]
    assert weights[0] == examples
    assert weights[1] == weights[2] > 5 * examples, "40 steps are more examples than the one pass of the first round"
    versions = [trio.model_of_version(state["run"], version) for version in range(4)]
    moved = [
        max(float(np.abs(after[name] - before[name]).max()) for name in after)
        for before, after in itertools.pairwise(versions)
    ]
    assert moved[1] == 0.0, "a rate of 0 moves nothing"
    assert 0 < moved[2] < 0.01 * moved[0]


CHANGES = """
[[control.override]]
from_round = 3
strategy.codec = { kind = "int4" }
strategy.download = { kind = "bfloat16" }
strategy.schedule = { quorum = 2, deadline = "80s", sample = "weight" }
strategy.sum.bound = 64.0
evaluation.every = 2
"""


def test_codec_and_schedule_change_as_if_another_run_went_on(trio: Federation) -> None:
    """The rounds after a change have the bytes of a run that resumes the rounds before it with the other values."""
    first: dict[str, Any] = {
        "strategy": 'kind = "fedavg"\ncodec = { kind = "int8" }',
        "schedule": 'min = 3, deadline = "90s"',
    }
    then: dict[str, Any] = {
        "strategy": 'kind = "fedavg"\ncodec = { kind = "int4" }\ndownload = { kind = "bfloat16" }\nsum = { bound = 64.0 }',
        "schedule": 'min = 3, quorum = 2, deadline = "80s", sample = "weight"',
    }
    old = trio.finish(trial_job(rounds=2, **first))["run"]
    resumed = follow(trio, trial_job(rounds=4, **then), "--resume", old)
    changed = trio.finish(trial_job(rounds=4, **first, more=CHANGES))
    assert trio.model_hash(changed["run"]) == trio.model_hash(resumed)
    judged = [bool(record["evaluate"]) for record in changed["rounds"]]
    assert judged == [True, True, False, True]
    up = [record["bytes_up"] for record in changed["rounds"]]
    assert up[0] == up[1] > 1.5 * up[2] == 1.5 * up[3]


def test_a_run_begins_with_the_values_of_a_file(trio: Federation, tmp_path: Path) -> None:
    job = trial_job(rounds=1, values="batch_norm = true")
    first = trio.finish(job)["run"]
    path = tmp_path / "model.safetensors"
    trio.atoll("model", first, "--out", path, "--home", trio.researcher)
    second = follow(trio, job, "--from", path)
    begun = trio.model_of_version(second, 0)
    assert begun["1.num_batches_tracked"] > 0
    for name, array in load_file(path).items():
        np.testing.assert_array_equal(begun[name], array)

    text = follow(trio, trial_job(rounds=1, values="hidden = 8\nbatch_norm = true"), "--from", path, code=4)
    assert 'tensor "0.bias" is float32 [16] in the file, and float32 [8] in the app\'s model' in text


def test_a_run_goes_on_where_another_ended_though_the_server_is_killed(trio: Federation, tmp_path: Path) -> None:
    """The same bytes as in one go: optimizer at the server, tensors at the sites, batches and rounding go on."""
    whole = trio.finish(trial_job(rounds=4, strategy=ADAM))
    old = trio.finish(trial_job(rounds=2, strategy=ADAM))["run"]

    text = follow(trio, trial_job(rounds=2, strategy=ADAM), "--resume", old, code=4)
    assert "job.rounds = 2" in text
    assert f"run {old} has done 2 rounds" in text

    path, gate = trio.root / "resumed.toml", tmp_path / "gate"
    path.write_text(trial_job(rounds=4, strategy=ADAM))
    trio.fault("site-1").write_text(f"await {gate}")
    try:
        run = trio.atoll("run", path, "--detach", "--resume", old, "--home", trio.researcher).out.strip()
        trio.wait_until(run, lambda state: state["round"] == 3 and state["status"] == "running")
        assert trio.server is not None
        trio.server.kill()
        trio.start_server()
        gate.touch()
        state = trio.wait_for_end(run)
    finally:
        trio.fault("site-1").unlink()
    assert state["status"] == "finished", trio.logs()
    assert (state["continues"], state["version"]) == (old, 4)
    assert [record["round"] for record in state["rounds"]] == [3, 4]
    assert f"goes on from run {old}" in trio.atoll("status", run, "--home", trio.researcher).out
    assert trio.model_hash(run) == trio.model_hash(whole["run"])
    trio.model_of_version(run, 2)
