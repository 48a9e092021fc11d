"""`atoll simulate` from the command line: results on stdout and in files, words on stderr, exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from atoll.cli.app import app
from atoll.simulations.results import RoundsFile
from atoll.simulations.run import SimulatedRun
from atoll.wire.errors import ConfigError

JOB = """
[job]
name = "digits"
app = "digits"
rounds = {rounds}
[app]
hidden = 8
[strategy]
schedule = {{ kind = "rounds", min = {min} }}
[training]
threads = 1
device = "cpu"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A job, and made-up digits for all sites together and for two of them."""
    rng = np.random.default_rng(0)
    for name, number in {"central": 40, "site-1": 10, "site-2": 20}.items():
        arrays = {f"x_{split}": rng.random((number, 64), np.float32) for split in ("train", "test")}
        labels = {f"y_{split}": np.arange(number) % 10 for split in ("train", "test")}
        np.savez(tmp_path / f"{name}.npz", allow_pickle=False, **arrays, **labels)
    (tmp_path / "job.toml").write_text(JOB.format(rounds=2, min=2))
    return tmp_path


def run(folder: Path, *options: str) -> tuple[int, str, str]:
    arguments = ["simulate", str(folder / "job.toml"), "--out", str(folder / "out"), "--home", str(folder), *options]
    done = CliRunner().invoke(app, arguments)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout, done.stderr


def test_a_partition_of_one_file_and_a_file_for_each_site(folder: Path) -> None:
    code, out, _ = run(
        folder, "--sites", "4", "--data", f"path={folder}/central.npz", "--partition", "shards", "--json"
    )
    assert code == 0
    found = json.loads(out)
    assert [entry["weight"] for entry in found["rounds"]] == [40, 40]
    assert len((folder / "out" / "rounds.jsonl").read_text().splitlines()) == 2
    assert (folder / "out" / "model.safetensors").exists()
    code, out, err = run(folder, "--sites", "2", "--data", f"path={folder}/{{site}}.npz")
    assert code == 0
    assert out.startswith("2 rounds of 2 sites in ")
    assert "round 2 of 2, 2 sites, " in err


def test_a_preview_shows_the_data_and_trains_nothing(folder: Path) -> None:
    options = ["--sites", "4", "--data", f"path={folder}/central.npz", "--partition", "classes", "--classes", "5"]
    code, out, err = run(folder, *options, "--preview")
    assert (code, err) == (0, "")
    assert out.splitlines()[0].split() == ["site", "examples", *map(str, range(10))]
    assert "4 sites, 40 examples, 10 to 10 at a site (median 10); 10 classes, 5 to 5 at a site" in out
    assert [path.name for path in (folder / "out").iterdir()] == ["partition.png"]
    code, out, _ = run(folder, *options, "--preview", "--json")
    assert sum(map(sum, json.loads(out)["sites"].values())) == 40
    with pytest.raises(ConfigError, match=r"partition\.classes_each = 11: the data has 10 classes"):
        run(folder, *options[:-1], "11", "--preview")


def test_a_run_that_does_not_finish_has_its_exit_code_and_reason(folder: Path) -> None:
    code, _, err = run(folder, "--sites", "1", "--data", f"path={folder}/central.npz")
    assert code == 5
    assert "round 1 needs 2 sites, there are 1: site-1" in err


def test_labels_are_dealt_to_the_sites_in_turn(folder: Path) -> None:
    (folder / "job.toml").write_text(JOB.format(rounds=1, min='2, where = { region = "north" }'))
    options = ["--sites", "5", "--data", f"path={folder}/central.npz", "--json"]
    code, out, _ = run(folder, *options, "--label", "region=north,south")
    assert code == 0
    assert [entry["sites"] for entry in json.loads(out)["rounds"]] == [3]
    with pytest.raises(ConfigError, match="--label 'region=north,': wanted NAME=VALUE,VALUE"):
        run(folder, *options, "--label", "region=north,")


def test_callbacks_of_user_toml_hear_what_happens(folder: Path) -> None:
    heard = folder / "runs.jsonl"
    (folder / "user.toml").write_text(f'[callbacks.log]\nkind = "json_lines"\npath = "{heard}"\n')
    code, _, _ = run(folder, "--sites", "2", "--data", f"path={folder}/central.npz")
    assert code == 0
    events = [json.loads(line)["event"] for line in heard.read_text().splitlines()]
    assert events[0] == "RunStarted"
    assert events[-1] == "RunEnded"
    assert [events.count(kind) for kind in ("RoundClosed", "VersionCommitted", "Evaluated")] == [2, 2, 2]


def test_ctrl_c_says_what_is_left(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(SimulatedRun, "run", interrupted)
    done = CliRunner().invoke(
        app,
        ["simulate", str(folder / "job.toml"), "--sites", "2", "--out", str(folder / "out"), "--data", f"path={folder}/central.npz"],
    )  # fmt: skip
    assert done.exit_code != 0
    assert f"interrupted; the rounds that were committed are in {folder}/out/rounds.jsonl" in done.stderr


def test_an_interrupted_run_goes_on_with_resume(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    options = ["simulate", str(folder / "job.toml"), "--home", str(folder), "--data", f"path={folder}/central.npz"]
    out = folder / "out"
    with monkeypatch.context() as patched:
        patched.setattr(RoundsFile, "write", interrupted)
        done = CliRunner().invoke(app, [*options, "--sites", "2", "--out", str(out)])
    assert done.exit_code == 130
    assert f"go on with the same command and --resume {out} in place of --out" in done.stderr
    with pytest.raises(ConfigError, match=r"sites is .*'site-3'\], and the interrupted run had .*'site-2'\]: "):
        CliRunner().invoke(app, [*options, "--sites", "3", "--resume", str(out)], catch_exceptions=False)
    done = CliRunner().invoke(app, [*options, "--sites", "2", "--resume", str(out)])
    assert (done.exit_code, done.stdout.splitlines()[-1]) == (0, f"rounds and model: {out}")
    assert len((out / "rounds.jsonl").read_text().splitlines()) == 2
    model = (out / "model.safetensors").read_bytes()
    assert run(folder, "--sites", "2", "--data", f"path={folder}/central.npz", "--no-resumable")[0] == 0
    assert (out / "model.safetensors").read_bytes() == model
