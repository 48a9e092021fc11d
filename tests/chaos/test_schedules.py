"""kill -9 of the server in the middle of each schedule: the run ends with the bytes of the undisturbed one."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
from chaos.conftest import SITES
from chaos.test_kills import start_doomed
from integration.federation import Federation

from atoll.server.steps import Step

JOB = """
[job]
name = "schedules"
app = "trial"
data = "trial"
rounds = {rounds}
seed = 3
wait_for_sites = "60s"

[strategy]
kind = "{kind}"
schedule = {{ {schedule} }}
work = {{ {work} }}
{more}
"""

JOBS = {
    "cyclic": JOB.format(
        rounds=4, kind="cyclic", schedule='kind = "cyclic", order = "random", min = 3', work="steps = 2", more=""
    ),
    "every_steps": JOB.format(
        rounds=4,
        kind="diloco",
        schedule='kind = "every_steps", steps = 6, fragments = 2, min = 3',
        work="batch_size = 32",
        more='codec = { kind = "int8" }',
    ),
}
JOBS["hierarchical"] = JOB.format(
    rounds=4,
    kind="fedavgm",
    schedule='kind = "hierarchical", label = "region", groups = ["north", "south"], rounds = 2, '
    'inner = { kind = "rounds", min = 1 }, inner_optimizer = { kind = "adam" }',
    work="epochs = 1, batch_size = 32",
    more="",
)
SHORT = Step.MADE  # the version is on the disk, and no commit names it
STEPS = [
    (Step.JOURNALLED, 9),
    (Step.RECEIVED, 3),
    (Step.FOLDED, 2),
    (SHORT, 2),
    (Step.COMMITTED, 2),
    (Step.ANNOUNCED, 3),
]


def _cases() -> list[object]:
    return [
        pytest.param(
            schedule,
            step,
            nth,
            id=f"{schedule}-{step}-{nth}",
            marks=() if step is SHORT and schedule == "hierarchical" else pytest.mark.chaos,
        )
        for schedule in JOBS
        for step, nth in STEPS
    ]


@pytest.mark.parametrize(("schedule", "step", "nth"), _cases())
def test_the_server_killed_in_the_middle_of_a_schedule(
    federation: Federation, undisturbed_of: Callable[[str], str], schedule: str, step: Step, nth: int
) -> None:
    job = JOBS[schedule]
    wanted = undisturbed_of(job)
    assert federation.server is not None
    federation.server.stop()
    before = len(federation.server.text())
    federation.server = doomed = start_doomed(federation, "server", federation.server_folder, step, nth)
    federation.wait_for_ports()
    # A group begins with whoever of it is there: with all of them, as in the undisturbed run.
    federation.wait_for(lambda: all(f"{site} attached" in doomed.text()[before:] for site in SITES), "all are attached")
    run = federation.submit(job)
    federation.wait_for(lambda: not doomed.running, f"the server dies at {step}")
    assert doomed.popen.returncode == -signal.SIGKILL
    federation.start_server()
    state = federation.wait_for_end(run)
    assert state["status"] == "finished", federation.logs()
    assert federation.model_hash(run) == wanted


def test_a_round_with_fragments_moves_the_bytes_of_one_of_them(federation: Federation) -> None:
    """Up and down: of a model of 64 KiB that is cut in four."""
    job = JOB.format(
        rounds=6,
        kind="local_sgd",
        schedule='kind = "every_steps", steps = 4, fragments = {fragments}, min = 3',
        work="batch_size = 32",
        more="[app]\nhidden = 512\n",
    )
    records = {count: federation.finish(job.replace("{fragments}", str(count)))["rounds"] for count in (1, 4)}
    whole, parts = records[1][2:5], records[4][2:5]
    assert all(record["sites"] == 3 for record in [*whole, *parts])
    for way in ("bytes_up", "bytes_down"):
        assert sum(record[way] for record in parts) < 0.9 * sum(record[way] for record in whole)
        largest = 3 * 4 * 30 * 512  # the first layer's weights at three sites: 15 of 17 parts of this model
        assert max(record[way] for record in parts) < largest * 1.05
        assert min(record[way] for record in parts) < largest / 10


def test_sites_without_the_labels_of_a_job_are_not_asked(federation: Federation) -> None:
    job = JOB.format(
        rounds=2, kind="fedavg", schedule='kind = "rounds", where = { region = "north" }', work="steps = 2", more=""
    )
    state = federation.finish(job)
    assert [record["sites"] for record in state["rounds"]] == [2, 2]
