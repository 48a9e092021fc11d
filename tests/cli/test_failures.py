"""From an exception to one line and an exit code."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from atoll.cli.exit_codes import MEANING, ExitCode, table
from atoll.cli.failures import TRACEBACK_VARIABLE, exit_code, report
from atoll.wire import errors
from atoll.wire.errors import AtollError, ConfigError, IdentityError, PolicyRefused, RemoteError, Unavailable


def _all_errors(root: type[AtollError]) -> list[type[AtollError]]:
    return [root, *(kind for child in root.__subclasses__() for kind in _all_errors(child))]


def test_exit_codes_never_change_their_meaning() -> None:
    assert {code.name: code.value for code in ExitCode} == {
        "OK": 0,
        "FAULT": 1,
        "CONFIG": 2,
        "LOCAL": 3,
        "REFUSED": 4,
        "NOT_FINISHED": 5,
        "INTERRUPTED": 130,
    }


def test_every_code_is_explained_in_the_help() -> None:
    assert set(MEANING) == set(ExitCode)
    for code, text in MEANING.items():
        assert f"{code.value:>3}  {text}" in table()


@pytest.mark.parametrize("kind", _all_errors(AtollError), ids=lambda kind: kind.__name__)
def test_every_kind_of_error_has_the_code_of_its_branch(kind: type[AtollError]) -> None:
    wanted = {AtollError: 1, ConfigError: 2, errors.LocalError: 3, RemoteError: 4}
    branch = next(base for base in kind.__mro__ if base in wanted)
    assert exit_code(kind.__new__(kind)) == wanted[branch]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("job.toml: unknown key"), 2),
        (IdentityError("expired"), 3),
        (FileNotFoundError(2, "No such file", "x"), 3),
        (PolicyRefused("no"), 4),
        (Unavailable("away"), 4),
        (ZeroDivisionError("division by zero"), 1),
        (KeyboardInterrupt(), 130),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_failure_is_one_line_on_stderr(
    error: BaseException, code: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TRACEBACK_VARIABLE, raising=False)
    assert report(error) == code
    shown = capsys.readouterr()
    assert shown.out == ""
    assert len(shown.err.splitlines()) == 1


def test_a_message_of_several_lines_becomes_one(capsys: pytest.CaptureFixture[str]) -> None:
    report(errors.AppFailed("app does not import: ValueError: no\n  at app:3 in <module>"))
    assert capsys.readouterr().err == "atoll: app does not import: ValueError: no at app:3 in <module>\n"


def test_a_traceback_is_shown_only_where_it_was_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TRACEBACK_VARIABLE, "1")
    try:
        raise ConfigError("no")
    except ConfigError as error:
        report(error)
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--version"], 0),
        (["frobnicate"], 2),
        (["run", "--no-such-option"], 2),
        (["run", "absent.toml", "--home", "absent"], 3),
        (["site", "run", "--home", "absent"], 2),
        (["user", "join", "no-token", "--home", "absent"], 4),
        (["federation", "sign", "--key", "absent", "--request", "x"], 2),
        (["federation", "sign", "--key", "absent", "--request", "x", "--out", "y"], 3),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_commands_end_with_the_code_of_what_went_wrong(
    arguments: list[str], code: int, tmp_path: os.PathLike[str]
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "atoll.cli", *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    if code:
        assert done.stdout == ""
        assert done.stderr.strip()


def test_debug_shows_the_traceback(tmp_path: os.PathLike[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "atoll.cli", "--debug", "runs", "--home", "absent"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == ExitCode.LOCAL
    assert "Traceback" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("atoll: absent holds no identity")
