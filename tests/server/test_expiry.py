"""What the server's log says of certificates that run out."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from atoll.server.expiry import certificate_notices, watch_certificates
from atoll.server.records import MemberRow, MemberState

NOW = datetime(2026, 3, 1, tzinfo=UTC)


def member(name: str, days: float | None, *, role: str = "site", state: MemberState = "enrolled") -> MemberRow:
    return MemberRow(
        name=name,
        role=role,
        organisation="St Mary",
        state=state,
        signing_key=None,
        token_expires=NOW,
        certificate_expires=None if days is None else NOW + timedelta(days=days),
    )


def test_who_is_named() -> None:
    members = [
        member("new", 29),
        member("soon", 4),
        member("late", 0),
        member("ada", -1, role="researcher"),
        member("gone", -1, state="revoked"),
        member("invited", None, state="invited"),
    ]
    soon, late, ada = certificate_notices(members, NOW)
    assert "site soon expires at 2026-03-05" in soon
    assert "site late expired at 2026-03-01 00:00 UTC, so it cannot connect" in late
    assert "atoll site add late" in late
    assert "atoll user add ada" in ada


async def test_each_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    class Members:
        asked = 0

        def members(self) -> list[MemberRow]:
            self.asked += 1
            return [member("late", -1)]

    recorded = Members()
    watching = asyncio.create_task(watch_certificates(recorded, clock=lambda: NOW, every_s=0))
    while recorded.asked < 3:
        await asyncio.sleep(0)
    watching.cancel()
    assert caplog.text.count("site late expired") == 1
