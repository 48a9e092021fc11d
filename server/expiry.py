"""What the operator should know about certificates that run out.

TLS refuses an expired certificate before a byte of ours is read, so the server never sees who called; only its own
records can say it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Protocol

from atoll.server.records import MemberRow
from atoll.transport.identity import Clock, utc_now

SOON = timedelta(days=5)  # agents renew at half-life, two weeks before the end: by now something is wrong
LOOK_EVERY_S = 3600.0

_log = logging.getLogger(__name__)


class Members(Protocol):
    """Where members are recorded. `Store` is one."""

    def members(self) -> list[MemberRow]:
        """Everyone who was ever invited."""
        ...


def certificate_notices(members: Iterable[MemberRow], now: datetime) -> list[str]:
    """One sentence for each member whose certificate has run out or soon will, with what to do about it."""
    notices = []
    for member in members:
        expires = member.certificate_expires
        if member.state != "enrolled" or expires is None or expires > now + SOON:
            continue
        who, when = f"{member.role} {member.name}", f"{expires:%Y-%m-%d %H:%M} UTC"
        command = "site" if member.role == "site" else "user"
        if expires > now:
            notices.append(f"the certificate of {who} expires at {when} and was not renewed: is its machine running?")
        else:
            notices.append(
                f"the certificate of {who} expired at {when}, so it cannot connect: `atoll site revoke {member.name}`, "
                f"then `atoll {command} add {member.name}` gives a token to join anew"
            )
    return notices


async def watch_certificates(members: Members, *, clock: Clock = utc_now, every_s: float = LOOK_EVERY_S) -> None:
    """Logs each notice once, until cancelled."""
    told: set[str] = set()
    while True:
        found = certificate_notices(await asyncio.to_thread(members.members), clock())
        for notice in found:
            if notice not in told:
                _log.warning("%s", notice)
        told = set(found)
        await asyncio.sleep(every_s)
