"""`atoll run`, `runs`, `status`, `stop`: what a researcher does with runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli import options
from atoll.cli.exit_codes import ExitCode

if TYPE_CHECKING:
    from atoll.client.people import Person
    from atoll.wire import runs_pb2


def run(
    job: Annotated[Path, typer.Argument(metavar="JOB", help="Job file (TOML).")],
    watch: Annotated[
        bool, typer.Option("--watch/--detach", help="Follow the run to its end, or print its id and return.")
    ] = True,
    start: Annotated[
        Path | None,
        typer.Option("--from", metavar="FILE", help="Begin from this model (safetensors), as `atoll model` writes it."),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option("--resume", metavar="RUN", help="Go on from the last version of a run of yours that has ended."),
    ] = None,
    events: Annotated[
        Path | None,
        typer.Option("--events", metavar="FILE", help="Append what happens to FILE, as a JSON object a line."),
    ] = None,
    home: options.PersonHome = None,
    as_json: options.AsJson = False,
) -> None:
    """Submit a job and follow its run.

    Builds the first model on this machine and hands it to the server with the job. Ctrl-C stops following; the run goes on. With --json the run as it ended (or its id) is one line on stdout.

    \b
    Examples:
      atoll run job.toml
      atoll run job.toml --detach --json | jq -r .run
      atoll run job.toml --from model.safetensors
      atoll run job.toml --resume latest
    """
    import asyncio

    from atoll.cli.output import note
    from atoll.client.people import load_person
    from atoll.client.researcher import find_run, submit
    from atoll.wire.job import begun_from, load_job, located

    if events is not None and not watch:
        raise typer.BadParameter("--events hears of what this command follows; leave --detach out")
    person = load_person(home)
    with located(job):
        wanted = load_job(job)
        old = asyncio.run(find_run(person, resume)) if resume is not None else None
        started = asyncio.run(submit(person, begun_from(wanted, start=start, continues=old), notice=note))
    submitted(person, started, watch=watch, events=events, as_json=as_json)


def submitted(person: Person, run: str, *, watch: bool, events: Path | None = None, as_json: bool) -> None:
    """Follows a run that was just submitted, or prints its id; `events`: file that gets what happens."""
    from atoll.cli.following import follow
    from atoll.cli.output import print_json

    if not watch:
        print_json({"run": run}) if as_json else print(run)
        return
    _end(follow(person, run, events=events), as_json)


def list_runs(home: options.PersonHome = None, as_json: options.AsJson = False) -> None:
    """List all runs, newest first.

    \b
    Example:
      atoll runs --json | jq -r '.[] | select(.status == "running").run'
    """
    import asyncio

    from atoll.cli.output import print_json, print_table
    from atoll.cli.snapshots import run_record, timestamp
    from atoll.client.people import load_person
    from atoll.client.researcher import runs

    found = asyncio.run(runs(load_person(home)))
    if as_json:
        print_json([run_record(snapshot, rounds=False) for snapshot in found])
        return
    rows = [
        (
            snapshot.run,
            snapshot.name,
            snapshot.status,
            f"{snapshot.round}/{snapshot.num_rounds}",
            snapshot.submitted_by,
            timestamp(snapshot.submitted_at_unix_s) or "",
        )
        for snapshot in found
    ]
    print_table(
        ("run", "job", "status", "round", "by", "submitted"), rows, empty="no runs yet; submit one: atoll run JOB"
    )


def status(
    run: options.RunId,
    watch: Annotated[bool, typer.Option("--watch", help="Follow the run to its end.")] = False,
    home: options.PersonHome = None,
    as_json: options.AsJson = False,
) -> None:
    """Show a run, or follow it.

    What each site does, what each round brought, why it failed.

    With --watch, the exit code says how the run ended.

    \b
    Examples:
      atoll status latest
      atoll status latest --watch
      atoll status latest --json | jq '.rounds[-1].server.accuracy'
    """
    import asyncio

    from atoll.cli.following import follow
    from atoll.cli.output import print_json
    from atoll.cli.snapshots import run_record
    from atoll.client.people import load_person
    from atoll.client.researcher import find_run, snapshot_of

    person = load_person(home)
    found = asyncio.run(find_run(person, run))
    if watch:
        _end(follow(person, found), as_json)
        return
    snapshot = asyncio.run(snapshot_of(person, found))
    if as_json:
        print_json(run_record(snapshot))
        return
    _print(snapshot)


def stop(run: options.RunId, home: options.PersonHome = None) -> None:
    """End a run. Its committed model versions stay; what the sites were training is dropped.

    \b
    Example:
      atoll stop latest
    """
    import asyncio

    from atoll.cli.output import note
    from atoll.client.people import load_person
    from atoll.client.researcher import find_run
    from atoll.client.researcher import stop as ask

    async def end(person: Person) -> str:
        found = await find_run(person, run)
        await ask(person, found)
        return found

    note(f"run {asyncio.run(end(load_person(home)))} is stopped")


def _end(snapshot: runs_pb2.RunSnapshot, as_json: bool) -> None:
    """Says how a followed run ended, on stdout and by the exit code."""
    if as_json:
        from atoll.cli.output import print_json
        from atoll.cli.snapshots import run_record

        print_json(run_record(snapshot))
    else:
        print(snapshot.run)
    if snapshot.status != "finished":
        from atoll.cli.output import note
        from atoll.cli.run_view import status_line

        note(f"atoll: {status_line(snapshot)}")
        raise typer.Exit(ExitCode.NOT_FINISHED)


def _print(snapshot: runs_pb2.RunSnapshot) -> None:
    from rich.console import Console

    from atoll.cli.run_view import lines, render

    console = Console()
    if console.is_terminal:
        console.print(render(snapshot, console.width))
    else:
        print("\n".join(lines(snapshot)))
