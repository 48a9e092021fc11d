"""Settings of a person: where the identity lies, and which apps and data this machine has.

A person is a researcher, a reader or an operator. The home folder holds `identity/` and `user.toml`. Nothing here loads
torch or grpc's machinery.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, model_validator

from atoll.transport.identity import Identity, holds_identity, load_identity
from atoll.wire.errors import ConfigError, IdentityError
from atoll.wire.explain import explain
from atoll.wire.job import Part, Strict
from atoll.wire.toml_file import read_toml

SETTINGS_FILE = "user.toml"
IDENTITY_FOLDER = "identity"

STARTER = """\
# What this machine knows. A job names its app and its data by these names, and each site has a file of its own.
#
# [apps.fashion]                    # an installed distribution and its entry point in the group "atoll.apps"
# distribution = "atoll-examples"
# entry_point  = "fashion"
#
# [scripts.segmentation]            # of a job that names a script of the sites; or hash = "..." in place of path
# path = "/home/ada/train.py"
#
# [data.fashion]                    # handed to the app as `source`; building the first model needs no data
# path = "/data/fashion"
#
# [callbacks.log]                   # what hears of each run that `atoll run`, `status --watch` or `simulate` follows
# kind = "json_lines"               # or a kind of an installed distribution (atoll.callbacks)
# path = "runs.jsonl"
"""


class AppTable(Strict):
    """`[apps.NAME]`: the installed distribution that brings an app."""

    distribution: str = Field(min_length=1, max_length=128)
    entry_point: str | None = None  # in the group "atoll.apps"; the app's name where absent


class ScriptTable(Strict):
    """`[scripts.NAME]`: which version of a script of the sites is meant, by a copy of it or by its hash."""

    path: Path | None = None
    hash: str | None = Field(default=None, pattern="^[0-9a-f]{64}$")  # as `atoll site status` shows it

    @model_validator(mode="after")
    def _one(self) -> ScriptTable:
        if (self.path is None) == (self.hash is None):
            raise ValueError("give path or hash, one of them")
        return self


class PersonSettings(Strict):
    """A whole `user.toml`."""

    plaintext: bool = False  # development only, loopback only, and the server must say the same
    apps: dict[str, AppTable] = Field(default_factory=dict)
    scripts: dict[str, ScriptTable] = Field(default_factory=dict)
    data: dict[str, dict[str, Any]] = Field(default_factory=dict)
    callbacks: dict[str, Part] = Field(default_factory=dict)  # what hears of the runs that are followed here

    def source(self, name: str | None) -> Mapping[str, Any]:
        """The `[data.NAME]` table; empty where this machine has no such data, and where a job names none."""
        return self.data.get(name or "", {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What this machine has, and where it says so."""

    home: Path
    settings: PersonSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Person:
    """Who gives a command, and what this machine has."""

    home: Path
    identity: Identity
    settings: PersonSettings


def default_home() -> Path:
    """`~/.config/atoll`, or where the XDG variable puts it."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "atoll"


def default_site_home() -> Path:
    """`~/.local/share/atoll/site`, or where the XDG variable puts it."""
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "atoll" / "site"


def identity_folder(home: Path) -> Path:
    """`home`/identity; `home` itself where that holds the keys, as the first operator's folder does."""
    return home if holds_identity(home) else home / IDENTITY_FOLDER


def load_person(home: Path | None) -> Person:
    """The person whose home is `home`, or the default home where None.

    Raises:
        IdentityError: no identity there, or one that cannot be used; says how to get one.
        ConfigError: `user.toml` cannot be understood.
    """
    root = home or default_home()
    folder = identity_folder(root)
    if not holds_identity(folder):
        raise IdentityError(
            f"{root} holds no identity: join with the token that your operator gives you (atoll user join TOKEN), "
            "or name the folder that has it with --home"
        )
    return Person(home=root, identity=load_identity(folder), settings=load_settings(root))


def load_settings(home: Path) -> PersonSettings:
    """The settings in `home`; empty ones where there is no file.

    Raises:
        ConfigError: the file is unreadable, not TOML, or has an unknown key.
    """
    path = home / SETTINGS_FILE
    if not path.exists():
        return PersonSettings()
    file = read_toml(path)
    try:
        return PersonSettings.model_validate(file.table)
    except ValidationError as error:
        raise explain(error, PersonSettings, file) from None


def write_starter(home: Path) -> Path:
    """Writes a `user.toml` of comments where there is none, and returns its path."""
    path = home / SETTINGS_FILE
    if not path.exists():
        try:
            home.mkdir(parents=True, exist_ok=True)
            path.write_text(STARTER)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None
    return path
