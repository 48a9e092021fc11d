"""kill -9 of the server, and of an agent, in the middle of each schedule: the run ends with the bytes of the undisturbed one.

`rounds` has its own table of steps in test_kills.py. Updates of `buffered` have to come in one order, and neighbours of
`gossip` have a zone: tests/integration/test_asynchronous.py and test_gossip.py kill in the middle of those.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from chaos.doomed import require_all, run_with_a_kill
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
DOOMED = "site-2"  # the agent
SITES_OF_A_ROUND = {"cyclic": 1}  # all three in the others
STEPS: list[tuple[ServerStep | SiteStep, int]] = [
    (ServerStep.JOURNALLED, 9),
    (ServerStep.RECEIVED, 3),
    (ServerStep.FOLDED, 2),
    (ServerStep.MADE, 2),  # the version is on the disk, and no commit names it
    (ServerStep.COMMITTED, 2),
    (ServerStep.ANNOUNCED, 3),
    (SiteStep.ACCEPTED, 3),
    (SiteStep.WORKED, 3),  # with `every_steps`, its own model of fragments and its optimizer's state are on the disk
    (SiteStep.KEPT, 3),
    (SiteStep.UPLOADED, 3),
    (SiteStep.JUDGED, 3),
]


@pytest.mark.parametrize(
    ("schedule", "step", "nth"),
    [
        pytest.param(
            schedule,
            step,
            1 if (schedule, type(step)) == ("cyclic", SiteStep) else nth,  # a site has one turn or two
            id=f"{schedule}-{'site' if isinstance(step, SiteStep) else 'server'}-{step}",
            marks=() if (schedule, step) == ("hierarchical", ServerStep.MADE) else pytest.mark.chaos,
        )
        for schedule in JOBS
        for step, nth in STEPS
    ],
)
def test_a_kill_in_the_middle_of_a_schedule(
    federation: Federation, undisturbed_of: Callable[[str], str], schedule: str, step: ServerStep | SiteStep, nth: int
) -> None:
    wanted = undisturbed_of(JOBS[schedule])
    run = run_with_a_kill(federation, JOBS[schedule], DOOMED, step, nth)
    require_all(federation, run, SITES_OF_A_ROUND.get(schedule, 3))
    assert federation.model_hash(run) == wanted
