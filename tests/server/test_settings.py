from __future__ import annotations

from pathlib import Path

import pytest

from atoll.server.settings import ServerFolder, ServerSettings, load_settings, parse_address
from atoll.wire.errors import ConfigError

LEAST = """
federation = "demo"
address = "atoll.example.org:7443"
enrolment_address = "atoll.example.org:7444"
"""


def load(folder: Path, text: str, environment: dict[str, str] | None = None) -> ServerSettings:
    (folder / "server.toml").write_text(text)
    return load_settings(folder, environment or {})


def test_the_least_file(tmp_path: Path) -> None:
    settings = load(tmp_path, LEAST)
    assert settings.limits.lease_s == 45
    assert settings.database == "sqlite"
    assert ServerFolder(root=tmp_path).database_url(settings) == f"sqlite:///{tmp_path}/state.sqlite"


def test_durations_are_numbers_or_texts(tmp_path: Path) -> None:
    settings = load(tmp_path, LEAST + '[limits]\nheartbeat_s = 5\nlease_s = "1m"\n')
    assert (settings.limits.heartbeat_s, settings.limits.lease_s) == (5, 60)


def test_apps_and_data_are_named_tables(tmp_path: Path) -> None:
    settings = load(
        tmp_path,
        LEAST
        + '[apps.digits]\ndistribution = "atoll-examples"\nentry_point = "digits"\n[data.digits]\ntest = "test.npz"\n',
    )
    assert settings.apps["digits"].distribution == "atoll-examples"
    assert settings.data["digits"] == {"test": "test.npz"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (LEAST + 'listn = "0.0.0.0:1"', r"server\.toml, line 5: unknown key 'listn'; did you mean 'listen'\?"),
        (LEAST + "[limits]\nleas_s = 5", r"unknown key 'limits.leas_s'; did you mean 'lease_s'\?"),
        (LEAST + '[apps.digits]\ndistribution = "x"\nentry_pont = "y"', r"did you mean 'entry_point'\?"),
        (
            'federation = "demo"\naddress = "a:1"',
            "enrolment_address is missing; add `enrolment_address = ...` to the top of the file",
        ),
        (LEAST + 'listen = "7443"', r"listen = '7443': wanted \"host:port\""),
        (LEAST + 'listen = "0.0.0.0:70000"', "port of at most 65535"),
        (LEAST + 'enrolment_listen = "0.0.0.0:7443"', "they need a port each"),
        (LEAST + "[limits]\nlease_s = 20", r"limits: lease_s = 20 must be at least twice heartbeat_s = 15"),
        (LEAST + "[limits]\nmax_uploads = 0", "line 6: limits.max_uploads = 0: wanted at least 1$"),
        (LEAST + 'database = "oracle://x"', 'wanted "sqlite"'),
        (LEAST + "plaintext = true", r"plaintext = true takes a loopback address only, and listen"),
        (LEAST.replace('"demo"', '"De mo"'), "federation = 'De mo': not a name"),
        ("federation = ", "not TOML"),
    ],
)
def test_mistakes_say_what_to_do(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load(tmp_path, text)
    assert str(tmp_path / "server.toml") in str(caught.value)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="make a server with: atoll server init"):
        load_settings(tmp_path)


def test_plaintext_on_loopback(tmp_path: Path) -> None:
    text = LEAST + 'plaintext = true\nlisten = "127.0.0.1:1"\nenrolment_listen = "[::1]:2"'
    assert load(tmp_path, text).plaintext


def test_the_database_may_come_from_the_environment(tmp_path: Path) -> None:
    url = "postgresql://atoll:secret@db/atoll"
    assert load(tmp_path, LEAST, {"ATOLL_DATABASE": url}).database == url
    with pytest.raises(ConfigError, match=r"^\$ATOLL_DATABASE: database = ") as caught:
        load(tmp_path, LEAST, {"ATOLL_DATABASE": "mysql://atoll:secret@x/atoll"})
    assert "mysql://atoll:***@x/atoll" in str(caught.value)
    assert "secret" not in str(caught.value) + caught.value.value
    with pytest.raises(ConfigError, match=r"server\.toml, line 6: limits\.max_uploads"):
        load(tmp_path, LEAST + "[limits]\nmax_uploads = 0", {"ATOLL_DATABASE": url})


@pytest.mark.parametrize(
    ("text", "address"),
    [("0.0.0.0:1", ("0.0.0.0", 1)), ("[::1]:65535", ("::1", 65535)), ("a.example:0", ("a.example", 0))],
)
def test_addresses(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize("text", ["", ":1", "a", "a:", "a:x", "a:-1", "a:²", "a:65536"])
def test_no_addresses(text: str) -> None:
    with pytest.raises(ValueError, match="host:port"):
        parse_address(text)
