"""The agent as a process: settings, log, lock, signals."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from logging.handlers import RotatingFileHandler
from pathlib import Path

from atoll.client.agent import Agent
from atoll.client.home import SiteHome, sole_agent
from atoll.client.link import find_link
from atoll.client.settings import load_settings
from atoll.client.steps import Observer, unobserved
from atoll.transport.mallopt import tune_malloc

LOG_BYTES, NUM_OLD_LOGS = 10 << 20, 5


def run_agent(home: Path, on_step: Observer = unobserved) -> None:
    """Be the agent of the site whose home is `home`, until SIGTERM or SIGINT.

    Raises:
        ConfigError: site.toml is missing or cannot be used (exit 2).
        LocalError: another agent runs here, or identity or disk cannot be used (exit 3).
        RemoteError: the server refuses this site for good (exit 4).
    """
    site = SiteHome(root=home)
    settings = load_settings(site.settings)
    link = find_link(settings, site)
    site.make()
    with sole_agent(site):
        _log_to(site.logs / "agent.log")
        tune_malloc()
        asyncio.run(_run(Agent(settings=settings, home=site, link=link, on_step=on_step)))


async def _run(agent: Agent) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, agent.stop)
    await agent.run()


def _log_to(path: Path) -> None:
    """Log to the terminal, where a service manager picks it up, and to a file that does not grow without bound."""
    form = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    file = RotatingFileHandler(path, maxBytes=LOG_BYTES, backupCount=NUM_OLD_LOGS, delay=True)
    for handler in (logging.StreamHandler(sys.stderr), file):
        handler.setFormatter(form)
        logging.getLogger("atoll").addHandler(handler)
    logging.getLogger("atoll").setLevel(logging.INFO)
