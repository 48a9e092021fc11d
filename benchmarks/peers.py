"""Seconds a round of Atoll, Flower and NVFLARE on the same work, one after the other in one run, and their ratios.

    python benchmarks/peers.py --sites 8 --megabytes 100 --rounds 3 --python PEERS/bin/python --json

Real processes on loopback. Each site takes a float32 model in tensors of 4 MiB, changes every value and sends it back;
the server makes the weighted mean. Atoll and NVFLARE speak mutual TLS, Flower plain text, which is its faster case.
All of a peer's settings are as it ships, which for NVFLARE includes its polling intervals. The first round is left out.

A peer is left out where the interpreter of --python has none: `python -m venv PEERS`, then
`PEERS/bin/pip install torch numpy psutil flwr==1.42.0 nvflare==2.9.0`. They need an environment of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rounds import run

HERE = Path(__file__).parent
TIMEOUT_S = 900.0  # of a peer's whole run


@dataclass(frozen=True, slots=True)
class Peer:
    distribution: str
    script: Path  # prints one JSON line with "seconds", of each round but the first


PEERS = (
    Peer("flwr", HERE / "peer_flower" / "bench.py"),
    Peer("nvflare", HERE / "peer_nvflare" / "bench.py"),
)


def main() -> None:
    options = _parse()
    with tempfile.TemporaryDirectory(prefix="atoll-peers-") as folder:
        ours = run(Path(folder) / "atoll", options)
        records = [{"name": "atoll", "version": "this one", "seconds_per_round": ours["seconds_per_round"]}]
        for peer in PEERS:
            version = _version(options.python, peer.distribution)
            if version is None:
                print(f"{peer.distribution} is not installed for {options.python}: left out", file=sys.stderr)
                continue
            seconds = _measure(options, peer, Path(folder) / peer.distribution)
            records.append({"name": peer.distribution, "version": version, "seconds_per_round": round(seconds, 3)})
    for record in records:
        record["times_atoll"] = round(record["seconds_per_round"] / ours["seconds_per_round"], 2)
    work = {"sites": options.sites, "megabytes": options.megabytes, "rounds": options.rounds}
    if options.json:
        print(json.dumps(work | {"systems": records, "ratio_to_limit": ours["ratio_to_limit"]}))
        return
    print(f"{options.sites} sites x {options.megabytes:g} MB, median of {options.rounds} rounds after the first")
    for record in records:
        print("{name:10} {version:10} {seconds_per_round:8.3f} s a round   {times_atoll:6.2f} x".format(**record))


def _version(python: str, distribution: str) -> str | None:
    """What the interpreter has installed of it."""
    ask = f"import importlib.metadata as m; print(m.version({distribution!r}))"
    done = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def _measure(options: argparse.Namespace, peer: Peer, folder: Path) -> float:
    """Median seconds of a peer's rounds but the first."""
    folder.mkdir()
    work = [f"--sites={options.sites}", f"--megabytes={options.megabytes}", f"--rounds={options.rounds + 1}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HOME": str(folder)}
    environment.pop("PYTHONPATH", None)
    log = folder / "log"
    with log.open("w") as errors:
        done = subprocess.run(
            [options.python, str(peer.script), *work, f"--folder={folder}"],
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    if done.returncode != 0:
        sys.exit(f"{peer.distribution} ended with code {done.returncode}:\n{log.read_text()[-3000:]}")
    record: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return statistics.median(record["seconds"][1:])


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Seconds a round of Atoll and of its peers, on the same work.")
    parser.add_argument("--sites", type=int, default=8)
    parser.add_argument("--megabytes", type=float, default=100.0)
    parser.add_argument("--rounds", type=int, default=3, help="counted rounds, after one that is not")
    parser.add_argument("--python", default=sys.executable, help="interpreter that has the peers (default: this one)")
    parser.add_argument("--json", action="store_true", help="one JSON line")
    parser.set_defaults(plain=False, strategy="fedavg")
    return parser.parse_args()


if __name__ == "__main__":
    main()
