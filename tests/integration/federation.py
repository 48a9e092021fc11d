"""A federation of real processes on loopback: the server, sites and a researcher, all through the `atoll` command."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from integration.forked import Forked, Started
from integration.trial import install_apps, write_share
from numpy.typing import NDArray
from safetensors.numpy import load_file

from atoll.cli.snapshots import run_record
from atoll.client.people import load_person
from atoll.client.researcher import fetch_model, snapshot_of, watch

PATIENCE_S = 120.0  # for anything at all; a healthy federation takes a few seconds


@dataclass(slots=True)
class Process:
    """A started process with its log."""

    popen: Started
    log: Path

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def running(self) -> bool:
        return self.popen.poll() is None

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        self.popen.kill()
        self.popen.wait()

    def stop(self, timeout_s: float = 30.0) -> int:
        """SIGTERM, and the exit code."""
        if self.running:
            self.popen.terminate()
        return self.popen.wait(timeout_s)

    def text(self) -> str:
        return self.log.read_text(errors="replace")


@dataclass(slots=True)
class Done:
    """What a command that ended has printed."""

    code: int
    out: str
    err: str


@dataclass(slots=True)
class Federation:
    """Folders, ports and processes of one federation. `close` ends whatever still runs."""

    root: Path
    ports: tuple[int, int] = (0, 0)
    bulk_port: int = 0
    server: Process | None = None
    sites: dict[str, Process] = field(default_factory=dict)
    limits: str = "heartbeat_s = 1\nlease_s = 10"
    environment: dict[str, str] = field(default_factory=dict)

    # --- making one -------------------------------------------------------------------------------------------------

    def make(self) -> None:
        """Keys, certificates, settings; nothing runs yet."""
        *ports, self.bulk_port = free_ports()
        self.ports = (ports[0], ports[1])
        self.environment = os.environ | {"PYTHONPATH": str(install_apps(self.root / "installed"))}
        self.atoll(
            "server", "init", self.server_folder, "--name", "trial", "--key-folder", self.root / "offline-key",
            "--address", f"127.0.0.1:{self.ports[0]}", "--enrolment-address", f"127.0.0.1:{self.ports[1]}",
            "--listen", f"127.0.0.1:{self.ports[0]}", "--enrolment-listen", f"127.0.0.1:{self.ports[1]}",
        )  # fmt: skip
        settings = self.server_folder / "server.toml"
        settings.write_text(settings.read_text().replace("127.0.0.1:0", f"127.0.0.1:{self.bulk_port}"))
        self.add_settings(settings, f"[limits]\n{self.limits}\n")

    def add_settings(self, path: Path, text: str) -> None:
        """Append tables to a TOML file."""
        path.write_text(path.read_text() + "\n" + text)

    def start_server(self) -> Process:
        """Start the server and wait until its ports take connections."""
        self.server = self.start("server", "server", "run", self.server_folder)
        self.wait_for_ports()
        return self.server

    def wait_for_ports(self) -> None:
        self.wait_for(lambda: all(connects(port) for port in self.ports), "the server listens", self.server)

    def enrol_site(self, name: str, *, organisation: str = "", settings: str = "", policy: str | None = None) -> None:
        """Token, keys, site.toml with the trial app and this site's data, a policy that allows it."""
        token = self.atoll(
            "site", "add", name, "--organisation", organisation or f"organisation of {name}", "--home", self.operator
        ).out.strip()
        self.atoll("site", "join", token, "--home", self.home(name))
        data = self.write_data(name)
        self.add_settings(
            self.home(name) / "site.toml",
            settings
            or '[apps.trial]\ndistribution = "trial-apps"\nentry_point = "trial"\n'
            f'[data.trial]\npath = "{data}"\nfault = "{self.fault(name)}"\n'
            f'opened = "{self.opened(name)}"\n',
        )
        (self.home(name) / "policy.toml").write_text(
            'allowed_apps = [{ name = "trial", hash = "any-installed" }]\nresearchers = ["*"]\nmin_cohort = 1\n'
            'max_rounds = 10_000\ntasks = ["train", "evaluate", "statistics"]\n'
            if policy is None
            else policy
        )

    def label(self, site: str, region: str) -> None:
        """Give a site the label `region`."""
        path, example = self.home(site) / "site.toml", '# labels = { region = "north" }'
        text = path.read_text()
        assert example in text
        path.write_text(text.replace(example, f'labels = {{ region = "{region}" }}'))

    def write_data(self, name: str) -> Path:
        """This site's share of the breast cancer data."""
        return write_share(self.root / f"{name}.npz", int(name.rsplit("-", 1)[-1]) - 1)

    def enrol_researcher(self) -> None:
        token = self.atoll("user", "add", "ada", "--home", self.operator).out.strip()
        self.atoll("user", "join", token, "--home", self.researcher)
        (self.researcher / "user.toml").write_text(
            '[apps.trial]\ndistribution = "trial-apps"\nentry_point = "trial"\n'
            '[apps.larger]\ndistribution = "trial-apps"\nentry_point = "larger"\n'
            '[apps.notes]\ndistribution = "trial-apps"\nentry_point = "notes"\n'
        )

    def sign(self) -> None:
        self.atoll("federation", "sign", "--key", self.root / "offline-key", "--home", self.operator, "--yes")

    def start_site(self, name: str, **environment: str) -> Process:
        self.sites[name] = self.start(name, "site", "run", "--home", self.home(name), **environment)
        return self.sites[name]

    def start_all(self, *names: str, settings: str = "") -> None:
        """The common case: server, researcher, and these sites, signed and running; `settings` goes into each site.toml."""
        self.start_server()
        self.enrol_researcher()
        for name in names:
            self.enrol_site(name)
            self.add_settings(self.home(name) / "site.toml", settings)
        self.sign()
        for name in names:
            self.start_site(name)

    # --- using it ---------------------------------------------------------------------------------------------------

    def submit(self, job: str) -> str:
        """Submit a job file; the id of the run."""
        return self.submitted(self.start_submitting(job))

    def start_submitting(self, job: str) -> Process:
        """`atoll run` under way: it waits for a server that goes away."""
        path = self.root / "job.toml"
        path.write_text(job)
        return self.start_command(["run", path, "--detach", "--home", self.researcher])

    def submitted(self, submitting: Process) -> str:
        done = finished(submitting)
        assert done.code == 0, f"{done.err}\n{self.logs()}"
        return done.out.strip()

    def status(self, run: str) -> dict[str, Any]:
        """The state of a run, as `atoll status --json` prints it."""
        return run_record(asyncio.run(snapshot_of(load_person(self.researcher), run)))

    def kill_and_start(self, name: str) -> None:
        """kill -9 of the server ("server") or of a site, and a new start of it."""
        if name == "server":
            assert self.server is not None
            self.server.kill()
            self.start_server()
        else:
            self.sites[name].kill()
            self.start_site(name)

    def wait_until(
        self, run: str, what: Callable[[dict[str, Any]], bool], patience_s: float = PATIENCE_S
    ) -> dict[str, Any]:
        """The state of a run as soon as `what` holds for it."""

        async def follow() -> dict[str, Any]:
            state: dict[str, Any] = {}
            try:
                async with asyncio.timeout(patience_s), aclosing(watch(load_person(self.researcher), run)) as snapshots:
                    async for snapshot in snapshots:
                        state = run_record(snapshot)
                        if what(state):
                            return state
            except TimeoutError:
                pass
            raise AssertionError(
                f"waited {patience_s} s in vain; the run: {json.dumps(state, indent=1)}\n{self.logs()}"
            )

        return asyncio.run(follow())

    def wait_for_end(self, run: str, patience_s: float = PATIENCE_S) -> dict[str, Any]:
        return self.wait_until(run, lambda state: state["status"] in ("finished", "failed", "stopped"), patience_s)

    def finish(self, job: str) -> dict[str, Any]:
        """Submit a job, wait for its end, and be sure that it finished."""
        state = self.wait_for_end(self.submit(job))
        assert state["status"] == "finished", f"{state}\n{self.logs()}"
        return state

    def model(self, run: str) -> dict[str, NDArray[Any]]:
        """The newest model of a run, by tensor name."""
        return self._model(run)

    def model_of_version(self, run: str, version: int) -> dict[str, NDArray[Any]]:
        return self._model(run, version)

    def _model(self, run: str, version: int | None = None) -> dict[str, NDArray[Any]]:
        path = self.root / f"{run}.safetensors"
        path.unlink(missing_ok=True)
        asyncio.run(fetch_model(load_person(self.researcher), run, path, version=version))
        return dict(load_file(path))

    def model_hash(self, run: str) -> str:
        """SHA-256 over names and bytes of the newest model."""
        digest = hashlib.sha256()
        for name, array in sorted(self.model(run).items()):
            digest.update(name.encode() + array.tobytes())
        return digest.hexdigest()

    # --- processes --------------------------------------------------------------------------------------------------

    def atoll(self, *arguments: str | Path, check: bool = True) -> Done:
        """Run an `atoll` command to its end."""
        done = finished(self.start_command(arguments))
        if check and done.code != 0:
            raise AssertionError(f"atoll {arguments} ended with {done.code}: {done.err}\n{self.logs()}")
        return done

    def start_command(self, arguments: Sequence[str | Path]) -> Process:
        """An `atoll` command under way; see `finished`."""
        folder = Path(tempfile.mkdtemp(prefix="command-", dir=self.root))
        out = folder / "out"
        return Process(popen=Forked(command(arguments), self.environment, out, folder / "err"), log=out)

    def start(self, name: str, *arguments: str | Path, **environment: str) -> Process:
        return self.start_program(name, command(arguments), **environment)

    def start_program(self, name: str, arguments: Sequence[str], **environment: str) -> Process:
        """A server is forked where it needs no environment of its own; see forked.py."""
        log = self.root / f"{name}.log"
        if "server" in arguments and not environment:
            return Process(popen=Forked(arguments, self.environment, log, log), log=log)
        with log.open("ab") as file:
            popen = subprocess.Popen(arguments, env=self.environment | environment, stdout=file, stderr=file)
        return Process(popen=popen, log=log)

    def wait_for(self, what: Callable[[], bool], name: str, process: Process | None = None) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not what():
            if time.monotonic() > deadline_s or (process is not None and not process.running):
                raise AssertionError(f"never came: {name}\n{self.logs()}")
            time.sleep(0.02)

    def wait_for_worker(self, site: str) -> int:
        """Process id of the worker of a running site, as soon as it has one."""
        self.wait_for(lambda: bool(self.workers(site)), f"{site} has a worker")
        return self.workers(site)[0]

    def workers(self, site: str) -> list[int]:
        """Process ids of a site's workers that live: its agent's children, and those of the nursery among them."""
        found: list[int] = []
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.sites[site].pid).children():
                is_nursery = "atoll.cluster.nursery" in child.cmdline()
                found += [process.pid for process in (child.children() if is_nursery else [child])]
        return found

    def children(self, process: Process) -> list[int]:
        """Process ids of what a process has started."""
        return [child.pid for child in psutil.Process(process.pid).children()]

    def logs(self) -> str:
        """The ends of all logs, for the text of a failed test."""
        logs = sorted(self.root.glob("*.log")) + sorted(self.root.glob("*/logs/*.log"))
        return "\n".join(f"--- {log.relative_to(self.root)}\n{log.read_text(errors='replace')[-3000:]}" for log in logs)

    def close(self) -> None:
        processes = [*self.sites.values(), *([self.server] if self.server is not None else [])]
        for process in processes:
            if process.running:
                process.popen.send_signal(signal.SIGCONT)
                process.popen.terminate()
        for process in processes:
            try:
                process.popen.wait(20.0)
            except subprocess.TimeoutExpired:
                process.kill()

    # --- places -----------------------------------------------------------------------------------------------------

    @property
    def server_folder(self) -> Path:
        return self.root / "server"

    @property
    def operator(self) -> Path:
        return self.server_folder / "operator"

    @property
    def researcher(self) -> Path:
        return self.root / "ada"

    def home(self, site: str) -> Path:
        return self.root / site

    def fault(self, site: str) -> Path:
        """The file that makes the trial app misbehave at a site."""
        return self.root / f"{site}.fault"

    def opened(self, site: str) -> Path:
        """The file in which the trial app notes that it opens data at a site."""
        return self.root / f"{site}.opened"


def finished(started: Process) -> Done:
    """What a command has printed, once it has ended."""
    code = started.popen.wait(PATIENCE_S)
    return Done(code=code, out=started.text(), err=started.log.with_name("err").read_text(errors="replace"))


def command(arguments: Sequence[str | Path]) -> list[str]:
    return [sys.executable, "-m", "atoll.cli", *map(str, arguments)]


def free_ports() -> tuple[int, int, int]:
    with socket.socket() as first, socket.socket() as second, socket.socket() as third:
        for one in (first, second, third):
            one.bind(("127.0.0.1", 0))
        return first.getsockname()[1], second.getsockname()[1], third.getsockname()[1]


def connects(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
