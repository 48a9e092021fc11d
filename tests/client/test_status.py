"""What `atoll site status` tells where no agent runs: all that can be read on the machine itself."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from atoll.cli.site_status import lines
from atoll.client.home import SiteHome
from atoll.client.status import site_status


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text("print('training')\n")
    (tmp_path / "site.toml").write_text(
        '[site]\nname = "ward"\nserver = "127.0.0.1:1"\n'
        '[apps.digits]\ndistribution = "no-such-distribution"\nentry_point = "digits"\n'
        f'[scripts.segment]\npath = "{tmp_path / "train.py"}"\n'
        f'[scripts.away]\npath = "{tmp_path / "gone.py"}"\n'
        '[data.digits]\npath = "/data/digits.npz"\n[data.scans]\npath = "/data/scans"\n'
    )
    SiteHome(root=tmp_path).make()
    return tmp_path


def test_apps_scripts_and_data_are_shown(home: Path) -> None:
    digest = hashlib.sha256((home / "train.py").read_bytes()).hexdigest()
    status = site_status(home)
    assert status["scripts"] == [
        {"name": "away", "path": str(home / "gone.py"), "hash": "", "error": status["scripts"][0]["error"]},
        {"name": "segment", "path": str(home / "train.py"), "hash": digest, "error": ""},
    ]
    assert [app["name"] for app in status["apps"]] == ["digits"]
    assert status["data"] == ["digits", "scans"]
    shown = list(lines(status))
    assert f"script       segment at {home / 'train.py'}, hash {digest}" in shown
    assert "data         digits, scans" in shown


def test_a_script_or_an_app_that_is_not_there_says_what_to_do(home: Path) -> None:
    shown = "\n".join(lines(site_status(home)))
    assert "gone.py cannot be read: No such file or directory; correct its path under [scripts] of site.toml" in shown
    assert "distribution 'no-such-distribution' is not installed here: pip install it" in shown
