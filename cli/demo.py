"""`atoll demo`: a server and three sites as real processes on this machine, in a minute."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from atoll.cli import options


def demo(
    as_json: options.AsJson = False,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for the model and the plot.")] = Path(
        "demo-out"
    ),
    rounds: Annotated[
        int | None,
        typer.Option("--rounds", min=1, max=1000, show_default="as in the example's job", help="Rounds of training."),
    ] = None,
) -> None:
    """Train over three sites on this machine.

    Real processes, mutual TLS, real data: makes a federation in a temporary folder, enrols three sites and a researcher, trains handwritten digits, and
    compares with the same model trained centrally. Everything ends with it, also on Ctrl-C. With --json, one line on
    stdout: sites, rounds, test_accuracy, central_test_accuracy, seconds (all of it), model.

    \b
    Examples:
      atoll demo
      atoll demo --json --rounds 5
    """
    import signal
    import sys

    from atoll.cli.demonstration import report
    from atoll.cli.demonstration.show import show
    from atoll.cli.demonstration.stage import HOSPITALS
    from atoll.cli.output import note, print_json

    for number in (signal.SIGTERM, signal.SIGHUP):  # as Ctrl-C: processes are ended, then this one ends
        signal.signal(number, signal.default_int_handler)
    outcome = show(HOSPITALS, rounds=rounds, out=out, notice=note, screen=sys.stderr)
    if as_json:
        print_json(report.record(outcome))
    else:
        print("\n".join(report.lines(outcome, rounds=not sys.stdout.isatty())))
