"""What a sweep came to: tables as CSV and Parquet, and one HTML page with the pictures in it."""

from __future__ import annotations

import csv
import html
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from atoll.simulations.figures import svg_of
from atoll.simulations.plots import Rounds, curves, metric_of, metrics_in
from atoll.simulations.sweep import Done
from atoll.wire.errors import ConfigError, LocalError

Row = Mapping[str, Any]
_STYLE = (
    "body{font-family:sans-serif;margin:2em auto;max-width:1300px}table{border-collapse:collapse}"
    "td,th{border:1px solid #ccc;padding:.3em .7em;text-align:right}svg{max-width:100%;height:auto}"
)


def headline(done: Sequence[Done]) -> str:
    """The metric that a sweep is shown by: accuracy where there is one, else what most rounds have; "" where none is."""
    return next(metrics_in([entry for run in done for entry in run.result["rounds"]]), "")


def run_rows(done: Sequence[Done]) -> list[Row]:
    """A row for each run: its values, how it ended, its last metrics, and what it cost."""
    return [
        {
            **_values(run),
            "status": run.result["status"],
            "rounds": len(run.result["rounds"]),
            **run.result["metrics"],
            "bytes_up": sum(entry["bytes_up"] for entry in run.result["rounds"]),
            "bytes_down": sum(entry["bytes_down"] for entry in run.result["rounds"]),
            "simulated_s": run.result["simulated_s"],
            "wall_s": run.result["wall_s"],
        }
        for run in done
    ]


def round_rows(done: Sequence[Done]) -> list[Row]:
    """A row for each round of each run."""
    plain = ("round", "version", "sites", "weight", "bytes_up", "bytes_down", "simulated_s", "wall_s")
    return [
        {
            **_values(run),
            **{key: entry[key] for key in plain},
            **{f"train.{name}": value for name, value in entry["train"].items()},
            **{f"evaluate.{name}": value for name, value in entry["evaluate"].items()},
            **{f"server.{name}": value for name, value in entry["server"].items()},
            "slowest_s": entry["waited"]["slowest_s"],
            "staleness": entry["waited"]["staleness"],
        }
        for run in done
        for entry in run.result["rounds"]
    ]


def summary_rows(done: Sequence[Done], metric: str) -> Iterator[tuple[str, str, str, str]]:
    """By combination: runs that finished, mean and standard deviation over seeds of the last metric, and its best round."""
    for label, group in by_label(done).items():
        finished = sum(run.result["status"] == "finished" for run in group)
        known = [values for run in group if (values := _known(run.result["rounds"], metric))]
        last, best = [values[-1] for values in known], [max(values) for values in known]
        yield label, f"{finished} of {len(group)}", _mean(last), _mean(best)


def by_label(done: Sequence[Done]) -> dict[str, list[Done]]:
    """Runs that differ in their seed alone, together."""
    groups: dict[str, list[Done]] = {}
    for run in done:
        groups.setdefault(run.variant.label, []).append(run)
    return groups


def write_tables(folder: Path, done: Sequence[Done]) -> list[Path]:
    """Writes runs.csv and rounds.csv, and the same as Parquet where pyarrow is installed. Raises LocalError."""
    written = []
    for name, rows in (("runs", run_rows(done)), ("rounds", round_rows(done))):
        columns = list(dict.fromkeys(key for row in rows for key in row))
        path = folder / f"{name}.csv"
        try:
            with path.open("w", newline="") as file:
                writer = csv.DictWriter(file, columns)
                writer.writeheader()
                writer.writerows(rows)
        except OSError as error:
            raise LocalError(f"{path}: cannot be written: {error.strerror}") from None
        written.append(path)
        if rows:
            written += _write_parquet(
                folder / f"{name}.parquet", [{key: row.get(key) for key in columns} for row in rows]
            )
    return written


def write_report(folder: Path, done: Sequence[Done], *, title: str) -> Path:
    """Writes report.html, which needs no other file and no network. Raises LocalError, ConfigError without matplotlib."""
    metric = headline(done)
    runs: dict[str, list[Rounds]] = {
        label: [run.result["rounds"] for run in group if run.result["rounds"]]
        for label, group in by_label(done).items()
    }
    picture = svg_of(curves({name: group for name, group in runs.items() if group}, metric)) if metric else ""
    head = ("values", "finished", f"{metric}, last round", f"{metric}, best round")
    table = _table(head, list(summary_rows(done, metric)))
    rows = run_rows(done)
    columns = list(dict.fromkeys(key for row in rows for key in row))
    every = _table(columns, [[_cell(row.get(key)) for key in columns] for row in rows])
    page = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{html.escape(title)}</h1>"
        f"<h2>By values, over seeds</h2>{table}<h2>Over rounds, bytes and time</h2>"
        "<p>Lines are means over seeds, bands reach from the lowest to the highest. At the sites: the median, the middle "
        f"half, and all, of the first seed.</p>{picture}<h2>Runs</h2>{every}</body></html>\n"
    )
    path = folder / "report.html"
    try:
        path.write_text(page)
    except OSError as error:
        raise LocalError(f"{path}: cannot be written: {error.strerror}") from None
    return path


def _values(run: Done) -> dict[str, Any]:
    values = {key.removeprefix("--"): value for key, value in run.variant.values.items()}
    return {"run": run.variant.folder, **values, "seed": run.variant.seed}


def _known(rounds: Rounds, metric: str) -> list[float]:
    return [value for entry in rounds if (value := metric_of(entry, metric)) is not None]


def _mean(values: Sequence[float]) -> str:
    if not values:
        return "-"
    spread = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.4f}{spread}"


def _write_parquet(path: Path, rows: list[dict[str, Any]]) -> list[Path]:
    try:
        from pyarrow import Table, parquet
    except ImportError:
        return []
    try:
        parquet.write_table(Table.from_pylist(rows), path)
    except OSError as error:
        raise LocalError(f"{path}: cannot be written: {error}") from None
    except Exception as error:  # noqa: BLE001  a column of unlike values, by whatever class pyarrow says it with
        raise ConfigError(f"{path}: {error}; give --grid values of one type", key="--grid") from None
    return [path]


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)
