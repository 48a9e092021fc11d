"""Seconds a round of a real federation, beside what grpcio alone would need for the same bytes, in one run.

    python benchmarks/rounds.py --sites 8 --megabytes 100 --rounds 5 [--plain] --json

Real server, agent and worker processes on loopback, mutual TLS unless --plain. The worker loads, changes and
differences every tensor in torch; the server checks, folds and commits; the outbox is durable. The first round is left
out (workers warm up). Memory is the peak of RssAnon: above idle and in models of the server and of an agent (`site`),
in all and in MB, torch included, of a worker.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import statistics
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bare_stream import Tls, measure
from echo import install

from atoll.cli.demonstration.crew import Crew, atoll_command, free_ports

SITE = """
[apps.echo]
distribution = "atoll-echo"
entry_point = "echo"
[data.echo]
"""
POLICY = """
allowed_apps = [{ name = "echo", hash = "any-installed" }]
researchers = ["ada"]
min_cohort = 1
max_rounds = 1000
"""
JOB = """
[job]
name = "echo"
app = "echo"
rounds = {rounds}
[app]
megabytes = {megabytes}
[strategy]
kind = "{strategy}"
schedule = {{ kind = "rounds", min = {sites}, deadline = "30m" }}
work = {{ steps = 1 }}
[evaluation]
sites = false
[training]
threads = 1
"""


def main() -> None:
    options = _parse()
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as folder:
        record = run(Path(folder), options)
    print(json.dumps(record) if options.json else "\n".join(f"{key:24} {value}" for key, value in record.items()))


def run(root: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One federation from start to end, and the bare stream after it."""
    path = os.pathsep.join([str(install(root / "installed")), os.environ.get("PYTHONPATH", "")])
    with Crew(root / "logs", os.environ | {"PYTHONPATH": path.rstrip(os.pathsep)}) as crew:
        homes = start(root, crew, options)
        watcher = Memory(crew.pids())
        job = root / "job.toml"
        job.write_text(
            JOB.format(
                rounds=options.rounds + 1, megabytes=options.megabytes, sites=options.sites, strategy=options.strategy
            )
        )
        printed = crew.ask("run", atoll_command("run", job, "--json", "--home", root / "ada"))
        peaks = watcher.stop()
        tls = None if options.plain else throwaway_tls()
        bytes_each = int(options.megabytes * 1e6)
        bare = measure(options.sites, bytes_each, tls)
    seconds = [record["seconds"] for record in json.loads(printed)["rounds"]][1:]
    moved = options.sites * bytes_each
    limit_s = moved / bare.down + moved / bare.up
    per_round = statistics.median(seconds)
    return {
        "sites": options.sites,
        "megabytes": options.megabytes,
        "rounds": len(seconds),
        "tls": not options.plain,
        "seconds_per_round": round(per_round, 4),
        "seconds_min": round(min(seconds), 4),
        "seconds_max": round(max(seconds), 4),
        "bare_grpc_gb_per_s": round(2 * moved / limit_s / 1e9, 3),
        "ratio_to_limit": round(per_round / limit_s, 3),
        "server_peak_models": round(peaks["server"] / bytes_each, 2),
        "site_peak_models": round(max(peaks[site] for site in homes) / bytes_each, 2),
        "worker_peak_mb": round(max(peaks[f"{site} worker"] for site in homes) / 1e6),
    }


def start(
    root: Path, crew: Crew, options: argparse.Namespace, programs: Mapping[str, list[str]] = MappingProxyType({})
) -> dict[str, Path]:
    """A server and `options.sites` sites, running, each of an organisation of its own; `programs` are run in place of agents."""
    ports = free_ports(2)
    address, enrolment = (f"127.0.0.1:{port}" for port in ports)
    places = ("--address", address, "--listen", address)
    enrol = ("--enrolment-address", enrolment, "--enrolment-listen", enrolment)
    name = ("--name", "bench", "--key-folder", root / "key")
    crew.ask("init", atoll_command("server", "init", root / "server", *name, *places, *enrol))
    if options.plain:
        settings = root / "server" / "server.toml"
        settings.write_text(re.sub(r"(?m)^#? ?plaintext = .*$", "plaintext = true", settings.read_text()))
    crew.start("server", "server", "run", root / "server")
    for port in ports:
        crew.await_port("server", port)
    operator = root / "server" / "operator"
    homes = {f"site-{number}": root / f"site-{number}" for number in range(1, options.sites + 1)}
    for site, home in homes.items():
        add = atoll_command("site", "add", site, "--organisation", f"of {site}", "--home", operator)
        crew.ask("join", atoll_command("site", "join", "-", "--home", home), text=crew.ask("add", add))
        settings = home / "site.toml"
        text = settings.read_text()
        if options.plain:
            text = text.replace("[site]\n", f'[site]\nserver = "{address}"\nplaintext = true\n', 1)
        settings.write_text(text + SITE)
        (home / "policy.toml").write_text(POLICY)
    token = crew.ask("add", atoll_command("user", "add", "ada", "--home", operator))
    crew.ask("join", atoll_command("user", "join", "-", "--home", root / "ada"), text=token)
    (root / "ada" / "user.toml").write_text(("plaintext = true\n" if options.plain else "") + SITE)
    crew.ask("sign", atoll_command("federation", "sign", "--yes", "--key", root / "key", "--home", operator))
    for site, home in homes.items():
        if site in programs:
            crew.start_program(site, programs[site])
        else:
            crew.start(site, "site", "run", "--home", home)
    return homes


def throwaway_tls() -> Tls:
    """A certificate of the federation for both ends of the bare stream, so that the handshake is of the same kind."""
    from datetime import UTC, datetime, timedelta

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "server.atoll")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("server.atoll")]), critical=False)
        .sign(key, hashes.SHA256())
        .public_bytes(serialization.Encoding.PEM)
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return Tls(ca=certificate, certificate=certificate, key=private)


class Memory:
    """Watches RssAnon of processes, above the first reading, and of the largest that each has started, in all."""

    def __init__(self, pids: dict[str, int]) -> None:
        self._pids = pids
        self._idle = {name: anonymous_bytes(pid) for name, pid in pids.items()}
        self._peaks: dict[str, int] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._read()
        self._thread.start()

    def stop(self) -> dict[str, int]:
        """Bytes, by name; those of the largest process that a site's agent has started under "NAME worker"."""
        self._stop.set()
        self._thread.join()
        return self._peaks

    def _watch(self) -> None:
        while not self._stop.wait(0.05):
            self._read()

    def _read(self) -> None:
        for name, pid in self._pids.items():
            self._note(name, anonymous_bytes(pid) - self._idle[name])
            self._note(f"{name} worker", max(map(anonymous_bytes, _descendants(pid)), default=0))

    def _note(self, name: str, num_bytes: int) -> None:
        self._peaks[name] = max(self._peaks.get(name, 0), num_bytes)


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, path.read_text().split()):
                found += [child, *_descendants(child)]
    return found


def anonymous_bytes(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    found = re.search(r"RssAnon:\s+(\d+) kB", text)
    return int(found[1]) * 1024 if found else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--sites", type=int, default=8)
    parser.add_argument("--megabytes", type=float, default=100.0)
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds, after one that is not")
    parser.add_argument("--strategy", default="fedavg")
    parser.add_argument("--plain", action="store_true", help="without TLS, on loopback")
    parser.add_argument("--json", action="store_true", help="one JSON line")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
