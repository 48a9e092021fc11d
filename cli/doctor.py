"""`atoll doctor`: checks of an installation, each with what to do where it fails."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from atoll.cli import options
from atoll.cli.exit_codes import ExitCode


def doctor(
    home: Annotated[
        Path | None,
        typer.Option(
            "--home",
            envvar="ATOLL_HOME",
            show_default="~/.config/atoll",
            help="Folder to look at: a person's or a site's.",
        ),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Check this installation.

    Looks at the identity and its expiry, the server, clock, disk, device, apps, data, and what the policy allows.

    Exit code 3 where a check failed.

    \b
    Examples:
      atoll doctor
      atoll doctor --home fed/st-mary
    """
    from atoll.cli.output import print_json
    from atoll.client.checks import Verdict, check_home
    from atoll.client.people import default_home

    folder = home or default_home()
    found = check_home(folder)
    if as_json:
        print_json(
            {
                "home": str(folder),
                "ok": all(check.verdict is not Verdict.FAILED for check in found),
                "checks": [
                    {"check": check.name, "verdict": check.verdict.value, "found": check.found, "advice": check.advice}
                    for check in found
                ],
            }
        )
    else:
        for check in found:
            print(f"{check.verdict.value:7} {check.name:12} {check.found}")
            if check.advice:
                print(f"{'':20} {check.advice}")
    if any(check.verdict is Verdict.FAILED for check in found):
        raise typer.Exit(ExitCode.LOCAL)
