"""The README's four terminals, word for word; its links and its tables."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from integration.federation import free_ports
from safetensors.torch import load_file
from torch import Tensor

from atoll.cli.exit_codes import ExitCode
from atoll.cluster.app import App, build_app, build_model
from atoll.cluster.central import train_centrally
from atoll.cluster.evaluate import evaluate
from atoll.cluster.registry import AppEntry, hash_distribution, load_app
from atoll.wire.job import Job, load_job

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text()
SET_UP = ("make install && . .venv/bin/activate\n", ". .venv/bin/activate\n")  # this environment is set up already
PATIENCE_S = 280.0


def _block(terminal: str) -> str:
    found = re.search(rf"<!-- terminal: {terminal} -->\n```sh\n(.*?)```", TEXT, re.DOTALL)
    assert found is not None
    text = found[1]
    for line in SET_UP:
        text = text.replace(line, "")
    return text


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder that looks like the root of a clone with an activated environment."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "bin").mkdir()
    for name, arguments in (("atoll", "-m atoll.cli "), ("python", "")):
        shim = tmp_path / "bin" / name
        shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments}"$@"\n')
        shim.chmod(0o755)
    return tmp_path


@contextmanager
def _shell(clone: Path, name: str, text: str, *, keys: str = "") -> Iterator[subprocess.Popen[bytes]]:
    """A terminal in which `text` is typed; closing it ends what runs in it."""
    environment = os.environ | {"PATH": f"{clone / 'bin'}:{os.environ['PATH']}"}
    (clone / f"{name}.keys").write_text(keys)
    with (clone / f"{name}.log").open("wb") as log, (clone / f"{name}.keys").open() as keyboard:
        shell = subprocess.Popen(
            ["bash", "-eu", "-c", text],
            cwd=clone,
            env=environment,
            stdin=keyboard,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            yield shell
        finally:
            with suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGTERM)
            shell.wait(60)


def _logs(clone: Path) -> str:
    return "\n".join(f"--- {path.name}\n{path.read_text()[-2000:]}" for path in clone.glob("*.log"))


def test_four_terminals_word_for_word(clone: Path) -> None:
    port = free_ports()[0]
    server = _block("server").replace("127.0.0.1:7443", f"127.0.0.1:{port}")
    with _shell(clone, "server", server + "touch ready\nwait\n"):
        _await(clone, lambda: (clone / "ready").exists())
        sites = [_block("site").replace("SITE=site-1", f"SITE=site-{number}") for number in (1, 2, 3)]
        with (
            _shell(clone, "site-1", sites[0]),
            _shell(clone, "site-2", sites[1]),
            _shell(clone, "site-3", sites[2]),
        ):
            joined = [clone / "try" / f"site-{number}" / "logs" / "agent.log" for number in (1, 2, 3)]
            _await(clone, lambda: all(log.exists() for log in joined))
            with _shell(clone, "researcher", _block("researcher"), keys="y\ny\ny\n") as researcher:
                assert researcher.wait(PATIENCE_S) == 0, _logs(clone)
    job = load_job(ROOT / "examples/atoll_examples/digits/job.toml")
    rounds = job.job.rounds
    assert f"round {rounds} of {rounds}, 3 sites" in (clone / "researcher.log").read_text()
    federated = _accuracy(job, clone, load_file(clone / "try" / "model.safetensors"))
    central = train_centrally(_app(job, clone, "central"), job, rounds * (job.strategy.work.num_epochs or 1))
    correct, count = central["accuracy"]
    assert federated >= 0.95
    assert correct / count - federated <= 0.015


def _accuracy(job: Job, clone: Path, state: dict[str, Tensor]) -> float:
    """Of the exported model, on the test images that no site has."""
    app = _app(job, clone, "test")
    model = build_model(app, job.job.seed)
    model.load_state_dict(state, strict=True)
    correct, count = evaluate(app, model, app.data("test"), device=torch.device("cpu"))["accuracy"]
    return correct / count


def _app(job: Job, clone: Path, data: str) -> App:
    entry = AppEntry(name=job.job.code, distribution="atoll-examples", entry_point=job.job.code)
    app = load_app(entry, hash_distribution("atoll-examples"))
    return build_app(app, job.app, {"path": str(clone / "try" / "data" / f"{data}.npz")})


def _await(clone: Path, what: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < deadline_s, _logs(clone)
        time.sleep(0.05)


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", TEXT):
        assert target.startswith("https://") or (ROOT / target).exists(), target


def test_exit_codes_are_all_in_the_table() -> None:
    assert [int(code) for code in re.findall(r"(?m)^\| (\d+) \|", TEXT)] == sorted(ExitCode)


def test_the_glossary_has_every_word_of_the_vocabulary() -> None:
    words = ["federation", "site", "organisation", "agent", "worker", "run", "task", "round", "cohort", "update"]
    for word in [*words, "model version", "strategy", "app", "member list"]:
        assert re.search(rf"(?m)^\| {word} \| .+ \|$", TEXT), word
