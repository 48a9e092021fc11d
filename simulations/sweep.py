"""Sweeps: one job with a grid of values and several seeds, each run in a process of its own.

A sweep's folder has a folder for each run that is done, made whole under another name and then renamed; so a sweep that
was killed goes on with what is missing. What it is a sweep of stands in `sweep.json`.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.simulations.results import ROUNDS_FILE
from atoll.wire.errors import ConfigError, LocalError

SWEEP_FILE, RESULT_FILE, LOG_FILE = "sweep.json", "result.json", "log.txt"
NOT_FINISHED = 5  # exit code of a run that ended and is a result all the same
MOST_RUNS = 10_000
POLL_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One run of a sweep."""

    number: int  # from 1
    values: Mapping[str, Any]  # by key of the job, or by option of `atoll simulate`
    seed: int

    @property
    def folder(self) -> str:
        """Name of its folder."""
        return f"run-{self.number:04d}"

    @property
    def label(self) -> str:
        """Its values, without the seed: runs of one label differ in nothing else."""
        return ", ".join(f"{key.removeprefix('--')}={_text(value)}" for key, value in self.values.items()) or "job"

    def arguments(self) -> list[str]:
        """Of `atoll simulate`, beside those of all runs."""
        found = ["--set", f"job.seed={self.seed}"]
        for key, value in self.values.items():
            found += [key, str(value)] if key.startswith("--") else ["--set", f"{key}={_text(value)}"]
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A run with its result."""

    variant: Variant
    result: Mapping[str, Any]  # as `atoll simulate --json` prints it


@dataclass(slots=True, kw_only=True)
class _Running:
    variant: Variant
    folder: Path
    process: subprocess.Popen[bytes]


def variants(grid: Sequence[str], num_seeds: int) -> list[Variant]:
    """Every combination of the grid's values, with seeds from 1 on.

    Args:
        grid: texts such as "strategy.optimizer.lr=0.1,1"; a key that begins with "--" is an option of `atoll simulate`.

    Raises:
        ConfigError: an entry is no such text, or there are too many runs.
    """
    axes = [_axis(text) for text in grid]
    if twice := {key for key, _ in axes if sum(key == other for other, _ in axes) > 1}:
        raise ConfigError(f"--grid names {min(twice)} twice", key="--grid", value=min(twice))
    combined = list(itertools.product(*([(key, value) for value in values] for key, values in axes)))
    if len(combined) * num_seeds > MOST_RUNS:
        text = f"{len(combined)} combinations and {num_seeds} seeds are {len(combined) * num_seeds} runs"
        raise ConfigError(f"{text}; wanted at most {MOST_RUNS}", key="--grid", bound=str(MOST_RUNS))
    pairs = itertools.product(combined, range(1, num_seeds + 1))
    return [Variant(number=n, values=dict(values), seed=seed) for n, (values, seed) in enumerate(pairs, 1)]


def open_sweep(folder: Path, job: Path, runs: Sequence[Variant], options: Sequence[str]) -> list[Done]:
    """Makes the folder, or takes over what another start of the same sweep has left: the runs that are done.

    Raises:
        ConfigError: the folder has another sweep; says what differs.
        LocalError: it cannot be written.
    """
    try:
        text = job.read_bytes()
    except OSError as error:
        raise ConfigError(f"{job}: cannot be read: {error.strerror}", key="job", value=str(job)) from None
    wanted = {
        "job": hashlib.sha256(text).hexdigest(),
        "runs": [[dict(run.values), run.seed] for run in runs],
        "options": list(options),
    }
    path = folder / SWEEP_FILE
    if path.exists():
        found = json.loads(path.read_text())
        if differing := [key for key in wanted if found.get(key) != wanted[key]]:
            text_ = f"{folder} has a sweep with other {' and '.join(differing)}"
            raise ConfigError(f"{text_}; take another --out, or remove the folder", key="--out", value=str(folder))
    else:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _write(path, json.dumps(wanted, indent=1))
        except OSError as error:
            raise LocalError(f"{folder}: cannot be written: {error.strerror}") from None
    for left in folder.glob("run-*.partial-*"):
        shutil.rmtree(left, ignore_errors=True)
    return [found for run in runs if (found := read_run(folder, run)) is not None]


def read_run(folder: Path, run: Variant) -> Done | None:
    """A run that is done; None where it is not."""
    path = folder / run.folder / RESULT_FILE
    return Done(variant=run, result=json.loads(path.read_text())) if path.exists() else None


def run_all(
    folder: Path,
    job: Path,
    runs: Sequence[Variant],
    options: Sequence[str],
    *,
    num_jobs: int,
    tell: Callable[[Variant, str], None] = lambda run, text: None,
    progress: Callable[[Mapping[str, int]], None] = lambda rounds: None,
) -> list[tuple[Variant, str]]:
    """Does the runs, so many at a time; those that failed, each with the last line of its log.

    Args:
        options: of `atoll simulate`, for all runs.
        tell: called with each run that ends.
        progress: called now and then with the rounds that the runs under way have, by their labels.

    Raises:
        LocalError: a run cannot be started, or its folder cannot be written.
    """
    waiting, running, failed = list(runs), list[_Running](), list[tuple[Variant, str]]()
    try:
        while waiting or running:
            while waiting and len(running) < num_jobs:
                running.append(_start(folder, job, waiting.pop(0), options))
            for one in [one for one in running if one.process.poll() is not None]:
                running.remove(one)
                text = _end(folder, one)
                if text:
                    failed.append((one.variant, text))
                tell(one.variant, text)
            progress({f"{one.variant.label}, seed {one.variant.seed}": _num_rounds(one.folder) for one in running})
            time.sleep(POLL_S)
    finally:
        for one in running:  # Ctrl-C, or an error: what is under way is not kept
            one.process.terminate()
        for one in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                one.process.wait(10)
            one.process.kill()
            shutil.rmtree(one.folder, ignore_errors=True)
    return failed


def _start(folder: Path, job: Path, run: Variant, options: Sequence[str]) -> _Running:
    made = folder / f"{run.folder}.partial-{os.getpid()}"
    command = [sys.executable, "-m", "atoll.cli", "simulate", str(job), *options, *run.arguments()]
    try:
        made.mkdir()
        with (made / "stdout").open("wb") as out, (made / LOG_FILE).open("wb") as log:
            process = subprocess.Popen(
                [*command, "--json", "--no-resumable", "--out", str(made)], stdout=out, stderr=log
            )
    except OSError as error:
        raise LocalError(f"{made}: the run cannot be started: {error.strerror}") from None
    return _Running(variant=run, folder=made, process=process)


def _end(folder: Path, one: _Running) -> str:
    """Keeps the run's result under its own name; the last line of its log where it has none."""
    if one.process.returncode not in (0, NOT_FINISHED):
        lines = (one.folder / LOG_FILE).read_text(errors="replace").strip().splitlines()
        shutil.rmtree(one.folder, ignore_errors=True)
        return lines[-1] if lines else f"ended with code {one.process.returncode}"
    try:
        _write(one.folder / RESULT_FILE, (one.folder / "stdout").read_text())
        (one.folder / "stdout").unlink()
        one.folder.rename(folder / one.variant.folder)
    except OSError as error:
        raise LocalError(f"{folder / one.variant.folder}: cannot be written: {error.strerror}") from None
    return ""


def _write(path: Path, text: str) -> None:
    with path.with_suffix(".new").open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    path.with_suffix(".new").replace(path)


def _num_rounds(folder: Path) -> int:
    try:
        return (folder / ROUNDS_FILE).read_bytes().count(b"\n")
    except OSError:
        return 0


def _axis(text: str) -> tuple[str, list[Any]]:
    key, found, values = text.partition("=")
    if not key or not found or not values:
        raise ConfigError(f"--grid {text!r}: wanted KEY=VALUE,VALUE", key="--grid", value=text, bound="KEY=VALUE,VALUE")
    try:
        return key, tomllib.loads(f"values = [{values}]")["values"]
    except tomllib.TOMLDecodeError:
        return key, values.split(",")


def _text(value: Any) -> str:
    """As TOML has it, which for plain values is as JSON has it; words stay as they are."""
    return value if isinstance(value, str) else json.dumps(value)
