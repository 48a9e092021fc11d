"""The agent of a region: a site whose work is done by a server with sites of its own (docs/trees.md).

Everything between the site and its upper server stays as it is: stream, task log, base versions, outbox, policy. What
differs is who does the work (`Region.new_worker`), what is looked at before (`offers.admit`: no app is installed here),
and that the region hears what becomes of rounds and runs. The server behind it never imports this room: it is handed an
agent, and the agent this protocol.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Protocol

from atoll.client.agent import Agent
from atoll.client.home import SiteHome, sole_agent
from atoll.client.link import find_link
from atoll.client.settings import load_settings
from atoll.client.steps import Observer, unobserved
from atoll.client.workers import Witness, Worker
from atoll.wire.errors import AtollError

_log = logging.getLogger(__name__)

LEAVE_TIMEOUT_S = 10.0  # for the agent to say its last words when the server goes down


class Region(Witness, Protocol):
    """What the agent needs of the server behind it. What a witness hears is durable there when the call returns."""

    def new_worker(self, folder: Path, log_path: Path) -> Worker: ...


class RegionSite:
    """A server's membership in an upper federation, as long as it runs."""

    def __init__(self, home: Path, region: Region, on_step: Observer = unobserved) -> None:
        """Raises ConfigError or IdentityError where the home cannot be used."""
        self._home = SiteHome(root=home)
        settings = load_settings(self._home.settings)
        link = find_link(settings, self._home)
        self.name, self.address = link.site, link.address
        self._agent = Agent(
            settings=settings,
            home=self._home,
            link=link,
            on_step=on_step,
            new_worker=region.new_worker,
            witness=region,
        )
        self._running: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Be a site of the upper federation, beside all else that this process does."""
        self._running = asyncio.create_task(self._run(), name=f"site {self.name} of an upper federation")

    async def stop(self) -> None:
        """Leave in order; what is open goes on at the next start."""
        if self._running is None:
            return
        self._agent.stop()
        await asyncio.wait({self._running}, timeout=LEAVE_TIMEOUT_S)
        self._running.cancel()

    async def _run(self) -> None:
        """The region goes on for its own runs where the upper server refuses it; people find out why in log and status."""
        self._home.make()
        try:
            with sole_agent(self._home):
                await self._agent.run()
        except AtollError as error:
            self._tell(error)
        except ExceptionGroup as failures:
            for failure in failures.exceptions:
                self._tell(failure)

    def _tell(self, error: Exception) -> None:
        unforeseen = error if not isinstance(error, AtollError) else None
        _log.error("this server is no site of the one at %s any more: %s", self.address, error, exc_info=unforeseen)


def join_region(home: Path, region: Region) -> RegionSite:
    """The membership whose home is `home`, not started yet."""
    return RegionSite(home, region)
