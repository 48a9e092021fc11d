"""Secure aggregation in groups, as processes: each group has a session, from the version that it has by itself."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from integration.federation import Federation
from integration.trial import REPRODUCIBLE, trial_job

pytestmark = pytest.mark.chaos  # tests/server/test_secure_strategies.py has the same without processes
GROUPS = {f"site-{number}": ("north", "south")[number % 2] for number in range(1, 7)}


@pytest.fixture
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    federation = Federation(tmp_path_factory.mktemp("groups"), limits="heartbeat_s = 1\nlease_s = 120")
    try:
        federation.make()
        federation.start_server()
        federation.enrol_researcher()
        for name, group in GROUPS.items():
            federation.enrol_site(name)
            federation.add_settings(federation.home(name) / "site.toml", REPRODUCIBLE)
            federation.label(name, group)
        federation.sign()
        for name in GROUPS:
            federation.start_site(name)
        yield federation
    finally:
        federation.close()


def job(*, masked: bool) -> str:
    terms = "secure_aggregation = { fewest_survivors = 3, corrupt = 0.0, bound = 4.0, deadline = '20s' }"
    more = f"[privacy]\n{terms}\n" if masked else ""
    schedule = (
        'kind = "hierarchical", label = "region", groups = ["north", "south"], rounds = 2, '
        'inner = { kind = "rounds", min = 3 }'
    )
    text = trial_job(rounds=4, more=f"[evaluation]\nsites = false\n{more}")
    return text.replace('kind = "rounds", min = 3', schedule)


def test_groups_make_the_model_of_the_plain_run(federation: Federation) -> None:
    masked, plain = (federation.finish(job(masked=masked)) for masked in (True, False))
    assert [one["weight"] for one in masked["rounds"]] == [one["weight"] for one in plain["rounds"]]
    assert [(one["secure"]["parts"], one["secure"]["sites"]) for one in masked["rounds"]] == [(2, 6)] * 4
    found, wanted = federation.model(masked["run"]), federation.model(plain["run"])
    for name, values in found.items():
        assert np.abs(values - wanted[name]).max() <= 40 * 4.0 / ((2**31 - 1) // 3 - 1) + 1e-5, name
