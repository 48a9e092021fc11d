"""Which server, and as whom: what does not fit is said before anything is tried."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.client.home import SiteHome
from atoll.client.link import find_link
from atoll.client.main import run_agent
from atoll.client.settings import load_settings
from atoll.wire.errors import AtollError, ConfigError, IdentityError


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ('[site]\nname = "north"\nplaintext = true\n', ConfigError, "site.server is missing"),
        ('[site]\nname = "north"\nplaintext = true\nserver = "10.0.0.1:8443"\n', ConfigError, "plain text"),
        ('[site]\nname = "north"\n', IdentityError, "atoll site join"),
        ("", ConfigError, "site is missing"),
    ],
)
def test_an_agent_that_cannot_connect_says_what_to_do(
    tmp_path: Path, text: str, kind: type[AtollError], words: str
) -> None:
    (tmp_path / "site.toml").write_text(text)
    with pytest.raises(kind, match=words):
        run_agent(tmp_path)


def test_a_folder_that_is_no_home_is_said_to_be_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        run_agent(tmp_path / "nowhere")


def test_plain_text_on_loopback_needs_no_identity(tmp_path: Path) -> None:
    home = SiteHome(root=tmp_path)
    home.settings.write_text('[site]\nname = "north"\nplaintext = true\nserver = "127.0.0.1:8443"\n')
    link = find_link(load_settings(home.settings), home)
    assert (link.site, link.address, link.identity) == ("north", "127.0.0.1:8443", None)
