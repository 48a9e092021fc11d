"""Federations for the tests: a fresh one, or one that many tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from integration.federation import Federation
from integration.trial import REPRODUCIBLE


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Federation]:
    """Made, and nothing of it running."""
    federation = Federation(tmp_path)
    try:
        federation.make()
        yield federation
    finally:
        federation.close()


@pytest.fixture(scope="session")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """A running server with three running sites, for tests that leave it as it was. Rounding is reproducible."""
    federation = Federation(tmp_path_factory.mktemp("trio"))
    try:
        federation.make()
        federation.start_all("site-1", "site-2", "site-3", settings=REPRODUCIBLE)
        yield federation
    finally:
        federation.close()
