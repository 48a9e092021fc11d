"""A person's connection: half of the certificate's life is over, and each command renews it on its way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest
from samples.loopback import Clock, Federation, call

from atoll.client.connection import connect
from atoll.client.people import load_person
from atoll.transport.identity import load_identity, utc_now

RUNS = "/atoll.wire.Runs/List"
PAST_HALF = timedelta(days=16)  # of thirty


@pytest.fixture
def ca_clock() -> Clock:
    """The CA's: what it gives now is as old as a test wants, and TLS itself finds it valid."""
    return Clock()


@pytest.fixture
async def federation(tmp_path: Path, ca_clock: Clock) -> AsyncIterator[Federation]:
    made = Federation(tmp_path / "isles", Clock(), ca_clock)
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
async def home(federation: Federation, ca_clock: Clock) -> Path:
    """Ada's, with a certificate that she has had for sixteen days."""
    ca_clock.now -= PAST_HALF
    ada = await federation.join("ada", "researcher")
    ca_clock.now += PAST_HALF
    return ada.folder


async def list_runs(home: Path) -> bytes:
    """What a command does."""
    async with connect(await asyncio.to_thread(load_person, home)) as channel:
        return await call(channel, RUNS)


async def test_a_command_past_half_of_the_life_renews_the_certificate(home: Path) -> None:
    old = load_identity(home)
    assert await list_runs(home) == b"researcher ada"
    new = load_identity(home)
    assert new.certificate_pem != old.certificate_pem
    assert new.expires_at > old.expires_at + timedelta(days=15)
    assert await list_runs(home) == b"researcher ada"
    assert load_identity(home).certificate_pem == new.certificate_pem  # not due again


async def test_a_renewal_that_fails_does_not_keep_a_command_from_its_work(
    home: Path, ca_clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    old = load_identity(home)
    ca_clock.now = utc_now() - timedelta(days=60)  # the server gives certificates that are over
    assert await list_runs(home) == b"researcher ada"
    assert load_identity(home).certificate_pem == old.certificate_pem
    assert "the certificate of ada could not be renewed" in caplog.text
