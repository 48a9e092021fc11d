"""One federation for all kills of a module: three sites that are patient, since the server will be away."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from integration.federation import Federation, trial_job

JOB = trial_job(rounds=2, strategy='kind = "fedadam"\ncodec = { kind = "int8" }')
SITES = ("site-1", "site-2", "site-3")


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """A server with three sites; quorum is the whole cohort, and nobody's lease runs out."""
    federation = Federation(tmp_path_factory.mktemp("chaos"), limits="heartbeat_s = 1\nlease_s = 120")
    try:
        federation.make()
        federation.start_server()
        federation.enrol_researcher()
        for name in SITES:
            federation.enrol_site(name)
            federation.add_settings(federation.home(name) / "site.toml", "[reproducible]\nseed = 7\n")
        federation.sign()
        for name in SITES:
            federation.start_site(name)
        yield federation
    finally:
        federation.close()


@pytest.fixture(scope="module")
def undisturbed(federation: Federation) -> str:
    """Hash of the model that the job gives when nothing happens."""
    return federation.model_hash(federation.finish(JOB)["run"])
