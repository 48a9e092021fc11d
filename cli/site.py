"""`atoll site`: admit sites (operators); join, run and look at one (site administrators)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from atoll.cli import options

commands = options.group("Sites: admit, join, run, look, revoke.")

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the site: a-z, 0-9, '-'.")]


@commands.command()
def add(
    name: Name,
    organisation: Annotated[str, typer.Option("--organisation", help="Who stands behind the site.")],
    valid_hours: options.ValidHours = 24.0,
    home: options.PersonHome = None,
    as_json: options.AsJson = False,
) -> None:
    """Print a one-time token for a site.

    Needs the identity of an operator.

    \b
    Example:
      atoll site add st-mary --organisation "St Mary's Hospital" --home fed/server/operator
    """
    from atoll.cli.invitation import invite

    invite(home, name=name, role="site", organisation=organisation, valid_hours=valid_hours, as_json=as_json)


@commands.command()
def join(
    token: Annotated[str, typer.Argument(metavar="TOKEN", help="The token, or '-' to read it from stdin.")],
    home: options.SiteHome = None,
    as_json: options.AsJson = False,
) -> None:
    """Join with a token: make the site's keys.

    Gets a certificate, and writes site.toml and a policy that allows nothing yet.

    Tell the keeper of the federation's key the fingerprint that this prints: the site takes part once
    `atoll federation sign` has put it on the member list. With --json: site, federation, fingerprint, home.

    \b
    Example:
      atoll site join atoll1-... --home fed/st-mary
    """
    from atoll.cli.invitation import read_token
    from atoll.cli.output import note, print_json
    from atoll.client.join import join_site
    from atoll.transport.identity import format_fingerprint

    folder = home or _default_home()
    identity = join_site(read_token(token), folder)
    assert identity.signing_key is not None  # every site has one
    fingerprint = format_fingerprint(identity.signing_key.public_key().public_bytes_raw())
    if as_json:
        told = {"site": identity.name, "federation": identity.federation}
        print_json({**told, "fingerprint": fingerprint, "home": str(folder)})
        return
    note(f"{identity.name} joined federation {identity.federation}; it is pending until the member list is signed")
    note(f"fingerprint of its signing key: {fingerprint}")
    note(f"next: name apps and data in {folder / 'site.toml'}, allow apps in {folder / 'policy.toml'}")
    note(f"then: atoll site run --home {folder}")


@commands.command()
def run(home: options.SiteHome = None) -> None:
    """Run the site's agent until SIGTERM or Ctrl-C.

    It connects outwards only, and takes up unfinished work.

    \b
    Example:
      atoll site run --home fed/st-mary
    """
    from atoll.client.main import run_agent

    run_agent(_joined(home))


@commands.command(name="exec")
def exec_(
    run: options.RunId,
    command: Annotated[list[str], typer.Argument(metavar="CMD...", help="The script, after '--'.")],
    home: options.SiteHome = None,
) -> None:
    """Run a script as the worker of a run.

    For jobs that name a script, which calls atoll.join() or atoll.connect(). The site's agent runs beside it, and does the rest. The exit code is the script's.

    \b
    Examples:
      atoll site exec latest -- python train.py
      atoll site exec latest -- torchrun --nproc-per-node 2 train.py
    """
    from atoll.client.exec_script import exec_script

    code = exec_script(_joined(home), run, command)
    raise typer.Exit(code if code >= 0 else 128 - code)


@commands.command()
def status(home: options.SiteHome = None, as_json: options.AsJson = False) -> None:
    """Show what the agent on this machine does.

    Connection, runs, tasks, apps and scripts with their hashes, data, policy.

    \b
    Example:
      atoll site status --home fed/st-mary
    """
    from atoll.cli.output import print_json
    from atoll.cli.site_status import lines
    from atoll.client.status import site_status

    found = site_status(_joined(home))
    if as_json:
        print_json(found)
        return
    print("\n".join(lines(found)))


@commands.command(name="list")
def list_sites(home: options.PersonHome = None, as_json: options.AsJson = False) -> None:
    """List the federation's sites.

    \b
    Example:
      atoll site list
    """
    import asyncio

    from atoll.cli.output import print_json, print_table
    from atoll.cli.site_table import COLUMNS, record, row
    from atoll.client.operator import list_sites as ask
    from atoll.client.people import load_person

    reply = asyncio.run(ask(load_person(home)))
    if as_json:
        print_json([record(site) for site in reply.sites])
        return
    rows = [row(site, now_unix_s=reply.server_unix_s) for site in reply.sites]
    print_table(COLUMNS, rows, empty="no sites yet; admit one with: atoll site add NAME --organisation ORG")


@commands.command()
def revoke(
    name: Name,
    home: options.PersonHome = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Shut a site or a person out at once.

    Connections end, certificates and tokens count no more. The member list changes with the next `atoll federation sign`.

    \b
    Example:
      atoll site revoke st-mary
    """
    import asyncio

    from atoll.cli.output import note
    from atoll.client.operator import revoke as ask
    from atoll.client.people import load_person

    person = load_person(home)
    if not yes and not typer.confirm(f"Revoke {name}? It cannot be undone; {name} would have to join anew", err=True):
        raise typer.Exit
    asyncio.run(ask(person, name=name))
    note(f"{name} is revoked; next: atoll federation sign, so that the sites learn it too")


def _default_home() -> Path:
    from atoll.client.people import default_site_home

    return default_site_home()


def _joined(home: Path | None) -> Path:
    """The home of a site that has joined. Raises ConfigError where there is none."""
    from atoll.wire.errors import ConfigError

    folder = home or _default_home()
    if not (folder / "site.toml").exists():
        raise ConfigError(
            f"{folder} is no site's home: join first (atoll site join TOKEN --home {folder}), or name another --home",
            key="--home",
            value=str(folder),
        )
    return folder
