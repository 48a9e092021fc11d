"""Federations on loopback for the tests of security."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from samples.loopback import Clock, Federation


@pytest.fixture
def clock() -> Clock:
    """The gate's and the store's."""
    return Clock()


@pytest.fixture
def ca_clock() -> Clock:
    """The CA's. TLS itself reads the machine's clock, so a CA that is ahead makes certificates that nobody takes."""
    return Clock()


@pytest.fixture
async def federation(tmp_path: Path, clock: Clock, ca_clock: Clock) -> AsyncIterator[Federation]:
    made = Federation(tmp_path / "isles", clock, ca_clock)
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
async def other_federation(tmp_path: Path, clock: Clock, ca_clock: Clock) -> AsyncIterator[Federation]:
    """Of the same name, set up by somebody else."""
    made = Federation(tmp_path / "others", clock, ca_clock)
    await made.start()
    yield made
    await made.stop()
