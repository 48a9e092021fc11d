"""The settings of a server: one strict `server.toml` in its folder, and where everything else in that folder lies.

Precedence, here and nowhere else: the environment variable ATOLL_DATABASE (a URL may hold a password), then the file,
then the defaults below. An unknown key is an error that names the nearest known one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError, field_validator, model_validator

from atoll.transport.credentials import is_loopback
from atoll.wire.errors import ConfigError, Malformed
from atoll.wire.explain import explain
from atoll.wire.job import Part, Seconds, Strict
from atoll.wire.names import check_site_name
from atoll.wire.toml_file import read_toml

DATABASE_VARIABLE = "ATOLL_DATABASE"

_GIB = 1 << 30


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of "host:port"; IPv6 hosts stand in brackets.

    Raises:
        ValueError: it is none.
    """
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError('wanted "host:port" with a port of at most 65535, e.g. "0.0.0.0:7443"')
    return host, int(port)


def _checked_address(text: str) -> str:
    parse_address(text)
    return text


def _checked_name(text: str) -> str:
    try:
        return check_site_name(text, "federation")
    except Malformed as error:
        raise ValueError(f"not a name: {error.bound}") from None


Address = Annotated[str, AfterValidator(_checked_address)]


class LimitsSection(Strict):
    """`[limits]`: what the server gives and takes at most."""

    heartbeat_s: Seconds = 15.0  # 1,000 idle sites at 15 s cost 1.7 % of a core, at 5 s 4.1 %
    lease_s: Seconds = 45.0  # three heartbeats: two may be lost
    max_uploads: int = Field(default=2, ge=1, le=256)  # updates received at once; each holds a staging slot
    max_downloads: int = Field(default=2, ge=1, le=1024)  # models sent at once
    min_bytes_per_s: int = Field(default=32 * 1024, ge=1)  # slower over 30 s and a grant is withdrawn
    max_frame_bytes: int = Field(default=4 << 20, ge=64 << 10, le=4 << 20)
    max_model_bytes: int = Field(default=64 * _GIB, ge=1, le=1 << 48)
    max_open_runs: int = Field(default=64, ge=1, le=100_000)  # queued and running; more are refused with advice
    keep_versions: int = Field(default=3, ge=1)  # newest model versions of a run kept on disk, beside version 0
    drain_s: Seconds = 30.0  # time for transfers, other calls and streams to end in order on SIGTERM

    @model_validator(mode="after")
    def _lease_outlives_heartbeats(self) -> LimitsSection:
        if self.lease_s < 2 * self.heartbeat_s:
            raise ValueError(
                f"lease_s = {self.lease_s:g} must be at least twice heartbeat_s = {self.heartbeat_s:g}, "
                "or one lost heartbeat drops a site"
            )
        return self


class AppSection(Strict):
    """`[apps.NAME]`: an installed distribution whose app evaluates models on the server's side."""

    distribution: str = Field(min_length=1)
    entry_point: str = Field(min_length=1)


class EvaluationSection(Strict):
    """`[evaluation]`: the worker that judges committed versions on the server's own data."""

    device: str = "cpu"
    timeout_s: Seconds = 600.0


class UpstreamSection(Strict):
    """`[upstream]`: this server is a site of another one, for its whole region (docs/trees.md)."""

    home: Path  # made by `atoll site join` with the upper federation's token; below the server's folder where relative
    min_sites: int = Field(default=2, ge=1, le=1_000_000)  # members of the region without which it takes no part
    quorum: int | None = Field(default=None, ge=1)  # updates that suffice at a round's deadline; all where absent
    # Of the upper server's deadline of a round: the rest is for the sum's way up. Each level below takes less.
    deadline_share: float = Field(default=0.9, gt=0, le=1)

    @model_validator(mode="after")
    def _quorum_can_be_met(self) -> UpstreamSection:
        if self.quorum is not None and self.quorum > self.min_sites:
            raise ValueError(
                f"quorum is at most min_sites ({self.min_sites}), else a round could start and never close"
            )
        return self


class ServerSettings(Strict):
    """The whole of `server.toml`."""

    federation: Annotated[str, AfterValidator(_checked_name)]
    listen: Address = "0.0.0.0:7443"
    enrolment_listen: Address = "0.0.0.0:7444"
    address: Address
    enrolment_address: Address
    bulk: Address | Literal["off"] = "off"  # where bulk lines come in (docs/protocol.md)
    plaintext: bool = False
    database: str = Field(default="sqlite", min_length=1)
    limits: LimitsSection = LimitsSection()
    evaluation: EvaluationSection = EvaluationSection()
    upstream: UpstreamSection | None = None
    apps: dict[str, AppSection] = Field(default={})
    data: dict[str, dict[str, Any]] = Field(default={})
    callbacks: dict[str, Part] = Field(default={})  # installed here; they hear what happens to runs

    @field_validator("database")
    @classmethod
    def _known_database(cls, text: str) -> str:
        if text != "sqlite" and text.partition(":")[0] not in ("sqlite", "postgresql", "postgresql+psycopg"):
            raise ValueError('wanted "sqlite" (a file in the server\'s folder) or a URL "postgresql://user@host/name"')
        return text

    @model_validator(mode="after")
    def _ports_differ(self) -> ServerSettings:
        if self.listen == self.enrolment_listen and parse_address(self.listen)[1] != 0:
            raise ValueError(f"listen and enrolment_listen are both {self.listen}; they need a port each")
        return self

    @model_validator(mode="after")
    def _plaintext_stays_at_home(self) -> ServerSettings:
        for key in ("listen", "enrolment_listen", "bulk"):
            address = getattr(self, key)
            if self.plaintext and address != "off" and not is_loopback(address):
                raise ValueError(
                    f'plaintext = true takes a loopback address only, and {key} = "{address}" is none: '
                    'listen on "127.0.0.1:PORT", or remove plaintext to use TLS'
                )
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFolder:
    """Where the things of a server lie below its folder."""

    root: Path

    @property
    def settings_path(self) -> Path:
        return self.root / "server.toml"

    @property
    def database_path(self) -> Path:
        return self.root / "state.sqlite"

    @property
    def lock_path(self) -> Path:
        return self.root / "server.lock"

    @property
    def authority(self) -> Path:
        """Online CA and server certificate."""
        return self.root / "authority"

    @property
    def models(self) -> Path:
        """Committed model versions, a folder a run."""
        return self.root / "models"

    @property
    def staging(self) -> Path:
        """Slots of updates on their way in; nothing in it outlives a start."""
        return self.root / "staging"

    @property
    def relays(self) -> Path:
        """Models that neighbours cannot bring each other; nothing in it outlives a start."""
        return self.root / "relays"

    @property
    def evaluator(self) -> Path:
        """Sockets, manifests and logs of the evaluation worker."""
        return self.root / "evaluator"

    @property
    def operator(self) -> Path:
        """Identity of the first operator, made by `atoll server init`."""
        return self.root / "operator"

    def database_url(self, settings: ServerSettings) -> str:
        return f"sqlite:///{self.database_path}" if settings.database == "sqlite" else settings.database


def database_of(environment: Mapping[str, str] | None = None) -> str | None:
    """The database that ATOLL_DATABASE names; None where it is not set."""
    return (os.environ if environment is None else environment).get(DATABASE_VARIABLE) or None


def load_settings(root: Path, environment: Mapping[str, str] | None = None) -> ServerSettings:
    """The settings in `root`/server.toml, with the database from ATOLL_DATABASE where that is set.

    Raises:
        ConfigError: the file is missing, not TOML, or a key is unknown, missing or out of bounds.
    """
    path = ServerFolder(root=root).settings_path
    if not path.exists():
        raise ConfigError(f"{path}: no such file; make a server with: atoll server init {root}")
    file = read_toml(path)
    database = database_of(environment)
    given = {"database": database} if database is not None else {}
    try:
        return ServerSettings.model_validate(file.table | given)
    except ValidationError as error:
        of_environment = database and all(fault["loc"] == ("database",) for fault in error.errors())
        raise explain(error, ServerSettings, f"${DATABASE_VARIABLE}" if of_environment else file) from None
