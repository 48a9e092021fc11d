"""The command line is frozen: what is written here is what scripts out there use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer.main

from atoll.cli.app import app

ADVICE = """
The options of the command line changed. They are an interface: every script and every unit file out there depends on
them. Before you change this list:
  - a setting of a run belongs into the job file, one of a site into site.toml, one of a server into server.toml;
  - an option is added only where a person types it again and again, and never for one experiment;
  - an option that is to go is first kept and said to be old, for one minor version, with a line in CHANGELOG.md.
If the change is right all the same, change FROZEN in the same commit and write the line for CHANGELOG.md.
"""

FROZEN = {
    "atoll": ["--debug", "--install-completion", "--show-completion", "--version"],
    "atoll demo": ["--json", "--out", "--rounds"],
    "atoll doctor": ["--home", "--json"],
    "atoll evaluate": ["--detach", "--home", "--json", "--model", "--watch", "JOB"],
    "atoll federation": [],
    "atoll federation pending": ["--home", "--json", "--out"],
    "atoll federation publish": ["--home", "FILE"],
    "atoll federation sign": ["--home", "--key", "--out", "--request", "--yes"],
    "atoll model": ["--best", "--home", "--json", "--out", "--version", "RUN"],
    "atoll run": ["--detach", "--events", "--from", "--home", "--json", "--resume", "--watch", "JOB"],
    "atoll runs": ["--home", "--json"],
    "atoll server": [],
    "atoll server init": [
        "--address",
        "--enrolment-address",
        "--enrolment-listen",
        "--key-folder",
        "--listen",
        "--name",
        "FOLDER",
    ],
    "atoll server run": ["FOLDER"],
    "atoll simulate": [
        "--alpha",
        "--available",
        "--classes",
        "--data",
        "--dropout",
        "--engine",
        "--faults",
        "--home",
        "--json",
        "--label",
        "--network",
        "--no-resumable",
        "--out",
        "--partition",
        "--partition-seed",
        "--preview",
        "--processes",
        "--resumable",
        "--resume",
        "--server-data",
        "--session-dropout",
        "--set",
        "--shards",
        "--sites",
        "--slowdown",
        "--spread",
        "--step-seconds",
        "--stragglers",
        "--trace",
        "JOB",
    ],
    "atoll site": [],
    "atoll site exec": ["--home", "CMD...", "RUN"],
    "atoll site add": ["--home", "--json", "--organisation", "--valid-hours", "NAME"],
    "atoll site join": ["--home", "--json", "TOKEN"],
    "atoll site list": ["--home", "--json"],
    "atoll site revoke": ["--home", "--yes", "NAME"],
    "atoll site run": ["--home"],
    "atoll site status": ["--home", "--json"],
    "atoll site world": ["--dry-run", "--home", "--launcher"],
    "atoll statistics": ["--detach", "--home", "--json", "--watch", "JOB"],
    "atoll status": ["--home", "--json", "--watch", "RUN"],
    "atoll stop": ["--home", "RUN"],
    "atoll strategies": ["--json"],
    "atoll sweep": ["--grid", "--jobs", "--out", "--seeds", "JOB", "[-- OPTIONS]"],
    "atoll user": [],
    "atoll user add": ["--home", "--json", "--organisation", "--role", "--valid-hours", "NAME"],
    "atoll user join": ["--home", "--json", "TOKEN"],
}


def _options(command: Any, name: str) -> Iterator[tuple[str, list[str]]]:
    found = []
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            found.append(parameter.metavar or parameter.name.upper())
        else:
            found += [text for text in (*parameter.opts, *parameter.secondary_opts) if text.startswith("--")]
    yield name, sorted(found)
    for child_name, child in getattr(command, "commands", {}).items():
        yield from _options(child, f"{name} {child_name}")


def test_options_are_frozen() -> None:
    found = dict(_options(typer.main.get_command(app), "atoll"))
    assert found == FROZEN, ADVICE


def test_every_option_says_what_it_does() -> None:
    def check(command: Any, name: str) -> None:
        assert command.help, f"{name} has no help"
        for parameter in command.params:
            assert getattr(parameter, "help", None), f"{name}: {parameter.name} has no help"
        for child_name, child in getattr(command, "commands", {}).items():
            check(child, f"{name} {child_name}")

    check(typer.main.get_command(app), "atoll")
