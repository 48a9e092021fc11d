"""A person's home: settings, identity, and what is said where one is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.client.people import (
    STARTER,
    PersonSettings,
    default_home,
    default_site_home,
    load_person,
    load_settings,
    write_starter,
)
from atoll.wire.errors import ConfigError, IdentityError


def test_no_file_means_no_apps_and_no_data(tmp_path: Path) -> None:
    settings = load_settings(tmp_path)
    assert settings == PersonSettings()
    assert settings.source("fashion") == {}


def test_apps_and_data_are_named_in_the_file(tmp_path: Path) -> None:
    (tmp_path / "user.toml").write_text(
        '[apps.fashion]\ndistribution = "atoll-examples"\n[data.fashion]\npath = "/data/fashion"\n'
    )
    settings = load_settings(tmp_path)
    assert settings.apps["fashion"].distribution == "atoll-examples"
    assert settings.apps["fashion"].entry_point is None
    assert settings.source("fashion") == {"path": "/data/fashion"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[app.fashion]\ndistribution = "x"', "unknown key 'app'; did you mean 'apps'?"),
        ('[apps.fashion]\ndistribtion = "x"', "unknown key 'apps.fashion.distribtion'; did you mean 'distribution'?"),
        ("[apps.fashion", "not TOML"),
    ],
)
def test_a_fault_in_the_file_names_it(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "user.toml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_settings(tmp_path)
    assert said in str(caught.value)
    assert "user.toml" in str(caught.value)


def test_the_starter_is_comments_and_never_overwrites(tmp_path: Path) -> None:
    path = write_starter(tmp_path / "home")
    assert path.read_text() == STARTER
    assert load_settings(tmp_path / "home") == PersonSettings()
    path.write_text("plaintext = true\n")
    write_starter(tmp_path / "home")
    assert load_settings(tmp_path / "home").plaintext


def test_an_uncommented_starter_is_valid(tmp_path: Path) -> None:
    lines = STARTER.splitlines()[2:]
    (tmp_path / "user.toml").write_text("\n".join(line.removeprefix("# ").removeprefix("#") for line in lines))
    assert load_settings(tmp_path).apps["fashion"].entry_point == "fashion"


def test_a_home_without_identity_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(IdentityError, match="atoll user join TOKEN"):
        load_person(tmp_path)


def test_homes_follow_the_xdg_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert default_home() == tmp_path / "config" / "atoll"
    assert default_site_home() == tmp_path / "data" / "atoll" / "site"
