"""A full disk at a site: it says so, in its log and its status, and goes on to the same bytes when there is room."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from chaos.conftest import JOB, require_undisturbed
from integration.federation import Federation


@pytest.mark.parametrize("folder", ["outbox", pytest.param("models", marks=pytest.mark.chaos)])
def test_a_full_disk_at_a_site_is_waited_out(federation: Federation, undisturbed: str, folder: str) -> None:
    """The folder lies on a file system of 1 MiB that is full when the run begins."""
    place = federation.home("site-3") / folder
    status = federation.home("site-3") / "state" / "status.json"
    federation.sites["site-3"].stop()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place], check=True)
    try:
        federation.start_site("site-3")
        federation.wait_for(lambda: '"attached"' in status.read_text(), "site-3 is there")
        fill(place / "filler")
        run = federation.submit(JOB)
        federation.wait_for(lambda: '"held up"' in status.read_text(), "the site says that it waits")
        assert "waits for disk space" in status.read_text()
        assert "waits for disk space" in federation.sites["site-3"].text()
        (place / "filler").unlink()
        require_undisturbed(federation, run, undisturbed)
    finally:
        federation.sites["site-3"].stop()
        subprocess.run(["umount", place], check=True)
        federation.start_site("site-3")


def fill(path: Path) -> None:
    """Write until the file system is full."""
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"\0" * 4096)
        except OSError:
            return
