"""A person's connection to the server: mutual TLS with their own certificate, and refusals as our own errors."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio

from atoll.client.people import Person
from atoll.transport.credentials import explain_connection_error, open_channel, open_plaintext_channel
from atoll.transport.enrolment import renew, renewal_due
from atoll.transport.identity import Identity, utc_now
from atoll.wire.errors import AtollError

_log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 30.0  # a control call is a database look-up; half a minute also covers a slow proxy


@asynccontextmanager
async def connect(person: Person) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to the person's server, closed at the end of the block.

    Raises:
        ConfigError: plain text was asked for, and the server is on another machine.
        RemoteError: from the block: what the server refused with, or Unavailable with what to check.
    """
    identity = await _renewed(person)
    if person.settings.plaintext:
        channel = open_plaintext_channel(identity.address, name=identity.name, role=identity.role)
    else:
        channel = open_channel(identity)
    try:
        yield channel
    except grpc.aio.AioRpcError as error:
        raise explain_connection_error(error, identity) from error
    finally:
        await channel.close(grace=None)


async def _renewed(person: Person) -> Identity:
    """The person's identity, with a new certificate where half of the old one's life is over."""
    identity = person.identity
    if person.settings.plaintext or not renewal_due(identity, utc_now()):
        return identity
    try:
        return await asyncio.to_thread(renew, identity)
    except AtollError as error:  # the old one is still good: what matters now is the command
        _log.warning("the certificate of %s could not be renewed: %s", identity.name, error)
        return identity
