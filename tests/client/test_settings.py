"""site.toml is strict, and the starter is a file that loads."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import atoll
from atoll.client.home import SiteHome, agent_runs, sole_agent
from atoll.client.settings import load_settings, starter_settings
from atoll.wire.errors import ConfigError, LocalError

FULL = """
[site]
name = "north"
server = "server.example:8443"
[apps.digits]
distribution = "atoll-examples"
entry_point = "digits"
[scripts.old]
path = "/opt/train.py"
[data.digits]
path = "/data/train.npz"
[capacity]
runs_at_once = 2
labels = { zone = "lab" }
[devices]
device = "cuda:1"
[reproducible]
seed = 7
"""


def loaded(folder: Path, text: str) -> object:
    path = folder / "site.toml"
    path.write_text(text)
    return load_settings(path)


def test_every_table_is_read(tmp_path: Path) -> None:
    path = tmp_path / "site.toml"
    path.write_text(FULL)
    settings = load_settings(path)
    assert settings.apps["digits"].distribution == "atoll-examples"
    assert settings.data["digits"] == {"path": "/data/train.npz"}
    assert settings.capacity.runs_at_once == 2
    assert settings.reproducible is not None


@pytest.mark.parametrize(
    ("old", "new", "hint"),
    [
        ("[capacity]", "[capacities]", "site.toml, line 12: unknown key 'capacities'; did you mean 'capacity'?"),
        ("runs_at_once", "runs_at_one", "line 13: unknown key 'capacity.runs_at_one'; did you mean 'runs_at_once'?"),
        ('name = "north"', 'name = "North Clinic"', "line 3: site.name = 'North Clinic': wanted 1 to 63"),
        ("[site]", "[sites]", "line 2: unknown key 'sites'; did you mean 'site'?"),
        (
            "[scripts.old]",
            "[scripts.digits]",
            "line 8: 'digits' is in [apps] and in [scripts], and a job could mean either; give one another name",
        ),
        ('"cuda:1"', '"gpu"', 'line 16: devices.device = \'gpu\': wanted "auto", "cpu", "mps", "cuda" or "cuda:1"'),
        ("runs_at_once = 2", "runs_at_once = 0", "line 13: capacity.runs_at_once = 0: wanted at least 1"),
        (
            'server = "server.example:8443"',
            'server = "server.example"',
            'line 4: site.server = \'server.example\': wanted "host:port", e.g. "atoll.example.org:7443"',
        ),
        (
            "[data.digits]",
            '[data."../x"]',
            "'../x' is no name, which has up to 63 letters, digits, '.', '_' and '-': rename it",
        ),
    ],
)
def test_a_fault_names_the_key(tmp_path: Path, old: str, new: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(hint)):
        loaded(tmp_path, FULL.replace(old, new))


def test_a_home_without_settings_says_how_to_join(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"site\.toml: no such file; join first: atoll site join TOKEN"):
        load_settings(tmp_path / "site.toml")


def test_too_many_labels_are_counted(tmp_path: Path) -> None:
    labels = ", ".join(f'l{number} = "x"' for number in range(33))
    with pytest.raises(ConfigError, match=r"line 14: .*there are 33 labels, at most 32 are taken: remove some"):
        loaded(tmp_path, FULL.replace('zone = "lab"', labels))


def test_the_starter_loads_and_names_no_app(tmp_path: Path) -> None:
    path = tmp_path / "site.toml"
    path.write_text(starter_settings(name="north", server="server.example:8443"))
    settings = load_settings(path)
    assert (settings.site.name, settings.site.server) == ("north", None)
    assert "server.example:8443" in path.read_text()
    assert not settings.apps
    assert not settings.site.plaintext


def test_each_table_that_the_starter_explains_is_one_when_it_is_taken_in(tmp_path: Path) -> None:
    """What is commented out is right too: a person removes the '#' and nothing else."""
    path = tmp_path / "site.toml"
    table = re.compile(r"(?m)^# (\[[a-z]+(?:\.[a-z]+)?\]|[a-z_]+ = .*)$")
    path.write_text(table.sub(r"\1", starter_settings(name="north", server="server.example:8443")))
    settings = load_settings(path)
    assert settings.site.server == "server.example:8443"
    assert settings.apps["digits"].entry_point == "digits"
    assert settings.scripts["segmentation"].path == Path("/opt/segmentation/train.py")
    assert settings.data["digits"] == {"path": "/data/digits/train.npz"}
    assert settings.capacity.labels == {"region": "north"}
    assert settings.parallel is not None
    assert settings.parallel.dp_shard == -1


def test_one_agent_a_home(tmp_path: Path) -> None:
    home = SiteHome(root=tmp_path)
    home.make()
    assert not agent_runs(home)
    with sole_agent(home):
        assert agent_runs(home)
        with pytest.raises(LocalError, match="another agent"), sole_agent(home):
            pass
    assert not agent_runs(home)


def test_the_secret_is_made_once_and_private(tmp_path: Path) -> None:
    home = SiteHome(root=tmp_path)
    home.make()
    first = home.secret()
    assert len(first) == 32
    assert home.secret() == first
    assert (home.state / "secret").stat().st_mode & 0o777 == 0o600


def test_the_agents_path_loads_neither_torch_nor_a_web_framework(tmp_path: Path) -> None:
    code = (
        "import sys, atoll.client.agent, atoll.client.join, atoll.client.status\n"
        "heavy = {'torch', 'numpy', 'flwr', 'sqlalchemy', 'fastapi', 'starlette'} & set(sys.modules)\n"
        "sys.exit(', '.join(sorted(heavy)) or 0)"
    )
    source = str(Path(atoll.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": source},
        check=False,
    )
    assert done.returncode == 0, done.stderr
