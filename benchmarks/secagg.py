"""Secure aggregation beside the same rounds in plain, in one run.

    python benchmarks/secagg.py --sites 10 --parameters 10000000 --drops 2 --rounds 3 --json

Up to 16 sites are real processes on loopback with mutual TLS (`rounds.py`); `--drops` of them drop out of every session
once their shares are out, and the rounds in plain are of the others. More sites are light: in this process, without
torch, network and disk, each with the site's side of the protocol, before the server's session and sum; `--corrupt` and
`--dropped` are the terms.

`sum_exact`: light sites' sums are compared with a naive one of integers, bit for bit. The update of a process is a power of two and
the bound such that its levels are integers, so the models of masked and plain rounds must have the same bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import light_sessions
import masking
import rounds
from echo import install

from atoll.cli.demonstration.crew import Crew, atoll_command
from atoll.client.people import load_person
from atoll.client.researcher import fetch_model
from atoll.privacy.secagg.levels import largest_level

PROCESSES = 16  # sites beyond are light
MASKED = """
[privacy]
secure_aggregation = {{ threat = "{threat}", corrupt = {corrupt}, fewest_survivors = {fewest}, bound = {bound!r}, deadline = "10m" }}
"""


def main() -> None:
    options = _parse()
    if options.sites > PROCESSES:
        record = light_sessions.measure(options)
    else:
        with tempfile.TemporaryDirectory(prefix="atoll-bench-") as folder:
            record = run(Path(folder), options)
    rates = masking.measure(10_000_000, 9, 5, os.cpu_count() or 1)
    record |= {name: value for name, value in rates.items() if "gb_per_s" in name or "ratio" in name}
    print(json.dumps(record) if options.json else "\n".join(f"{key:24} {value}" for key, value in record.items()))


def run(root: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Masked and plain rounds of one federation."""
    options.plain = False
    path = os.pathsep.join([str(install(root / "installed")), os.environ.get("PYTHONPATH", "")])
    with Crew(root / "logs", os.environ | {"PYTHONPATH": path.rstrip(os.pathsep)}) as crew:
        dropping = [f"site-{number}" for number in range(1, options.drops + 1)]
        homes = rounds.start(root, crew, options, {site: dropping_program(root / site) for site in dropping})
        found, peaks = {}, {}
        for kind in ("masked", "plain"):
            sites = [site for site in homes if kind == "masked" or site not in dropping]
            job = root / f"{kind}.toml"
            job.write_text(job_of(options, sites, masked=kind == "masked"))
            watcher = rounds.Memory(crew.pids())
            printed = crew.ask("run", atoll_command("run", job, "--json", "--home", root / "ada"))
            state = json.loads(printed)
            asyncio.run(fetch_model(load_person(root / "ada"), state["run"], root / f"{kind}.safetensors"))
            found[kind] = state["rounds"][1:]  # the first one warms up
            peaks[kind] = watcher.stop()
    seconds = {kind: statistics.median(one["seconds"] for one in each) for kind, each in found.items()}
    last = found["masked"][-1]
    senders = options.sites - options.drops
    return {
        "sites": options.sites,
        "parameters": options.parameters,
        "drops": len(last["secure"]["dropped"]),
        "light": False,
        "threat": options.threat,
        "threshold": last["secure"]["threshold"],
        "rounds": len(found["masked"]),
        "seconds_per_round": round(seconds["masked"], 3),
        "plain_seconds_per_round": round(seconds["plain"], 3),
        "ratio_to_plain": round(seconds["masked"] / seconds["plain"], 3),
        "sum_exact": last["sites"] == senders
        and _data(root / "masked.safetensors") == _data(root / "plain.safetensors"),
        "bytes_per_parameter": round(last["bytes_up"] / senders / options.parameters, 4),
    } | {f"{kind}_memory": _memory(peaks[kind], sorted(homes), 4 * options.parameters) for kind in found}


def _memory(peaks: dict[str, int], sites: list[str], model_bytes: int) -> dict[str, float]:
    """Peaks of RssAnon, as `rounds.py` has them: of server and agents above idle in models, of workers in all."""
    return {
        "server_models": round(peaks["server"] / model_bytes, 2),
        "agent_models": round(max(peaks[site] for site in sites) / model_bytes, 2),
        "worker_mb": round(max(peaks[f"{site} worker"] for site in sites) / 1e6),
    }


def dropping_program(home: Path) -> list[str]:
    return [sys.executable, str(Path(__file__).parent / "dropping_site.py"), str(home)]


def job_of(options: argparse.Namespace, sites: list[str], *, masked: bool) -> str:
    megabytes = options.parameters * 4 / 1e6
    text = rounds.JOB.format(
        rounds=options.rounds + 1, megabytes=megabytes, sites=len(sites), strategy="fedavg"
    ).replace('name = "echo"\n', f'name = "echo"\nsites = {json.dumps(sites)}\n')
    if masked:
        bound = largest_level(len(sites), 32) * 2.0**-20  # so that the update of 2^-10 is 1,024 levels
        text += MASKED.format(
            threat=options.threat, corrupt=options.corrupt, fewest=min(5, len(sites) - options.drops), bound=bound
        )
    return text


def _data(path: Path) -> bytes:
    """The tensors of a model file, without what the header says of their origin."""
    data = path.read_bytes()
    return data[8 + int.from_bytes(data[:8], "little") :]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", type=int, default=10)
    parser.add_argument("--parameters", type=int, default=10_000_000)
    parser.add_argument("--drops", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threat", choices=("active", "semi-honest"), default="active")
    parser.add_argument("--corrupt", type=float, default=0.1)
    parser.add_argument("--dropped", type=float, default=None)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
