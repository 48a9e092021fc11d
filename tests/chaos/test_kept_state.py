"""kill -9 of the server, and of an agent, where sites keep what an update left out, or what their rule needs.

A site's file and the server's version have to move together or not at all: the run ends with the bytes of the
undisturbed one.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from chaos.conftest import SITES
from chaos.doomed import doom_a_site, doom_the_server, require_all, wait_for_death
from integration.federation import Federation
from integration.trial import trial_job

from atoll.client.steps import Step as SiteStep
from atoll.server.steps import Step as ServerStep

STRATEGIES = {
    "error_feedback": 'kind = "fedadam"\ncodec = { kind = "top_k", fraction = 0.1 }',
    "difference": 'kind = "ef21"\ncodec = { kind = "top_k", fraction = 0.1 }',
    "scaffold": 'kind = "scaffold"\ncodec = { kind = "int8" }',
    "feddyn": 'kind = "feddyn"',
}
JOBS = {
    name: trial_job(
        rounds=3, strategy=strategy, work="steps = 3, batch_size = 32", sites=SITES, more="[evaluation]\nsites = false"
    )
    for name, strategy in STRATEGIES.items()
}
DOOMED = "site-2"
SERVER_STEPS = [  # in round 2, when the state of round 1 counts
    (ServerStep.RECEIVED, 4),
    (ServerStep.FOLDED, 5),
    (ServerStep.MADE, 2),
    (ServerStep.COMMITTED, 2),
    (ServerStep.ANNOUNCED, 2),
]
SITE_STEPS = [SiteStep.ACCEPTED, SiteStep.WORKED, SiteStep.KEPT, SiteStep.UPLOADED, SiteStep.JUDGED]
SHORT = {("scaffold", ServerStep.MADE), ("error_feedback", SiteStep.WORKED)}


@pytest.mark.parametrize(
    ("strategy", "step", "nth"),
    [
        pytest.param(
            strategy,
            step,
            nth,
            id=f"{strategy}-{step}-{nth}",
            marks=() if (strategy, step) in SHORT else pytest.mark.chaos,
        )
        for strategy in STRATEGIES
        for step, nth in SERVER_STEPS
    ],
)
def test_the_server_killed_where_sites_keep_state(
    federation: Federation, undisturbed_of: Callable[[str], str], strategy: str, step: ServerStep, nth: int
) -> None:
    wanted = undisturbed_of(JOBS[strategy])
    doomed = doom_the_server(federation, step, nth)
    run = federation.submit(JOBS[strategy])
    wait_for_death(federation, doomed, step)
    federation.start_server()
    require_all(federation, run, 3)
    assert federation.model_hash(run) == wanted


@pytest.mark.parametrize(
    ("strategy", "step"),
    [
        pytest.param(
            strategy, step, id=f"{strategy}-{step}", marks=() if (strategy, step) in SHORT else pytest.mark.chaos
        )
        for strategy in STRATEGIES
        for step in SITE_STEPS
    ],
)
def test_an_agent_killed_that_keeps_state(
    federation: Federation, undisturbed_of: Callable[[str], str], strategy: str, step: SiteStep
) -> None:
    """In round 2; at `WORKED` its new state is on the disk, and its update is not kept yet."""
    wanted = undisturbed_of(JOBS[strategy])
    doomed = doom_a_site(federation, DOOMED, step, 2)
    run = federation.submit(JOBS[strategy])
    wait_for_death(federation, doomed, step)
    federation.start_site(DOOMED)
    require_all(federation, run, 3)
    assert federation.model_hash(run) == wanted
