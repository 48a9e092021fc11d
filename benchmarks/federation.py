"""Accuracy and time of an example over so many sites, as real processes on this machine, against central training.

    python benchmarks/federation.py --app fashion --sites 10 --json

The same path as `atoll demo`: every site is a process of its own, mutual TLS on loopback. Accuracy does not depend on
the machine; seconds do, and on what else it does.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

from atoll.cli.demonstration import report
from atoll.cli.demonstration.show import show
from atoll.cli.demonstration.stage import Cast
from atoll.cli.output import note


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Accuracy and time of an example over several sites.")
    parser.add_argument("--app", choices=("digits", "breast_cancer", "fashion"), default="fashion")
    parser.add_argument("--sites", type=int, default=10, help="how many, at least 3 (default 10)")
    parser.add_argument("--alpha", type=float, default=0.5, help="how alike the sites are (default 0.5)")
    parser.add_argument("--rounds", type=int, help="default: as in the example's job")
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="folder for model and plot")
    parser.add_argument("--json", action="store_true", help="one line of JSON on stdout")
    options = parser.parse_args(argv)
    sites = tuple((f"site-{number}", f"Organisation {number}") for number in range(1, options.sites + 1))
    cast = Cast(app=options.app, sites=sites, alpha=options.alpha)
    outcome = show(cast, rounds=options.rounds, out=options.out, notice=note, screen=sys.stderr)
    if options.json:
        machine = f"{os.cpu_count()} cores, {platform.machine()}"
        print(json.dumps({"app": options.app, "alpha": options.alpha, **report.record(outcome), "machine": machine}))
    else:
        print("\n".join(report.lines(outcome, rounds=not sys.stdout.isatty())))


if __name__ == "__main__":
    main()
