"""kill -9 of the server, and of an agent, in the middle of each schedule: the run ends with the bytes of the undisturbed one.

`rounds` has its own table of steps in test_kills.py. Updates of `buffered` have to come in one order, and neighbours of
`gossip` have a zone: tests/integration/test_asynchronous.py and test_gossip.py kill in the middle of those.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from chaos.doomed import doom_a_site, doom_the_server, require_all, wait_for_death
from integration.federation import Federation

from atoll.client.steps import Step as SiteStep
from atoll.server.steps import Step as ServerStep

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
DOOMED = "site-2"
SITES_OF_A_ROUND = {"cyclic": 1}  # all three in the others
SHORT = ServerStep.MADE  # the version is on the disk, and no commit names it
SERVER_STEPS = [
    (ServerStep.JOURNALLED, 9),
    (ServerStep.RECEIVED, 3),
    (ServerStep.FOLDED, 2),
    (SHORT, 2),
    (ServerStep.COMMITTED, 2),
    (ServerStep.ANNOUNCED, 3),
]
SITE_STEPS = [SiteStep.ACCEPTED, SiteStep.WORKED, SiteStep.KEPT, SiteStep.UPLOADED, SiteStep.JUDGED]


@pytest.mark.parametrize(
    ("schedule", "step", "nth"),
    [
        pytest.param(
            schedule,
            step,
            nth,
            id=f"{schedule}-{step}-{nth}",
            marks=() if step is SHORT and schedule != "cyclic" else pytest.mark.chaos,
        )
        for schedule in JOBS
        for step, nth in SERVER_STEPS
    ],
)
def test_the_server_killed_in_the_middle_of_a_schedule(
    federation: Federation, undisturbed_of: Callable[[str], str], schedule: str, step: ServerStep, nth: int
) -> None:
    wanted = undisturbed_of(JOBS[schedule])
    doomed = doom_the_server(federation, step, nth)
    run = federation.submit(JOBS[schedule])
    wait_for_death(federation, doomed, step)
    federation.start_server()
    require_all(federation, run, SITES_OF_A_ROUND.get(schedule, 3))
    assert federation.model_hash(run) == wanted


@pytest.mark.parametrize(
    ("schedule", "step"),
    [
        pytest.param(
            schedule,
            step,
            id=f"{schedule}-{step}",
            marks=() if (schedule, step) == ("every_steps", SiteStep.WORKED) else pytest.mark.chaos,
        )
        for schedule in JOBS
        for step in SITE_STEPS
    ],
)
def test_an_agent_killed_in_the_middle_of_a_schedule(
    federation: Federation, undisturbed_of: Callable[[str], str], schedule: str, step: SiteStep
) -> None:
    """With `every_steps` it keeps its own model of fragments and its optimizer's state; of a cycle it has one turn."""
    wanted = undisturbed_of(JOBS[schedule])
    doomed = doom_a_site(federation, DOOMED, step, 1 if schedule == "cyclic" else 3)
    run = federation.submit(JOBS[schedule])
    wait_for_death(federation, doomed, step)
    federation.start_site(DOOMED)
    require_all(federation, run, SITES_OF_A_ROUND.get(schedule, 3))
    assert federation.model_hash(run) == wanted
