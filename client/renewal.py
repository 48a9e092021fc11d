"""A certificate is renewed in the middle of its life, so that half of it is left to find out why renewing fails."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import datetime

from atoll.transport.enrolment import renew, renewal_due
from atoll.transport.identity import Identity
from atoll.wire.errors import AtollError

_log = logging.getLogger(__name__)

LOOK_EVERY_S = 3600.0  # of a life of weeks


async def keep_certificate(
    identity: Identity,
    renewed: Callable[[Identity], None],
    *,
    now: Callable[[], datetime],
    every_s: float = LOOK_EVERY_S,
) -> None:
    """Renew the certificate when that is due and hand each new identity to `renewed`, until cancelled."""
    while True:
        if renewal_due(identity, now()):
            try:
                identity = await asyncio.to_thread(renew, identity)
            except AtollError as error:
                left = identity.expires_at - now()
                _log.error("the certificate was not renewed, %d days are left: %s", left.days, error)
            else:
                _log.info("the certificate is renewed, good until %s", f"{identity.expires_at:%Y-%m-%d %H:%M} UTC")
                renewed(identity)
        await asyncio.sleep(every_s)
