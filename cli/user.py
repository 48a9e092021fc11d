"""`atoll user`: admit people (researchers, readers, operators), and become one."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from atoll.cli import options

commands = options.group("People: admit one, join as one.")


class Role(StrEnum):
    """What a person may do."""

    RESEARCHER = "researcher"
    READER = "reader"
    OPERATOR = "operator"


@commands.command()
def add(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the person: a-z, 0-9, '-'.")],
    role: Annotated[Role, typer.Option("--role", help="researcher: submit runs; reader: look; operator: admit.")] = (
        Role.RESEARCHER
    ),
    organisation: Annotated[str, typer.Option("--organisation", help="Who the person works for.")] = "",
    valid_hours: options.ValidHours = 24.0,
    home: options.PersonHome = None,
    as_json: options.AsJson = False,
) -> None:
    """Print a one-time token for a person.

    Needs the identity of an operator.

    \b
    Example:
      atoll user add ada --home fed/server/operator
    """
    from atoll.cli.invitation import invite

    invite(home, name=name, role=role.value, organisation=organisation, valid_hours=valid_hours, as_json=as_json)


@commands.command()
def join(
    token: Annotated[str, typer.Argument(metavar="TOKEN", help="The token, or '-' to read it from stdin.")],
    home: options.PersonHome = None,
    as_json: options.AsJson = False,
) -> None:
    """Join with a token: make your keys.

    With --json: user, federation, home.

    \b
    Example:
      atoll user join atoll1-...
    """
    from atoll.cli.invitation import read_token
    from atoll.cli.output import note, print_json
    from atoll.client.people import IDENTITY_FOLDER, default_home, write_starter
    from atoll.transport.enrolment import USER_ROLES, enrol

    folder = home or default_home()
    identity = enrol(read_token(token), folder / IDENTITY_FOLDER, roles=USER_ROLES)
    settings = write_starter(folder)
    if as_json:
        print_json({"user": identity.name, "federation": identity.federation, "home": str(folder)})
        return
    note(f"{identity.name} is now a {identity.role} of federation {identity.federation}; keys are in {folder}")
    note(f"next: name your apps in {settings}, then: atoll run job.toml")
