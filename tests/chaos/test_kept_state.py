"""kill -9 of the server, and of an agent, where sites keep what an update left out, or what their rule needs.

A site's file and the server's version have to move together or not at all: the run ends with the bytes of the
undisturbed one.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from chaos.conftest import SITES
from chaos.doomed import require_all, run_with_a_kill
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
DOOMED = "site-2"  # the agent
STEPS: list[tuple[ServerStep | SiteStep, int]] = [  # in round 2, when the state of round 1 counts
    (ServerStep.RECEIVED, 4),
    (ServerStep.FOLDED, 5),
    (ServerStep.MADE, 2),
    (ServerStep.COMMITTED, 2),
    (ServerStep.ANNOUNCED, 2),
    (SiteStep.ACCEPTED, 2),
    (SiteStep.WORKED, 2),  # its new state is on the disk, and its update is not kept yet
    (SiteStep.KEPT, 2),
    (SiteStep.UPLOADED, 2),
    (SiteStep.JUDGED, 2),
]


@pytest.mark.parametrize(
    ("strategy", "step", "nth"),
    [
        pytest.param(
            strategy,
            step,
            nth,
            id=f"{strategy}-{'site' if isinstance(step, SiteStep) else 'server'}-{step}",
            marks=() if (strategy, step) == ("error_feedback", SiteStep.WORKED) else pytest.mark.chaos,
        )
        for strategy in STRATEGIES
        for step, nth in STEPS
    ],
)
def test_a_kill_where_sites_keep_state(
    federation: Federation, undisturbed_of: Callable[[str], str], strategy: str, step: ServerStep | SiteStep, nth: int
) -> None:
    wanted = undisturbed_of(JOBS[strategy])
    run = run_with_a_kill(federation, JOBS[strategy], DOOMED, step, nth)
    require_all(federation, run, 3)
    assert federation.model_hash(run) == wanted
