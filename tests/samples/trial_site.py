"""A site for tests: a home in plain text, an app that is installed nowhere else, and the stub as its worker.

Run as a program it is the agent of such a site, and kills itself (SIGKILL) when a step comes::

    python trial_site.py HOME [STEP]
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import stat
import sys
from dataclasses import dataclass
from pathlib import Path

import atoll
from atoll.client.agent import Agent
from atoll.client.home import SiteHome
from atoll.client.link import find_link
from atoll.client.settings import load_settings
from atoll.client.steps import Observer, Step, unobserved
from atoll.cluster.registry import hash_distribution
from atoll.cluster.worker_process import WorkerProcess
from atoll.wire import control_pb2 as pb
from atoll.wire.job import parse_job
from atoll.wire.manifest import Manifest
from atoll.wire.names import new_run_id

SITE = "north"
DISTRIBUTION = "atoll-trial-site-apps"
GOT_READY = "prepare "  # begins a line of the stub's ledger; the process id follows
MANIFEST = Manifest.build([("layer.weight", "float32", (64, 64), "parameter"), ("steps", "int64", (), "buffer")])
SETTINGS = """
[site]
name = "{site}"
server = "{address}"
plaintext = true
[apps.trial]
distribution = "{distribution}"
entry_point = "trial"
[apps.absent]
distribution = "atoll-no-such-distribution"
entry_point = "absent"
[scripts.old]
path = "/opt/train.py"
[data.trial]
ledger = "{ledger}"
fault = "{fault}"
"""
POLICY = """
allowed_apps = [{ name = "trial", hash = "any-installed" }, { name = "absent", hash = "any-installed" },
                { name = "unheard", hash = "any-installed" }, { name = "old", hash = "any-installed" }]
researchers = ["ada"]
min_cohort = 3
max_rounds = 10
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialSite:
    """The folders of one site under `root`."""

    root: Path

    @property
    def home(self) -> SiteHome:
        return SiteHome(root=self.root / "home")

    @property
    def ledger(self) -> Path:
        return self.root / "ledger"

    @property
    def fault(self) -> Path:
        return self.root / "fault"

    @property
    def installed(self) -> Path:
        """Where the app is installed; belongs on sys.path."""
        return self.root / "installed"

    def make(self, address: str) -> None:
        """Home, app and worker."""
        self.home.make()
        text = SETTINGS.format(
            site=SITE, address=address, distribution=DISTRIBUTION, ledger=self.ledger, fault=self.fault
        )
        self.home.settings.write_text(text)
        self.home.policy.write_text(POLICY)
        install(self.installed)
        stub = Path(__file__).with_name("stub_worker.py").read_text()
        self.worker.write_text(f"#!{sys.executable}\n{stub}")
        self.worker.chmod(stat.S_IRWXU)

    @property
    def worker(self) -> Path:
        return self.root / "worker"

    def trainings(self) -> list[str]:
        """Keys of the trainings that workers have begun."""
        return [line for line in self._ledger_lines() if not line.startswith(GOT_READY)]

    def workers(self) -> list[int]:
        """Process ids of the workers that got ready, one for each time."""
        return [int(line.removeprefix(GOT_READY)) for line in self._ledger_lines() if line.startswith(GOT_READY)]

    def _ledger_lines(self) -> list[str]:
        return self.ledger.read_text().splitlines() if self.ledger.exists() else []

    def agent(self, on_step: Observer = unobserved) -> Agent:
        """The site's agent, with the stub as its worker and short waits."""
        settings = load_settings(self.home.settings)
        source = str(Path(atoll.__file__).parents[1])

        def new_worker(folder: Path, log_path: Path) -> WorkerProcess:
            return WorkerProcess(folder, python=str(self.worker), env={"PYTHONPATH": source}, log_path=log_path)

        return Agent(
            settings=settings,
            home=self.home,
            link=find_link(settings, self.home),
            on_step=on_step,
            new_worker=new_worker,
            rng=Hasty(),
        )


class Hasty(random.Random):
    """Never waits long."""

    def uniform(self, a: float, b: float) -> float:
        return min(b, 0.02)


def install(folder: Path, text: str = "class Trial: ...\n") -> None:
    """An installed distribution with one app, without pip."""
    folder.mkdir(exist_ok=True)
    (folder / "trial_site_apps.py").write_text(text)
    info = folder / "atoll_trial_site_apps-1.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {DISTRIBUTION}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[atoll.apps]\ntrial = trial_site_apps:Trial\n")
    (info / "RECORD").write_text("trial_site_apps.py,,\natoll_trial_site_apps-1.0.dist-info/RECORD,,\n")


def make_offer(*, app: str = "trial", data: str = "trial", rounds: int = 3, fewest_sites: int = 3) -> pb.RunOffer:
    """An offer that the trial site accepts, unless told otherwise. The distribution must be on sys.path."""
    job = parse_job({"job": {"name": "trial", "app": app, "data": data, "rounds": rounds, "wait_for_sites": "20s"}})
    return pb.RunOffer(
        run=new_run_id(),
        job=job.canonical(),
        manifest=MANIFEST.encode(),
        app_hash=hash_distribution(DISTRIBUTION),
        submitted_by="ada",
        fewest_sites=fewest_sites,
    )


def make_task(
    run: str, round_: int = 1, *, kind: pb.TaskKind = pb.TRAIN, version: int | None = None, attempt: int = 1
) -> pb.Task:
    """A task as the server names them."""
    name = f"r{round_}.{SITE}" if kind == pb.TRAIN else f"e{round_}.{SITE}"
    base = version if version is not None else round_ - 1 if kind == pb.TRAIN else round_
    return pb.Task(key=pb.TaskKey(run=run, task=name, attempt=attempt), kind=kind, round=round_, base_version=base)


def key_text(key: pb.TaskKey) -> str:
    """As the agent writes a key in a worker's request."""
    return f"{key.run}/{key.task}#{key.attempt}"


def main() -> None:
    """Be the agent, until a step comes or SIGTERM."""
    site = TrialSite(root=Path(sys.argv[1]))
    fatal = Step(sys.argv[2]) if len(sys.argv) > 2 else None
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)

    def on_step(step: Step, subject: str) -> None:
        if step is fatal:
            os.kill(os.getpid(), signal.SIGKILL)

    async def run() -> None:
        agent = site.agent(on_step)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, agent.stop)
        await agent.run()

    sys.path.insert(0, str(site.installed))
    asyncio.run(run())


if __name__ == "__main__":
    main()
