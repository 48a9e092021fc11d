"""`atoll sweep`: a job with a grid of values and several seeds."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli.exit_codes import ExitCode

if TYPE_CHECKING:
    from atoll.simulations.sweep import Variant


def sweep(
    job: Annotated[Path, typer.Argument(metavar="JOB", help="Job file (TOML).")],
    simulated: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- OPTIONS]", help="Options of `atoll simulate` for all runs, after --."),
    ] = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(
            "--grid",
            metavar="KEY=VALUES",
            help="A value of the job, or an option such as --alpha of `atoll simulate`: its values, with commas between.",
        ),
    ] = None,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="How many for each combination: job.seed 1, 2, ...")] = 1,
    jobs: Annotated[
        int, typer.Option("--jobs", min=1, help="How many runs at once, each in a process of its own.")
    ] = 1,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder of the runs, tables and report.")] = Path(
        "sweep-out"
    ),
) -> None:
    """Run a job over a grid of values and seeds, and compare.

    --out gets runs.csv, rounds.csv, both as Parquet, and report.html. A sweep that was stopped or killed goes on with
    what is missing when the same command is given again.

    \b
    Examples:
      atoll sweep job.toml --grid strategy.optimizer.lr=0.1,1 --seeds 3 --jobs 2 -- --sites 20 --data path=central.npz
      atoll sweep job.toml --grid --alpha=0.1,1,100 -- --sites 20 --data path=central.npz --partition dirichlet
    """
    from atoll.cli.output import note, print_table
    from atoll.simulations.sweep import open_sweep, read_run, run_all, variants
    from atoll.simulations.sweep_report import headline, summary_rows, write_report, write_tables

    runs, options = variants(grid or [], seeds), simulated or []
    done = {one.variant.number for one in open_sweep(out, job, runs, options)}
    if done:
        note(f"{len(done)} of {len(runs)} runs are done already")
    ended = len(done)

    def tell(run: Variant, trouble: str) -> None:
        nonlocal ended
        ended += 1
        _clear()
        note(f"run {ended} of {len(runs)}: {run.label}, seed {run.seed}: {trouble or 'done'}")

    missing = [run for run in runs if run.number not in done]
    try:
        failed = run_all(out, job, missing, options, num_jobs=jobs, tell=tell, progress=_progress)
    except KeyboardInterrupt:
        _clear()
        note(f"interrupted; the same command goes on with what is missing in {out}")
        raise
    _clear()
    results = [found for run in runs if (found := read_run(out, run)) is not None]
    metric = headline(results)
    columns = ["values", "finished", f"{metric}, last", f"{metric}, best"]
    print_table(columns, summary_rows(results, metric), empty="no run has a result")
    if results:
        written = [*write_tables(out, results), write_report(out, results, title=f"{job.stem}: {len(results)} runs")]
        note(f"written: {', '.join(str(path) for path in written)}")
    if failed:
        note(f"atoll: {len(failed)} of {len(runs)} runs failed, the first with: {failed[0][1]}")
    if failed or any(run.result["status"] != "finished" for run in results):
        raise typer.Exit(ExitCode.NOT_FINISHED)


def _progress(rounds: Mapping[str, int]) -> None:
    """One line that is written over, on a terminal."""
    if sys.stderr.isatty() and rounds:
        text = "; ".join(f"{label}: round {number}" for label, number in rounds.items())
        print(f"\r\x1b[K{text[:100]}", end="", file=sys.stderr, flush=True)


def _clear() -> None:
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
