"""The `atoll` command: its groups, its root options, and the one place where an exception becomes an exit code."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from atoll.cli import (
    demo,
    doctor,
    federation,
    models,
    options,
    questions,
    runs,
    server,
    simulate,
    site,
    strategies,
    sweep,
    user,
)
from atoll.cli.exit_codes import table
from atoll.cli.failures import TRACEBACK_VARIABLE, report

SUMMARY = f"""\
Federated learning: one model over many sites, whose data never leaves them.

\b
First steps:
  atoll demo                  a server and three sites on this machine, in a minute
  atoll run job.toml          submit a job and follow it
  atoll doctor                check this installation
Every command explains itself: atoll site join --help

\b
Exit codes:
{table()}
"""

app = options.group(SUMMARY)
app.add_typer(server.commands, name="server")
app.add_typer(site.commands, name="site")
app.add_typer(user.commands, name="user")
app.add_typer(federation.commands, name="federation")
app.command()(runs.run)
app.command(name="runs")(runs.list_runs)
app.command()(runs.status)
app.command()(runs.stop)
app.command()(questions.evaluate)
app.command()(questions.statistics)
app.command()(models.model)
app.command()(simulate.simulate)
app.command()(sweep.sweep)
app.command(name="strategies")(strategies.strategies)
app.command(name="doctor")(doctor.doctor)
app.command(name="demo")(demo.demo)


def _print_version(wanted: bool) -> None:
    if wanted:
        from atoll import __version__

        print(f"atoll {__version__}")
        raise typer.Exit


@app.callback()
def root(
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error (or ATOLL_TRACEBACK=1).")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    if debug:
        os.environ[TRACEBACK_VARIABLE] = "1"


def run() -> None:
    """Runs the command line of this process. Always raises SystemExit, with a code of `atoll.cli.exit_codes`."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC's own lines would stand beside the one that says what to do
    try:
        app(prog_name="atoll")
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  the edge of the process
        sys.exit(report(error))
