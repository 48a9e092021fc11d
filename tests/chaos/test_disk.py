"""A full disk at a site: it says so, in its log and its status, and goes on to the same bytes when there is room."""

from __future__ import annotations

import resource
from contextlib import suppress

import psutil
import pytest
from chaos.conftest import require_undisturbed
from integration.federation import Federation
from integration.trial import trial_job

WIDE = trial_job(rounds=2, strategy='kind = "fedadam"\ncodec = { kind = "int8" }', values="hidden = 16000")
UPDATE_BYTES = 30 * 16000 + 16000 + 2 * 16000 + 2  # int8; the model is four times as large
ROOM_BYTES = UPDATE_BYTES // 2  # for every other file of a site


@pytest.mark.parametrize("folder", ["outbox", pytest.param("models", marks=pytest.mark.chaos)])
def test_a_full_disk_at_a_site_is_waited_out(federation: Federation, folder: str) -> None:
    """No file of those who write large ones into the folder may grow beyond a size for a while."""
    undisturbed = federation.model_hash(federation.finish(WIDE)["run"])
    agent, status = federation.sites["site-3"], federation.home("site-3") / "state" / "status.json"
    below = [child.pid for child in psutil.Process(agent.pid).children(recursive=True)]
    assert below, "what workers are forked from outlives a run"
    writers = below if folder == "outbox" else [agent.pid]
    limit_files(writers, ROOM_BYTES)
    try:
        run = federation.submit(WIDE)
        federation.wait_for(lambda: '"held up"' in status.read_text(), "the site says that it waits")
        assert "waits for disk space" in status.read_text()
        assert f"/{folder}/" in status.read_text()
        assert "waits for disk space" in agent.text()
    finally:
        limit_files([*writers, *(child.pid for child in psutil.Process(agent.pid).children(recursive=True))])
    require_undisturbed(federation, run, undisturbed)


def limit_files(pids: list[int], most_bytes: int = resource.RLIM_INFINITY) -> None:
    """Bound the size that a file of these processes, and of those they start, can grow to."""
    for pid in pids:
        with suppress(ProcessLookupError):  # a worker that has ended
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (most_bytes, resource.RLIM_INFINITY))
