"""A thousand sites at one server: what they cost while idle, and a round over all of them.

    python benchmarks/many_sites.py --sites 1000 --megabytes 1 --rounds 2 --json

The server is the real process, with mutual TLS. The sites are real agents, each with its own identity, home and stream,
but many in one process, and with a stand-in for the worker that sends an update made beforehand. Idle figures are of
`--idle` seconds after all have attached: CPU of the server, its anonymous memory a site, and whether its database was
written (heartbeats must not).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from echo import Parts, install
from rounds import POLICY, SITE, anonymous_bytes

from atoll.cli.demonstration.crew import Crew, atoll_command, free_ports
from atoll.client.agent import Agent
from atoll.client.home import SiteHome
from atoll.client.join import join_site
from atoll.client.link import find_link
from atoll.client.operator import add_member
from atoll.client.people import load_person
from atoll.client.settings import load_settings
from atoll.client.steps import Step
from atoll.cluster.messages import Evaluate, Evaluated, Prepare, Prepared, Train, Trained
from atoll.wire.checksum import crc32_of

PROCESSES = 4
PATIENCE_S = 600.0
JOB = """
[job]
name = "many"
app = "echo"
rounds = {rounds}
wait_for_sites = "10m"
[app]
megabytes = {megabytes}
[strategy]
schedule = {{ kind = "rounds", min = {sites}, deadline = "30m" }}
work = {{ steps = 1 }}
[evaluation]
sites = false
"""


def main() -> None:
    options = _parse()
    if options.be is not None:
        asyncio.run(_be_sites(options.be, options.update))
        return
    with tempfile.TemporaryDirectory(prefix="atoll-many-") as folder:
        record = _run(Path(folder), options)
    print(json.dumps(record) if options.json else "\n".join(f"{key:28} {value}" for key, value in record.items()))


def _run(root: Path, options: argparse.Namespace) -> dict[str, Any]:
    path = os.pathsep.join([str(install(root / "installed")), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    environment = os.environ | {"PYTHONPATH": path}
    sys.path.insert(0, str(root / "installed"))
    update = root / "update"
    update.write_bytes(update_of(int(options.megabytes * 1e6)))
    with Crew(root / "logs", environment) as crew:
        homes = _enrol(root, crew, options.sites)
        server = crew.pids()["server"]
        before = anonymous_bytes(server)
        began_s = time.monotonic()
        crowds = [_crowd(homes[start::PROCESSES], update, environment, root) for start in range(PROCESSES)]
        try:
            for crowd in crowds:
                assert crowd.stdout is not None
                if crowd.stdout.readline().strip() != "attached":
                    raise RuntimeError(f"sites did not attach; logs in {root}")
            attached_s = time.monotonic() - began_s
            time.sleep(5)  # what attaching set off has settled
            memory, idle = anonymous_bytes(server) - before, _idle(server, root / "server", options.idle)
            printed = _follow(root, crew, options)
            peak = anonymous_bytes(server) - before
        finally:
            for crowd in crowds:
                crowd.terminate()
            for crowd in crowds:
                crowd.wait(60)
    rounds = [record["seconds"] for record in json.loads(printed)["rounds"]]
    return {
        "sites": options.sites,
        "megabytes": options.megabytes,
        "seconds_to_attach": round(attached_s, 1),
        "idle_cpu_percent": round(100 * idle["cpu_s"] / options.idle, 2),
        "idle_database_writes": idle["written"],
        "server_kb_a_site": round(memory / options.sites / 1000, 1),
        "rounds": len(rounds),
        "seconds_per_round": round(rounds[-1], 2),
        "server_mb_after_rounds": round(peak / 1e6, 1),
    }


def update_of(num_bytes: int) -> bytes:
    """An update of the echo model: every value moved by 2^-10."""
    import torch

    from atoll.aggregation.encode import encode_update
    from atoll.aggregation.layout import update_layout
    from atoll.aggregation.rounding import Rounding
    from atoll.aggregation.strategy import resolve
    from atoll.wire.job import parse_job
    from atoll.wire.tensors import manifest_of, state_of

    strategy = resolve(parse_job({"job": {"name": "many", "app": "echo", "rounds": 1}}))
    model = Parts(num_bytes)
    layout = update_layout(manifest_of(model), strategy.codec, strategy.buffers)
    base = {name: tensor.detach() for name, (tensor, _) in state_of(model).items()}
    trained = {name: tensor + 2.0**-10 for name, tensor in base.items()}
    out = bytearray(layout.num_bytes)
    with torch.no_grad():
        encode_update(layout, base, trained, out, rounding=Rounding(bytes(32)), bound=strategy.bound)
    return bytes(out)


def _enrol(root: Path, crew: Crew, sites: int) -> list[Path]:
    """Server, researcher, and a home for each site, through the functions behind the commands."""
    ports = free_ports(2)
    address, enrolment = (f"127.0.0.1:{port}" for port in ports)
    places = ("--address", address, "--listen", address)
    enrol = ("--enrolment-address", enrolment, "--enrolment-listen", enrolment)
    name = ("--name", "bench", "--key-folder", root / "key")
    crew.ask("init", atoll_command("server", "init", root / "server", *name, *places, *enrol))
    crew.start("server", "server", "run", root / "server")
    for port in ports:
        crew.await_port("server", port)
    operator = load_person(root / "server" / "operator")
    homes = []
    for number in range(sites):
        site, home = f"site-{number}", root / "sites" / f"site-{number}"
        token = asyncio.run(add_member(operator, name=site, role="site", organisation="bench", valid_s=3600))
        join_site(token, home)
        settings = home / "site.toml"
        settings.write_text(settings.read_text() + SITE)
        (home / "policy.toml").write_text(POLICY)
        homes.append(home)
    token = crew.ask("add", atoll_command("user", "add", "ada", "--home", root / "server" / "operator"))
    crew.ask("join", atoll_command("user", "join", "-", "--home", root / "ada"), text=token)
    (root / "ada" / "user.toml").write_text(SITE)
    sign = atoll_command("federation", "sign", "--yes", "--key", root / "key", "--home", root / "server" / "operator")
    crew.ask("sign", sign)
    return homes


def _crowd(homes: list[Path], update: Path, environment: dict[str, str], root: Path) -> subprocess.Popen[str]:
    """A process that is so many sites."""
    listed = root / f"homes-{homes[0].name}"
    listed.write_text("\n".join(map(str, homes)))
    command = [sys.executable, __file__, "--be", str(listed), "--update", str(update)]
    with (root / "logs" / f"{homes[0].name}.log").open("wb") as log:
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True)


def _idle(pid: int, folder: Path, seconds: float) -> dict[str, Any]:
    """What a server does while nobody asks anything of it."""
    cpu_s, size = _cpu_s(pid), _database(folder)
    time.sleep(seconds)
    return {"cpu_s": _cpu_s(pid) - cpu_s, "written": "none" if _database(folder) == size else "some"}


def _database(folder: Path) -> list[tuple[str, int, int]]:
    """Files of the database, with their sizes and times of change."""
    return [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(folder.glob("*.sqlite*"))]


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _follow(root: Path, crew: Crew, options: argparse.Namespace) -> str:
    job = root / "job.toml"
    job.write_text(JOB.format(rounds=options.rounds, megabytes=options.megabytes, sites=options.sites))
    return crew.ask("run", atoll_command("run", job, "--json", "--home", root / "ada"))


# --- the sites ------------------------------------------------------------------------------------------------------


class _StandIn:
    """A worker that needs no torch: hands out one update, again and again."""

    pid: int | None = None

    def __init__(self, update: Path) -> None:
        self._update = update
        self._num_bytes, self._crc32 = update.stat().st_size, crc32_of(update.read_bytes())

    async def start(self) -> None:
        self.pid = os.getpid()

    async def prepare(self, request: Prepare, timeout_s: float | None = None) -> Prepared:
        return Prepared(max_weight=1, update_bytes=self._num_bytes, device="none")

    async def train(self, request: Train, on_progress: Any = None) -> Trained:
        await asyncio.to_thread(shutil.copyfile, self._update, request.out_path)
        return Trained(key=request.key, weight=1, metrics={}, num_bytes=self._num_bytes, crc32=self._crc32)

    async def evaluate(self, request: Evaluate) -> Evaluated:
        return Evaluated(key=request.key, metrics={})

    async def close(self) -> None:
        self.pid = None


async def _be_sites(listed: Path, update: Path) -> None:
    """Agents of all homes in a file; says "attached" once they all are."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    homes = [Path(line) for line in listed.read_text().splitlines()]
    waiting, all_in = len(homes), asyncio.Event()

    def on_step(step: Step, subject: str) -> None:
        nonlocal waiting
        if step is Step.ATTACHED:
            waiting -= 1
            if waiting == 0:
                all_in.set()

    async def be(path: Path) -> None:
        home = SiteHome(root=path)
        settings = load_settings(home.settings)
        home.make()
        agent = Agent(
            settings=settings,
            home=home,
            link=find_link(settings, home),
            on_step=on_step,
            new_worker=lambda folder, log: _StandIn(update),
        )
        await agent.run()

    sites = [asyncio.create_task(be(path)) for path in homes]
    await asyncio.wait_for(all_in.wait(), PATIENCE_S)
    print("attached", flush=True)
    await asyncio.gather(*sites)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--sites", type=int, default=1000)
    parser.add_argument("--megabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--idle", type=float, default=60.0, help="seconds of idleness that are measured")
    parser.add_argument("--json", action="store_true", help="one JSON line")
    parser.add_argument("--be", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--update", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
