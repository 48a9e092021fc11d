"""What TLS refuses, and what the person reads."""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from samples.loopback import Clock, Federation, call, certified

from atoll.transport.credentials import explain_connection_error, open_channel
from atoll.transport.identity import Identity
from atoll.wire.errors import METADATA_KEY, IdentityError, Stranger, Unavailable


async def explained(identity: Identity, **options: Any) -> Exception:
    async with open_channel(identity) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel, "/atoll.wire.Admin/Sites")
    assert METADATA_KEY not in dict(caught.value.trailing_metadata() or ())
    return explain_connection_error(caught.value, identity, **options)


async def test_expired(federation: Federation, ca_clock: Clock) -> None:
    alpha = await federation.join("alpha")
    ca_clock.now -= timedelta(days=60)
    late = certified(federation, alpha, name="alpha")
    error = await explained(late)
    assert type(error) is IdentityError
    assert "certificate of site alpha expired at" in str(error)
    assert "atoll site join TOKEN" in str(error)


async def test_member_of_another_federation(federation: Federation, other_federation: Federation) -> None:
    """Both ways: the member knows a wrong server, and the server does not know a wrong member."""
    theirs = replace(await other_federation.join("alpha"), address=f"127.0.0.1:{federation.port}")
    error = await explained(theirs)
    assert type(error) is Stranger
    assert "not the one of the federation that site alpha joined" in str(error)

    gullible = replace(theirs, ca_pem=federation.authority.ca_pem)
    error = await explained(gullible)
    assert type(error) is Unavailable
    assert "does not accept this certificate" in str(error)
    assert "atoll site join TOKEN" in str(error)


async def test_a_member_cannot_play_the_server(federation: Federation) -> None:
    alpha, beta = await federation.join("alpha"), await federation.join("beta")
    pair = (beta.private_key_pem, beta.certificate_pem)
    credentials = grpc.ssl_server_credentials([pair], beta.ca_pem, require_client_auth=True)
    server = grpc.aio.server()
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    error = await explained(replace(alpha, address=f"127.0.0.1:{port}"))
    await server.stop(0)
    assert type(error) is Stranger


async def test_a_connection_that_breaks_off(federation: Federation) -> None:
    identity = await federation.join("alpha")
    error = grpc.aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), details="Socket closed"
    )
    explained = explain_connection_error(error, identity)
    assert type(explained) is Unavailable
    assert "trying again is right" in str(explained)


async def test_nobody_listens(federation: Federation) -> None:
    error = await explained(replace(await federation.join("alpha"), address="127.0.0.1:1"))
    assert type(error) is Unavailable
    assert "nobody listens at 127.0.0.1:1" in str(error)


async def test_a_renewed_server_certificate_is_shown_without_a_restart(
    tmp_path: Path, clock: Clock, ca_clock: Clock
) -> None:
    ca_clock.now -= timedelta(days=20)
    aged = Federation(tmp_path / "aged", clock, ca_clock)
    await aged.start()
    address = ("127.0.0.1", aged.enrolment_port)
    before = await asyncio.to_thread(ssl.get_server_certificate, address)
    ca_clock.now += timedelta(days=20)
    after = await asyncio.to_thread(ssl.get_server_certificate, address)
    await aged.stop()
    assert before != after
    assert after.encode() == aged.authority.server_certificate().certificate_pem
