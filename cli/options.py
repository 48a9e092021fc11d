"""Options that several commands share, so that one word means one thing everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

PersonHome = Annotated[
    Path | None,
    typer.Option(
        "--home",
        envvar="ATOLL_HOME",
        show_default="~/.config/atoll",
        help="Folder with your identity and user.toml (an operator's: FOLDER/operator of `atoll server init`).",
    ),
]
SiteHome = Annotated[
    Path | None,
    typer.Option("--home", show_default="~/.local/share/atoll/site", help="Folder of the site: keys, settings, state."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, for programs.")]
RunId = Annotated[str, typer.Argument(metavar="RUN", help="Id of the run, or its beginning; `atoll runs` lists them.")]
ValidHours = Annotated[
    float, typer.Option("--valid-hours", min=0.02, max=24.0, help="Hours until the token expires, at most 24.")
]


def group(summary: str) -> typer.Typer:
    """An empty group of commands with the settings that all of ours have."""
    # Help through rich costs 150 ms of imports; plain text starts in half the time and reads the same in a pipe.
    return typer.Typer(
        help=summary,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
