"""Tokens on the command line: asking the server for one, printing it, reading one back."""

from __future__ import annotations

import sys
from pathlib import Path


def invite(home: Path | None, *, name: str, role: str, organisation: str, valid_hours: float, as_json: bool) -> None:
    """Asks the server for a token and prints it on stdout.

    Raises:
        IdentityError: `home` holds no usable identity.
        RemoteError: the server refuses, or cannot be reached.
    """
    import asyncio

    from atoll.cli.output import note, print_json
    from atoll.client.operator import add_member
    from atoll.client.people import load_person

    person = load_person(home)
    valid_s = round(valid_hours * 3600)
    token = asyncio.run(add_member(person, name=name, role=role, organisation=organisation, valid_s=valid_s))
    if as_json:
        print_json({"name": name, "role": role, "organisation": organisation, "valid_s": valid_s, "token": token})
        return
    group = "site" if role == "site" else "user"
    print(token)
    note(f"shown once, for {name} alone, good for {valid_hours:g} h. There: atoll {group} join TOKEN")


def read_token(argument: str) -> str:
    """The token itself; read from stdin where `argument` is "-", so that it does not show in the list of processes.

    Raises:
        ConfigError: stdin holds none.
    """
    if argument != "-":
        return argument.strip()
    token = sys.stdin.readline().strip()
    if not token:
        from atoll.wire.errors import ConfigError

        raise ConfigError("no token on stdin; give it as an argument, or pipe it in", key="TOKEN")
    return token
