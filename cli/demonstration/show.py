"""The demo from beginning to end. Reads top to bottom; each step is a command that a person would type."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from atoll.cli.demonstration.chart import write_png
from atoll.cli.demonstration.crew import Crew, DemoFailed, atoll_command
from atoll.cli.demonstration.stage import Cast, Stage, enrol_everybody, prepare_data, start_server, start_sites
from atoll.wire.errors import ConfigError

MODEL_FILE = "model.safetensors"
PLOT_FILE = "accuracy.png"
EVALUATION = """
[evaluation]            # of each version: at the sites on what they keep back, at the server on the whole test set
sites = true
server = true
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the demo brought."""

    cast: Cast
    run: Mapping[str, Any]  # as `atoll status RUN --json` prints it
    told: Sequence[str]  # lines of `atoll status RUN`: the table of its rounds
    accuracies: Mapping[int, float]  # of the whole test set, by round; that of the last one is the server's
    central_accuracy: float  # of the same model, trained as long with all data in one place
    seconds: float  # of everything, set-up included
    model: Path
    plot: Path | None  # None where matplotlib is not installed

    @property
    def test_accuracy(self) -> float:
        """Of the last version."""
        return self.accuracies[max(self.accuracies)]


def show(cast: Cast, *, rounds: int | None, out: Path, notice: Callable[[str], None], screen: IO[str]) -> Outcome:
    """Runs the whole demo.

    Args:
        cast: which example, and the sites.
        rounds: of training; those of the example's job where None.
        out: folder for model and plot; made when absent.
        notice: hears each step.
        screen: where the live view of the run is drawn.

    Raises:
        ConfigError: the examples are not installed.
        DemoFailed: a process failed; the logs are kept, and the message says where.
    """
    _require_examples()
    began_s = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="atoll-demo-"))
    stage = Stage.choose(folder, cast)
    with _kept_on_failure(folder), Crew(folder / "logs", _environment()) as crew:
        notice(f"splitting the data of the example {cast.app} over {len(cast.sites)} sites")
        prepare_data(stage, crew)
        notice(f"starting a server on 127.0.0.1:{stage.port}")
        start_server(stage, crew)
        notice(f"enrolling {len(cast.sites)} sites and a researcher with one-time tokens, signing the member list")
        enrol_everybody(stage, crew)
        notice("starting the sites: " + ", ".join(name for name, _ in cast.sites))
        start_sites(stage, crew)
        job_path = _write_job(stage, rounds)
        notice("submitting the job; models and updates go over mutual TLS, data stays where it is")
        run = _follow_run(stage, crew, job_path, screen)
        told = crew.ask("status", atoll_command("status", run["run"], "--home", stage.researcher)).splitlines()
        accuracies = accuracies_of(run)
        model = _export(stage, crew, run["run"], out / MODEL_FILE)
        notice("for comparison: training the same model with all data in one place")
        central = _train_centrally(stage, crew, job_path)
    plot = out / PLOT_FILE
    drawn = write_png(plot, accuracies, central, title=f"{cast.app}: {len(cast.sites)} sites")
    return Outcome(
        cast=cast,
        run=run,
        told=told,
        accuracies=accuracies,
        central_accuracy=central,
        seconds=time.monotonic() - began_s,
        model=model,
        plot=plot if drawn else None,
    )


def _follow_run(stage: Stage, crew: Crew, job: Path, screen: IO[str]) -> dict[str, Any]:
    printed = crew.ask("run", atoll_command("run", job, "--json", "--home", stage.researcher), screen=screen)
    run: dict[str, Any] = json.loads(printed)
    return run


def accuracies_of(run: Mapping[str, Any]) -> dict[int, float]:
    """Accuracy by round, on the whole test set: at the server, or, where it skipped a version, over the sites' shares.

    Args:
        run: as `atoll status RUN --json` prints it.

    Raises:
        DemoFailed: the server has not judged the last version, whatever the sites say of it.
    """
    found = {}
    for entry in run["rounds"]:
        judged = [entry[where].get("accuracy") for where in ("server", "evaluate")]
        if values := [value for value in judged if value is not None]:
            found[entry["round"]] = values[0]
    if not any(e["round"] == run["num_rounds"] and e["server"].get("accuracy") is not None for e in run["rounds"]):
        raise DemoFailed(f"run {run['run']} ended without an evaluation of its last version at the server")
    return found


def _export(stage: Stage, crew: Crew, run: str, out: Path) -> Path:
    crew.ask("model", atoll_command("model", run, "--out", out, "--home", stage.researcher))
    return out


def _train_centrally(stage: Stage, crew: Crew, job: Path) -> float:
    module = "atoll.cli.demonstration.baseline"
    printed = crew.ask("central", [sys.executable, "-m", module, str(job), str(stage.data / "central.npz")])
    return float(json.loads(printed)["accuracy"])


def _write_job(stage: Stage, rounds: int | None) -> Path:
    """The example's own job, judged at the server too, with another number of rounds where that was asked for."""
    text = (resources.files(f"atoll_examples.{stage.cast.app}") / "job.toml").read_text()
    if rounds is not None:
        text = re.sub(r"(?m)^rounds\s*=.*$", f"rounds = {rounds}", text)
    if "[evaluation]" not in text:
        text += EVALUATION
    path = stage.root / "job.toml"
    path.write_text(text)
    return path


def _environment() -> dict[str, str]:
    """This process's own environment, without what would lead the commands of the demo elsewhere."""
    elsewhere = ("ATOLL_HOME", "ATOLL_DATABASE")
    return {key: value for key, value in os.environ.items() if key not in elsewhere}


def _require_examples() -> None:
    if find_spec("atoll_examples") is None:
        raise ConfigError(
            "the demo trains an app of the distribution atoll-examples, which is not installed: from a clone, run "
            "`make demo`, or `pip install ./examples`",
            key="atoll-examples",
        )


@contextmanager
def _kept_on_failure(folder: Path) -> Iterator[None]:
    """Removes the folder at the end, except after an error, whose logs are in it."""
    try:
        yield
    except Exception:
        raise
    except BaseException:  # Ctrl-C: nobody asks for logs
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)
