"""Runs of an opaque app: payloads of a declared size, appended round by round, whatever goes down in between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from integration.federation import Federation
from integration.trial import trial_job

from atoll.cluster.seeds import training_seed
from atoll.wire.payload_list import payloads_in

SITES = ("site-1", "site-2", "site-3")
NOTES = '[apps.notes]\ndistribution = "trial-apps"\nentry_point = "notes"\n'
ALLOWED = (
    'allowed_apps = [{ name = "trial", hash = "any-installed" }, { name = "notes", hash = "any-installed" }]\n'
    'researchers = ["*"]\nmin_cohort = 1\n'
)


def notes_job(strategy: str = "max_bytes = 200", **changes: Any) -> str:
    text = trial_job(app="notes", strategy=f'kind = "bagging"\nreducer = {{ kind = "append", {strategy} }}', **changes)
    return text.replace("work = { epochs = 1, batch_size = 32 }", "")


def start_all(federation: Federation) -> None:
    federation.start_all(*SITES, settings=NOTES)
    for site in SITES:
        (federation.home(site) / "policy.toml").write_text(ALLOWED)


def payloads(federation: Federation, run: str, version: int | None = None) -> list[bytes]:
    found = federation.model(run) if version is None else federation.model_of_version(run, version)
    return payloads_in(found["payloads"].tobytes())


def expected(rounds: int, size: int = 100, seed: int = 3) -> list[bytes]:
    """What the sites' apps write, in the order of rounds and sites."""
    numbers = [(round_, site) for round_ in range(1, rounds + 1) for site in SITES]
    return [
        f"{3 * (round_ - 1)} {training_seed(seed, site, round_)} ".encode().ljust(size, b".")
        for round_, site in numbers
    ]


@pytest.mark.chaos
def test_every_version_is_the_list_of_all_payloads_so_far(federation: Federation) -> None:
    start_all(federation)
    state = federation.finish(notes_job(rounds=2))
    assert payloads(federation, state["run"]) == expected(2)
    assert payloads(federation, state["run"], 1) == expected(1)
    assert payloads(federation, state["run"], 0) == []
    assert [record["evaluate"]["notes"] for record in state["rounds"]] == [3.0, 6.0]
    # No empty slots travel: three sites fetch each version, which has 8 + 108 n bytes of n payloads, behind a frame's 16.
    assert [record["bytes_up"] for record in state["rounds"]] == [300] * 2
    assert sum(record["bytes_down"] for record in state["rounds"]) <= 3 * sum(16 + 8 + 3 * n * 108 for n in range(2))


@pytest.mark.chaos
def test_a_payload_over_its_bound_is_an_error_at_its_site_and_the_round_goes_on(federation: Federation) -> None:
    start_all(federation)
    federation.fault("site-2").write_text("long 201")
    state = federation.finish(notes_job(rounds=1, schedule="min = 3, quorum = 2"))
    assert list(state["rounds"][0]["missing"]) == ["site-2"]
    assert (
        "has 201 bytes, the job allows 1 to 200; raise strategy.reducer.max_bytes"
        in state["rounds"][0]["missing"]["site-2"]
    )
    assert payloads(federation, state["run"]) == [expected(1)[0], expected(1)[2]]
    federation.fault("site-2").write_text("text")
    state = federation.finish(notes_job(rounds=1, schedule="min = 3, quorum = 2"))
    assert "Notes.train() returned str, wanted bytes" in state["rounds"][0]["missing"]["site-2"]
    federation.fault("site-2").unlink()

    state = federation.wait_for_end(federation.submit(notes_job("max_bytes = 200, max_version_bytes = 500", rounds=3)))
    assert (state["status"], state["version"]) == ("failed", 1)
    assert "the next version would have 656 bytes, the job allows 500" in state["reason"]["message"]


@pytest.mark.chaos
def test_a_server_killed_in_a_round_ends_with_the_same_list(federation: Federation) -> None:
    start_all(federation)
    released = federation.root / "released"
    federation.fault("site-3").write_text(f"await {released}")
    run = federation.submit(notes_job(rounds=2))
    federation.wait_until(run, lambda state: sum(site["state"] == "accepted" for site in state["sites"]) == 2)
    assert federation.server is not None
    federation.server.kill()
    federation.sites["site-1"].kill()
    federation.start_server()
    federation.start_site("site-1")
    released.touch()
    assert federation.wait_for_end(run)["status"] == "finished", federation.logs()
    assert payloads(federation, run) == expected(2)


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (notes_job("max_bytes = 0"), "strategy.reducer.max_bytes = 0: wanted at least 1"),
        (notes_job("max_bytes = 10, max_version_bytes = 10"), "max_version_bytes is more than max_bytes (10)"),
        (notes_job() + 'codec = { kind = "int8" }', "a codec encodes numbers, and payloads travel as they are"),
        (notes_job(rounds=1) + "work = { steps = 3 }", "an opaque app decides by itself what a round's work is"),
        (notes_job("max_version_bytes = 1099511627776"), "this server takes models of"),
    ],
)
@pytest.mark.chaos
def test_what_cannot_be_carried_is_said_before_anything_runs(trio: Federation, job: str, words: str) -> None:
    path: Path = trio.root / "bad.toml"
    path.write_text(job)
    done = trio.atoll("run", path, "--detach", "--home", trio.researcher, check=False)
    assert done.code != 0
    assert words in done.err, done.err
