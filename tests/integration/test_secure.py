"""Secure aggregation in a federation of processes: the model, who drops out, and who is killed."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from integration.federation import Federation, Process
from integration.trial import REPRODUCIBLE, trial_job
from numpy.typing import NDArray

PROGRAM = Path(__file__).parents[1] / "samples" / "killed_session.py"
SITES = tuple(f"site-{number}" for number in range(1, 6))
VICTIM = "site-3"
BOUND, L = 4.0, (2**31 - 1) // 5 - 1
DEADLINE_S = 6

AT_SERVER = ["KEYS", "SHARES", "INPUTS", "CONFIRMING", "UNMASKING"]
AT_SITE = ["plan", "keys", "shares", "survivors", "confirmations"]


def job(
    *, masked: bool = True, rounds: int = 1, sites: Sequence[str] = SITES, strategy: str = 'kind = "fedavg"'
) -> str:
    terms = f"fewest_survivors = 3, corrupt = 0.0, bound = {BOUND}, deadline = '{DEADLINE_S}s', attempts = 5"
    more = f"[privacy]\nsecure_aggregation = {{ {terms} }}\n" if masked else ""
    return trial_job(
        rounds=rounds,
        strategy=strategy,
        schedule=f"min = {len(sites)}",
        sites=sites,
        more=f"[evaluation]\nsites = false\n{more}",
    )


@pytest.fixture(scope="module")
def five(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """A running server with five running sites of as many organisations; nobody's lease runs out."""
    federation = Federation(tmp_path_factory.mktemp("five"), limits="heartbeat_s = 1\nlease_s = 120")
    try:
        federation.make()
        federation.start_all(*SITES, settings=REPRODUCIBLE)
        yield federation
    finally:
        federation.close()


@pytest.fixture(scope="module")
def plain_model(five: Federation) -> dict[str, NDArray[Any]]:
    """Of one round of all five without masks."""
    return five.model(five.finish(job(masked=False))["run"])


def require_close(found: dict[str, NDArray[Any]], wanted: dict[str, NDArray[Any]], rounds: int = 1) -> None:
    """Within what rounding to the ring may cost: five sites whose weights are nearly the same."""
    assert found.keys() == wanted.keys()
    most = 2 * rounds * BOUND / L + 1e-6  # and the float32 of the model
    for name, values in found.items():
        assert np.abs(values - wanted[name]).max() <= most, name


def test_masked_rounds_make_the_model_of_plain_ones(five: Federation) -> None:
    masked = five.finish(job(rounds=2))
    plain = five.finish(job(rounds=2, masked=False))
    require_close(five.model(masked["run"]), five.model(plain["run"]), rounds=2)
    for one, other in zip(masked["rounds"], plain["rounds"], strict=True):
        assert (one["weight"], one["sites"], one["missing"]) == (other["weight"], 5, {})
        assert abs(one["train"]["loss"] - other["train"]["loss"]) < 1e-3
        assert one["secure"] == {
            "threat": "active", "sites": 5, "threshold": 3, "corrupt": 0, "fewest_survivors": 3, "sessions": 1, "parts": 1,
            "dropped": [], "liars": {},
        }  # fmt: skip
        assert one["bytes_up"] <= 1.01 * other["bytes_up"] + 5 * 64
    shown = five.atoll("status", masked["run"], "--home", five.researcher).out
    assert "masked in round 2: sum of 5 of 5 sites, at least 3; 3 shares rebuild a secret" in shown
    log = five.sites[SITES[0]].text()
    assert "shares revealed for the sum over 5 sites" in log


def start_doomed(five: Federation, kind: str, folder: Path, *when: str) -> Process:
    return five.start_program(f"doomed-{kind}", [sys.executable, str(PROGRAM), kind, str(folder), *when])


@pytest.mark.parametrize(
    "phase", [pytest.param(phase, marks=() if phase == "UNMASKING" else pytest.mark.chaos) for phase in AT_SERVER]
)
def test_the_server_killed_in_a_phase(five: Federation, plain_model: dict[str, NDArray[Any]], phase: str) -> None:
    assert five.server is not None
    five.server.stop()
    five.server = doomed = start_doomed(five, "server", five.server_folder, phase)
    five.wait_for_ports()
    run = five.submit(job())
    five.wait_for(lambda: not doomed.running, f"the server dies before it tells of {phase}")
    assert doomed.popen.returncode == -signal.SIGKILL
    five.start_server()
    state = five.wait_for_end(run)
    assert state["status"] == "finished", f"{state}\n{five.logs()}"
    require_close(five.model(run), plain_model)
    [record] = state["rounds"]
    assert record["secure"]["sessions"] == (1 if phase in ("CONFIRMING", "UNMASKING") else 2)
    assert record["secure"]["dropped"] == []


@pytest.mark.parametrize(
    "step", [pytest.param(step, marks=() if step == "shares" else pytest.mark.chaos) for step in AT_SITE]
)
def test_a_site_killed_in_a_phase_and_gone(five: Federation, plain_model: dict[str, NDArray[Any]], step: str) -> None:
    five.sites[VICTIM].stop()
    doomed = start_doomed(five, "site", five.home(VICTIM), step)
    run = five.submit(job())
    five.wait_for(lambda: not doomed.running, f"{VICTIM} dies at {step}")
    state = five.wait_for_end(run)
    five.start_site(VICTIM)
    assert state["status"] == "finished", f"{state}\n{five.logs()}"
    [record] = state["rounds"]
    if step in ("survivors", "confirmations"):  # its input was in
        require_close(five.model(run), plain_model)
        assert record["secure"]["dropped"] == []
    else:
        others = [site for site in SITES if site != VICTIM]
        plain = five.finish(job(masked=False, sites=others))
        require_close(five.model(run), five.model(plain["run"]))
        assert record["secure"]["dropped"] == [VICTIM]
        assert record["weight"] == plain["rounds"][0]["weight"]


@pytest.mark.chaos
@pytest.mark.parametrize("kind", ["site", "silent"])
@pytest.mark.parametrize("step", AT_SITE)
def test_a_site_killed_in_a_phase_and_back(
    five: Federation, plain_model: dict[str, NDArray[Any]], step: str, kind: str
) -> None:
    """It is there again before the deadline, and says the same bytes: nobody dropped out."""
    five.sites[VICTIM].stop()
    doomed = start_doomed(five, kind, five.home(VICTIM), step)
    run = five.submit(job())
    five.wait_for(lambda: not doomed.running, f"{VICTIM} dies at {step}")
    five.start_site(VICTIM)
    state = five.wait_for_end(run)
    assert state["status"] == "finished", f"{state}\n{five.logs()}"
    require_close(five.model(run), plain_model)
    assert state["rounds"][0]["secure"]["dropped"] == []


FRAGMENTS = ('kind = "rounds", ', 'kind = "every_steps", steps = 4, fragments = 2, ')


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("strategy", "schedule"),
    [
        ('kind = "fedavg"\nreducer = { kind = "norm_bound", norm = 0.05 }', ("", "")),
        ('kind = "fedavg"\nreducer = { kind = "centered_clipping", radius = 0.05 }', ("", "")),
        ('kind = "fedavg"\nreducer = { kind = "bucketing", size = 5, inner = { kind = "median" } }', ("", "")),
        ('kind = "fednova"', ("", "")),
        ('kind = "fedavg"', FRAGMENTS),
    ],
    ids=["norm_bound", "centered_clipping", "bucketing", "fednova", "fragments"],
)
def test_other_strategies_make_the_model_of_plain_ones(
    five: Federation, strategy: str, schedule: tuple[str, str]
) -> None:
    texts = [job(masked=masked, rounds=2, strategy=strategy).replace(*schedule) for masked in (True, False)]
    if schedule == FRAGMENTS:
        texts = [text.replace("epochs = 1, ", "") for text in texts]
    masked, plain = (five.finish(text) for text in texts)
    assert [one["weight"] for one in masked["rounds"]] == [one["weight"] for one in plain["rounds"]]
    require_close(five.model(masked["run"]), five.model(plain["run"]), rounds=40)  # fednova: times its steps
