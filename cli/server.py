"""`atoll server`: make an aggregation server and run it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from atoll.cli import options

commands = options.group("The aggregation server: make one, run it.")

Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of the server: settings, state, models.")]


@commands.command()
def init(
    folder: Folder,
    name: Annotated[str, typer.Option("--name", help="Name of the federation: a-z, 0-9, '-'; fixed for its life.")],
    key_folder: Annotated[
        Path, typer.Option("--key-folder", help="Where the offline key goes, e.g. a removable disk; not below FOLDER.")
    ],
    address: Annotated[
        str, typer.Option("--address", metavar="HOST:PORT", help="Where sites and researchers reach the server.")
    ],
    enrolment_address: Annotated[
        str | None,
        typer.Option(
            "--enrolment-address",
            metavar="HOST:PORT",
            show_default="the next port",
            help="Where newcomers with a token reach it.",
        ),
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(
            "--listen", metavar="HOST:PORT", show_default="all interfaces, port of --address", help="Address to bind."
        ),
    ] = None,
    enrolment_listen: Annotated[
        str | None,
        typer.Option(
            "--enrolment-listen",
            metavar="HOST:PORT",
            show_default="all interfaces, port of --enrolment-address",
            help="Address to bind for newcomers.",
        ),
    ] = None,
) -> None:
    """Make a federation and its server.

    Writes the offline key, the server's certificates, server.toml and the identity of the first operator.

    The offline key signs who belongs. Keep its folder apart from the server: `atoll federation sign` is the only
    command that needs it.

    State goes to a file in FOLDER, or to the PostgreSQL whose URL the environment variable ATOLL_DATABASE holds.

    \b
    Example:
      atoll server init fed/server --name demo --key-folder fed/offline-key --address 127.0.0.1:7443
    """
    from atoll.cli.output import note
    from atoll.server.setup import init_server

    made = init_server(
        folder,
        federation=name,
        key_folder=key_folder,
        address=address,
        enrolment_address=enrolment_address,
        listen=listen,
        enrolment_listen=enrolment_listen,
    )
    note(f"federation {name}: server in {folder}, offline key in {key_folder}, operator in {made}")
    note(f"next: atoll server run {folder}")


@commands.command()
def run(folder: Folder) -> None:
    """Run the server until SIGTERM or Ctrl-C.

    It then gives transfers limits.drain_s to end; sites come back by themselves when it runs again.

    \b
    Example:
      atoll server run fed/server
    """
    from atoll.client.region import join_region
    from atoll.server.main import run_server

    run_server(folder, join=join_region)
