"""The command starts fast, since nothing heavy is imported before a command needs it."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from atoll.cli.app import app

START_S = 0.3
HEAVY = (
    "torch",
    "numpy",
    "grpc",
    "google.protobuf",
    "pydantic",
    "cryptography",
    "sqlalchemy",
    "rich",
    "matplotlib",
    "asyncio",
)
LOCAL = (*(name for name in HEAVY if name not in ("pydantic", "cryptography")),)  # to read settings and keys


def commands(command: Any, names: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every command of the tree, groups too."""
    yield names
    for name, child in getattr(command, "commands", {}).items():
        yield from commands(child, (*names, name))


COMMANDS = list(commands(typer.main.get_command(app)))


def loaded_by(*arguments: str) -> tuple[str, int, set[str]]:
    """What a command prints on stdout, its exit code, and the modules that it has loaded."""
    program = (
        "import sys\n"
        f"sys.argv = ['atoll', *{arguments!r}]\n"
        "from atoll.cli import main\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n"
        "    print('loaded:', *sys.modules)\n"
        "    print('code:', end.code or 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    text, _, rest = done.stdout.partition("loaded: ")
    modules, _, code = rest.partition("\ncode: ")
    return text, int(code), set(modules.split())


def test_the_tree_is_the_whole_of_it() -> None:
    assert {("site", "status"), ("server", "run"), ("federation", "sign"), ("run",), ()} <= set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_explains_itself_without_loading_anything_heavy(command: tuple[str, ...]) -> None:
    text, code, modules = loaded_by(*command, "--help")
    assert modules & set(HEAVY) == set(), "see python -X importtime"
    assert code == 0
    is_group = any(other[:-1] == command for other in COMMANDS if other)
    assert is_group or "Example" in text


def test_a_mistake_in_the_command_is_told_as_fast() -> None:
    for arguments in (("site", "stauts"), ("run",), ("site", "add", "x", "--organization", "y"), ("--version",)):
        assert loaded_by(*arguments)[2] & set(HEAVY) == set(), arguments


def test_commands_that_ask_nobody_load_nothing_of_a_connection(tmp_path: Path) -> None:
    home = tmp_path / "site"
    home.mkdir()
    (home / "site.toml").write_text('[site]\nname = "ward"\nserver = "127.0.0.1:1"\n[data.scans]\npath = "/scans"\n')
    for arguments, wanted in {
        ("site", "status", "--home", str(home)): 0,
        ("site", "status", "--home", str(home), "--json"): 0,
        ("site", "status", "--home", str(tmp_path / "none")): 2,
    }.items():
        _, code, modules = loaded_by(*arguments)
        assert code == wanted
        assert modules & set(LOCAL) == set(), arguments


def test_help_needs_less_than_300_ms() -> None:
    """Of processor time, which is what the wall clock shows where nothing else runs: other tests may run beside."""
    needed_s = []
    for _ in range(10):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "atoll.cli", "--help"], capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        needed_s.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        if needed_s[-1] < START_S:
            return
    pytest.fail(f"every start took {min(needed_s):.3f} s or more, {START_S} s are promised; see python -X importtime")
