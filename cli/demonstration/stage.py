"""Sets a federation up in one folder: a server, its sites and a researcher, each with what a person would write.

Every step is a command that a person types; what is written here by hand is what a person writes into settings files.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from atoll.cli.demonstration.crew import Crew, atoll_command, free_ports

FEDERATION = "demo"
RESEARCHER = "ada"
DISTRIBUTION = "atoll-examples"

APP_TABLE = """
[apps.{app}]
distribution = "{distribution}"
entry_point = "{app}"
"""
DATA_TABLE = """
[data.{app}]
path = {path}
"""
POLICY = """\
# The policy of a demo: this app in whatever version is installed here, for the one researcher there is.
allowed_apps = [{{ name = "{app}", hash = "any-installed" }}]
researchers = ["{researcher}"]
min_cohort = 3
max_rounds = 1000
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cast:
    """Which example is trained, and by whom."""

    app: str  # of the distribution atoll-examples
    sites: tuple[tuple[str, str], ...]  # name and organisation, at least three
    alpha: float = 0.5  # how alike the sites are (Dirichlet): 0.1 few classes each, 100 all alike


HOSPITALS = Cast(
    app="digits",
    sites=(
        ("st-mary", "St Mary's Hospital"),
        ("lakeside", "Lakeside Clinic"),
        ("north-lab", "Northern Laboratory"),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Where everything of the demo lies."""

    root: Path
    cast: Cast
    port: int
    enrolment_port: int

    @classmethod
    def choose(cls, root: Path, cast: Cast) -> Stage:
        """A stage in `root` on free loopback ports."""
        port, enrolment_port = free_ports(2)
        return cls(root=root, cast=cast, port=port, enrolment_port=enrolment_port)

    @property
    def data(self) -> Path:
        return self.root / "data"

    @property
    def server(self) -> Path:
        return self.root / "server"

    @property
    def operator(self) -> Path:
        return self.server / "operator"

    @property
    def key(self) -> Path:
        """The offline key has a folder of its own here; in earnest it is on another machine."""
        return self.root / "offline-key"

    @property
    def researcher(self) -> Path:
        return self.root / RESEARCHER

    def site(self, name: str) -> Path:
        return self.root / name


def prepare_data(stage: Stage, crew: Crew) -> None:
    """Splits the example's data over the sites, unevenly, as they would be found."""
    module, cast = f"atoll_examples.{stage.cast.app}.prepare", stage.cast
    options = ("--sites", str(len(cast.sites)), "--alpha", str(cast.alpha), "--out", str(stage.data))
    crew.ask("data", [sys.executable, "-m", module, *options])


def start_server(stage: Stage, crew: Crew) -> None:
    """Makes the server with its keys, tells it how to judge models, and starts it."""
    address, enrolment = f"127.0.0.1:{stage.port}", f"127.0.0.1:{stage.enrolment_port}"
    where = (
        "--address",
        address,
        "--listen",
        address,
        "--enrolment-address",
        enrolment,
        "--enrolment-listen",
        enrolment,
    )
    crew.ask(
        "server-init",
        atoll_command("server", "init", stage.server, "--name", FEDERATION, "--key-folder", stage.key, *where),
    )
    _append(stage.server / "server.toml", _app_table(stage) + _data_table(stage, stage.data / "test.npz"))
    crew.start("server", "server", "run", stage.server)
    crew.await_port("server", stage.port)
    crew.await_port("server", stage.enrolment_port)


def enrol_everybody(stage: Stage, crew: Crew) -> None:
    """Admits the sites and the researcher with one-time tokens, side by side, and signs the member list."""
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(_enrol_site, stage, crew, number) for number in range(len(stage.cast.sites))]
        waiting.append(pool.submit(_enrol_researcher, stage, crew))
        for one in waiting:
            one.result()
    crew.ask("sign", atoll_command("federation", "sign", "--yes", "--key", stage.key, "--home", stage.operator))


def start_sites(stage: Stage, crew: Crew) -> None:
    """Starts the agents."""
    for name, _ in stage.cast.sites:
        crew.start(name, "site", "run", "--home", stage.site(name))


def _enrol_site(stage: Stage, crew: Crew, number: int) -> None:
    name, organisation = stage.cast.sites[number]
    home = stage.site(name)
    add = atoll_command("site", "add", name, "--organisation", organisation, "--json", "--home", stage.operator)
    token = json.loads(crew.ask(f"{name}-add", add))["token"]
    crew.ask(f"{name}-join", atoll_command("site", "join", "-", "--home", home), text=token)
    _append(home / "site.toml", _app_table(stage) + _data_table(stage, stage.data / f"site-{number + 1}.npz"))
    (home / "policy.toml").write_text(POLICY.format(app=stage.cast.app, researcher=RESEARCHER))


def _enrol_researcher(stage: Stage, crew: Crew) -> None:
    add = atoll_command("user", "add", RESEARCHER, "--json", "--home", stage.operator)
    token = json.loads(crew.ask("researcher-add", add))["token"]
    crew.ask("researcher-join", atoll_command("user", "join", "-", "--home", stage.researcher), text=token)
    _append(stage.researcher / "user.toml", _app_table(stage))


def _app_table(stage: Stage) -> str:
    return APP_TABLE.format(app=stage.cast.app, distribution=DISTRIBUTION)


def _data_table(stage: Stage, path: Path) -> str:
    return DATA_TABLE.format(app=stage.cast.app, path=json.dumps(str(path)))  # a JSON string is a TOML string too


def _append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)
