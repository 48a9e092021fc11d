"""How a site comes into being: from a one-time token to a home with keys, settings and a policy that allows nothing."""

from __future__ import annotations

import os
from pathlib import Path

from atoll.client.home import SiteHome
from atoll.client.policy import STARTER_POLICY
from atoll.client.settings import starter_settings
from atoll.transport.durable import disk_errors
from atoll.transport.enrolment import SITE_ROLES, enrol
from atoll.transport.identity import Identity


def join_site(token: str, home: Path) -> Identity:
    """The identity of the site that `token` was made for, now stored under `home`.

    Writes `site.toml` and `policy.toml` where there are none; a site that joins anew keeps what its administrator wrote.

    Raises:
        BadToken: the token is malformed, used, expired, or for another role.
        IdentityError: `home` holds another identity.
        Stranger, Unavailable: the server is not the one of the token, or cannot be reached.
        LocalError: the files cannot be written.
    """
    site = SiteHome(root=home)
    site.make()
    identity = enrol(token, site.identity, roles=SITE_ROLES)
    _write_where_absent(site.settings, starter_settings(name=identity.name, server=identity.address))
    _write_where_absent(site.policy, STARTER_POLICY)
    return identity


def _write_where_absent(path: Path, text: str) -> None:
    with disk_errors(path):
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            return
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
