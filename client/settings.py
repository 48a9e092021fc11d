"""A site's settings: `site.toml` as one frozen model; a key that it does not know is an error naming the nearest.

Apps and data are named here, where they run: a job only says their names, so nothing that comes over the wire can
choose what is imported or opened.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, ValidationError, field_validator, model_validator

from atoll.cluster.parallel.world_section import WorldSection
from atoll.wire.errors import ConfigError
from atoll.wire.explain import explain
from atoll.wire.job import SiteName, Strict
from atoll.wire.parallel_section import ParallelSection
from atoll.wire.toml_file import read_toml

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
NUM_LABELS = 32  # as wire/control.proto bounds them
LABEL_CHARACTERS = 63


def _matching(pattern: str, wanted: str) -> AfterValidator:
    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(f"wanted {wanted}")
        return text

    return AfterValidator(check)


Address = Annotated[str, _matching(r"\S+:\d{1,5}", '"host:port", e.g. "atoll.example.org:7443"')]
Device = Annotated[str, _matching(r"auto|cpu|mps|cuda(:\d+)?", '"auto", "cpu", "mps", "cuda" or "cuda:1"')]


class SiteSection(Strict):
    """`[site]`: who this is and where its server is."""

    name: SiteName
    server: Address | None = None  # host:port; absent: as the token said
    plaintext: bool = False  # development only, loopback only, and the server must say the same


class AppSection(Strict):
    """`[apps.NAME]`: an installed distribution and its entry point in the group `atoll.apps`."""

    distribution: str = Field(min_length=1, max_length=128)
    entry_point: str = Field(min_length=1, max_length=128)


class ScriptSection(Strict):
    """`[scripts.NAME]`: a script that joins a run by itself."""

    path: Path


class CapacitySection(Strict):
    """`[capacity]`: what the server may plan with."""

    runs_at_once: int = Field(default=1, ge=1, le=64)
    labels: dict[str, str] = Field(default_factory=dict)

    @field_validator("labels")
    @classmethod
    def _bounded(cls, labels: dict[str, str]) -> dict[str, str]:
        if len(labels) > NUM_LABELS:
            raise ValueError(f"there are {len(labels)} labels, at most {NUM_LABELS} are taken: remove some")
        if any(len(text) > LABEL_CHARACTERS for pair in labels.items() for text in pair):
            raise ValueError(f"a label and its value have at most {LABEL_CHARACTERS} characters each: shorten them")
        return labels


class GossipSection(Strict):
    """`[gossip]`: how neighbours reach this site, in runs whose zone its policy accepts."""

    listen: Address | None = None  # host:port; absent: it calls its neighbours, and opens no port
    advertise: Address | None = None  # under which neighbours reach it; as `listen` where absent

    @model_validator(mode="after")
    def _can_be_reached(self) -> GossipSection:
        if self.advertise is not None and self.listen is None:
            raise ValueError("advertise needs listen, the address of this machine that it leads to")
        host = (self.listen or "").rpartition(":")[0]
        if self.advertise is None and host in ("0.0.0.0", "[::]"):
            raise ValueError(f"listen = {self.listen} is no address that others can call; set advertise too")
        return self


class DevicesSection(Strict):
    """`[devices]`: where workers compute; "auto" leaves it to the job, and there to the best device present."""

    device: Device = "auto"


class ReproducibleSection(Strict):
    """`[reproducible]`: tests and simulations only. Rounding then derives from this seed, which everybody can read."""

    seed: int = Field(ge=0, lt=2**63)


class SiteSettings(Strict):
    """A whole `site.toml`."""

    site: SiteSection
    apps: dict[str, AppSection] = Field(default_factory=dict)
    scripts: dict[str, ScriptSection] = Field(default_factory=dict)
    data: dict[str, dict[str, Any]] = Field(default_factory=dict)
    capacity: CapacitySection = CapacitySection()
    devices: DevicesSection = DevicesSection()
    parallel: ParallelSection | None = None  # in place of the job's
    world: WorldSection | None = None  # absent: all processes of [parallel] on this machine
    gossip: GossipSection = GossipSection()
    reproducible: ReproducibleSection | None = None

    @field_validator("apps", "scripts", "data")
    @classmethod
    def _names(cls, tables: dict[str, Any]) -> dict[str, Any]:
        for name in tables:
            if not _NAME.fullmatch(name):
                raise ValueError(
                    f"{name!r} is no name, which has up to 63 letters, digits, '.', '_' and '-': rename it"
                )
        return tables

    @model_validator(mode="after")
    def _world_fits(self) -> SiteSettings:
        if self.world is None or self.world.launcher == "local":
            return self
        if self.parallel is None:
            raise ValueError("world needs [parallel], which says how a model is spread over its processes: add it")
        if self.devices.device not in ("cpu", "cuda"):
            raise ValueError(
                f'devices.device = "{self.devices.device}", and the nodes of [world] are other machines: set "cpu" or "cuda"'
            )
        return self


def load_settings(path: Path) -> SiteSettings:
    """The settings in `path`.

    Raises:
        ConfigError: missing, not TOML, an unknown key, a value out of bounds, or a name that is both app and script.
    """
    file = read_toml(path, absent="join first: atoll site join TOKEN")
    try:
        settings = SiteSettings.model_validate(file.table)
    except ValidationError as error:
        raise explain(error, SiteSettings, file) from None
    if both := sorted(settings.apps.keys() & settings.scripts.keys()):
        text = f"{both[0]!r} is in [apps] and in [scripts], and a job could mean either; give one another name"
        raise ConfigError(f"{file.place(['scripts', both[0]])}: {text}", key=f"scripts.{both[0]}", value=both[0])
    return settings


STARTER_SETTINGS = """\
# Settings of this site. The agent reads them when it starts: restart it after a change.

[site]
name = "{name}"
# The agent connects outwards only, to the address that came with the token: {server}. It opens no port,
# unless [gossip] below says so.
# If the server is reached by another address from here:
# server = "{server}"

# Apps that this machine can run. Each is an installed Python distribution; a job asks for it by the name given here.
# Naming an app here does not allow it: policy.toml does.
# [apps.digits]
# distribution = "atoll-examples"
# entry_point = "digits"

# Scripts of this machine that train with a loop of their own. As with an app, the name is given here, and the hash is
# that of the file; `atoll site status` shows both. A job says script = "segmentation", allowed_apps of policy.toml
# names it like an app, and whoever runs the machine starts it: atoll site exec RUN -- python /opt/segmentation/train.py
# [scripts.segmentation]
# path = "/opt/segmentation/train.py"

# Data of this site. A job asks for it by name; the keys go to the app as they are, so use absolute paths.
# [data.digits]
# path = "/data/digits/train.npz"

[capacity]
# Runs that this site works on side by side. Each keeps one worker process, with model and data in memory.
runs_at_once = 1
# labels = {{ region = "north" }}

# Where neighbours of the same zone (labels.zone, and zones in policy.toml) call this site, in runs of gossip. Without it
# the site opens no port; it calls them, and where neither can reach the other the server passes models on.
[gossip]
# listen = "0.0.0.0:7445"
# advertise = "node-3.cluster-a.example.org:7445"

[devices]
# "auto" (the best device present), "cpu", "cuda", "cuda:1" or "mps". A device that is absent is an error.
device = "auto"

# Over how many processes this site spreads a run, and how; in place of what a job says (docs/parallel.md).
# [parallel]
# dp_shard = -1

# Where these processes run: "local" is this machine; "mpirun", "slurm", "jobset" and "trainjob" need more keys, and a
# device above that is not "auto" (docs/parallel.md). `atoll site world --dry-run` shows what comes of it.
# [world]
# launcher = "local"
"""


def starter_settings(*, name: str, server: str) -> str:
    """The text of `site.toml` that `atoll site join` writes."""
    return STARTER_SETTINGS.format(name=name, server=server)
