"""A scripted server, a site of its own, and its agent running in the test's event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from samples.scripted_server import ScriptedServer
from samples.trial_site import TrialSite

from atoll.client.home import sole_agent


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    """Listening."""
    server = ScriptedServer()
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def site(tmp_path: Path, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> TrialSite:
    """Made, and its app importable by name; nothing runs."""
    site = TrialSite(root=tmp_path)
    site.make(server.address)
    monkeypatch.syspath_prepend(site.installed)
    return site


@pytest.fixture
async def running(site: TrialSite) -> AsyncIterator[TrialSite]:
    """The site with its agent running, which has to end in order."""
    agent = site.agent()
    with sole_agent(site.home):
        task = asyncio.create_task(agent.run())
        yield site
        agent.stop()
        await task
