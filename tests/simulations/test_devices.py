"""Simulated time: transfers, hours of absence, traces; and what a run tells of stragglers and staleness."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from samples.simulated import Points, points_job

import atoll
from atoll.simulations.clock import Speeds
from atoll.simulations.devices import Availability, Device, Network, devices
from atoll.simulations.results import Result
from atoll.wire.errors import ConfigError

SITES = 6
NAMES = [f"site-{number}" for number in range(1, SITES + 1)]
HOUR = 3600.0


def run(job: dict[str, Any] | None = None, **options: Any) -> Result:
    return atoll.simulate(job or points_job(), **{"app": Points, "sites": SITES, "source": {}, **options})


def of(trace: Any = None, **options: Any) -> dict[str, Device]:
    wanted = {"speeds": Speeds(), "network": Network(), "availability": Availability(), **options}
    return devices(NAMES, trace=trace, **wanted)


def test_a_round_takes_its_bytes_both_ways_and_its_steps() -> None:
    result = run(speeds=Speeds(step_s=1.0), network=Network(up_mbit_s=0.008, down_mbit_s=0.08, latency_s=0.5))
    up, down = result.rounds[0].bytes_up / SITES, result.rounds[0].bytes_down / SITES
    expected = down / 10_000 + up / 1_000 + 2 * 0.5 + 3 * 1.0
    assert [entry.simulated_s for entry in result.rounds] == pytest.approx([expected, 2 * expected])
    assert result.model_bytes == run().model_bytes
    smaller = run(points_job(codec={"kind": "int8"}), network=Network(up_mbit_s=0.008))
    assert smaller.rounds[0].bytes_up < result.rounds[0].bytes_up
    assert smaller.simulated_s < run(network=Network(up_mbit_s=0.008)).simulated_s


def test_a_buffered_schedule_tells_of_staleness_and_a_round_of_its_straggler() -> None:
    speeds = Speeds(step_s=1.0, by_site={"site-6": 10.0})
    waited = run(speeds=speeds).rounds[0].waited
    assert (waited.slowest, waited.slowest_s, waited.median_s, waited.most_stale) == ("site-6", 30.0, 3.0, 0)
    schedule = {"kind": "buffered", "k": 2, "min": SITES}
    rounds = run(points_job(kind="fedbuff", rounds=24, schedule=schedule), speeds=speeds).rounds
    late = [entry.waited for entry in rounds if entry.waited.slowest == "site-6"]
    assert late
    assert late[0].most_stale > 5
    assert late[0].staleness > 0


def test_a_device_works_only_in_its_hours() -> None:
    always, night = Device(), Device(windows=((0.0, 6 * HOUR), (22 * HOUR, 24 * HOUR)))
    assert always.elapsed_s(5.0, 100_000.0) == pytest.approx(100_000.0)
    assert night.elapsed_s(HOUR, HOUR) == HOUR
    assert night.elapsed_s(10 * HOUR, HOUR) == 13 * HOUR  # begins at 22
    assert night.elapsed_s(5 * HOUR, 2 * HOUR) == 18 * HOUR  # an hour before 6, an hour after 22
    assert night.elapsed_s(0.0, 3 * 8 * HOUR) == 3 * 24 * HOUR
    assert night.elapsed_s(10 * HOUR, 0.0) == 12 * HOUR
    for now in np.linspace(0, 48, 17):
        for busy in (0.5, 7.9, 8.0, 8.1, 31.0):
            end = now * HOUR + night.elapsed_s(now * HOUR, busy * HOUR)
            grid = np.arange(now * HOUR, end, 30.0)
            there = ((grid % (24 * HOUR)) < 6 * HOUR) | ((grid % (24 * HOUR)) >= 22 * HOUR)
            assert abs(there.sum() * 30.0 - busy * HOUR) < 90.0


def test_rounds_of_sites_that_are_there_at_night_wait_for_it() -> None:
    night = Availability(hours=8.0, peak=22.0, deviation=0.0)
    result = run(speeds=Speeds(step_s=100.0), availability=night)
    assert [entry.simulated_s for entry in result.rounds] == [300.0, 600.0]
    patient = points_job(schedule={"kind": "rounds", "min": SITES, "deadline": "48h"})
    assert run(patient, speeds=Speeds(step_s=3 * HOUR), availability=night).rounds[0].simulated_s == 25 * HOUR
    starts = {device.windows for device in of(availability=Availability(hours=8.0, deviation=2.0)).values()}
    assert len(starts) == SITES


def test_a_trace_goes_before_the_distributions(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("site,step_s,available\nsite-6,10,\nsite-2,,0-6 22-24\n")
    found = of(path, speeds=Speeds(step_s=1.0))
    assert [device.step_s for device in found.values()] == [1.0, 1.0, 1.0, 1.0, 1.0, 10.0]
    assert found["site-2"].windows == ((0.0, 6 * HOUR), (22 * HOUR, 24 * HOUR))
    assert run(trace=path, speeds=Speeds(step_s=1.0)).rounds[0].simulated_s == 30.0
    rows = tmp_path / "trace.json"
    rows.write_text(json.dumps([{"step_s": 1.0}, {"step_s": 2.0}]))
    assert [device.step_s for device in of(rows).values()] == [1.0, 2.0] * 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("site,speed\nsite-1,3\n", r"trace\.csv, row 1: unknown column 'speed'; known: site, step_s"),
        ("site,step_s\nsite-1,fast\n", r"row 1: step_s = -1\.0: wanted 0 to"),
        ("site,step_s\nharbour,1\n", r"trace\.csv: column site names harbour"),
        ("site,step_s\nsite-1,1\nsite-1,2\n", r"none twice"),
        ("step_s\n", r"has no rows"),
        ("step_s,available\n1,22-6\n", r'available = "22-6": wanted hours'),
    ],
)
def test_a_bad_trace_names_its_row_and_column(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        of(path)


def test_bad_numbers_are_named() -> None:
    with pytest.raises(ConfigError, match=r"network\.up_mbit_s = -1"):
        Network(up_mbit_s=-1)
    with pytest.raises(ConfigError, match=r"availability\.hours = 25"):
        Availability(hours=25)
