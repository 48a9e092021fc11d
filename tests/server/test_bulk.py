"""The bulk port before real certificates: who is let in, what strangers can cost, and how transfers end."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import ssl
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio
from samples.loopback import NAME, Clock, Federation, certified

from atoll.server import bulk
from atoll.server.bulk import BulkPort, by_certificate
from atoll.server.security import verifier
from atoll.server.settings import LimitsSection
from atoll.server.steps import unobserved
from atoll.server.transfers import Transfers
from atoll.transport.bulk import GREETING, REQUEST_BYTES, Kind, Request, client_context
from atoll.transport.bulk_carrier import BulkCarrier
from atoll.transport.credentials import SERVER_NAME
from atoll.transport.grpc_carrier import GrpcCarrier
from atoll.transport.identity import Identity
from atoll.transport.transfer import upload
from atoll.wire import control_pb2 as pb
from atoll.wire.errors import NotAllowed, RemoteError, Stale, Stranger, Unavailable
from atoll.wire.frames import encode_frame

UPDATE = os.urandom(3 << 20)


class Place:
    """A bulk port before the transfers of a federation, and what became of its updates."""

    def __init__(self, federation: Federation, folder: Path) -> None:
        self.federation, self.folder = federation, folder
        self.grants: dict[str, pb.Grant] = {}
        self.withdrawn: list[str] = []
        self.done: list[str] = []
        self.transfers = Transfers(
            limits=LimitsSection(max_uploads=4), staging=folder / "staging", send=self._send, on_step=unobserved
        )
        self.bulk = BulkPort(
            self.transfers,
            admit=by_certificate(verifier(federation.store, NAME, federation.clock)),
            certificate=federation.authority.server_certificate,
            threads=4,
        )
        self.port = self.bulk.bind(("127.0.0.1", 0))
        self.bulk.start()
        self.update = folder / "update"
        self.update.write_bytes(UPDATE)

    async def grant(self, site: str) -> pb.Grant:
        """For the upload of UPDATE, as the server's messages bring it."""

        async def whole(received: memoryview) -> None:
            assert bytes(received) == UPDATE
            self.done.append(site)

        self.grants.pop(site, None)
        key = pb.TaskKey(run="run", task=f"r1.{site}", attempt=1)
        self.transfers.ask_up(
            site, key, pb.Payload(name="update", num_bytes=len(UPDATE), crc32=zlib.crc32(UPDATE)), whole
        )
        await until(lambda: site in self.grants)
        return self.grants[site]

    def carrier(self, identity: Identity, instead: Any = None, tell: Callable[[str], Any] = str) -> BulkCarrier:
        nowhere = GrpcCarrier(grpc.aio.insecure_channel("127.0.0.1:1"))
        address = ("127.0.0.1", self.port)
        return BulkCarrier(address, name="", identity=identity, instead=instead or nowhere, tell=tell)

    async def call(self, identity: Identity) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection of which every byte is the test's."""
        context = client_context(identity)
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, ssl=context, server_hostname=SERVER_NAME)
        assert await reader.readexactly(len(GREETING)) == GREETING
        return reader, writer

    def _send(self, site: str, **body: Any) -> None:
        if "grant" in body:
            self.grants[site] = body["grant"]
        else:
            self.withdrawn.append(site)


async def until(what: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not what():
            await asyncio.sleep(0.005)


@pytest_asyncio.fixture
async def place(federation: Federation, tmp_path: Path) -> AsyncIterator[Place]:
    made = Place(federation, tmp_path)
    yield made
    await made.transfers.under_way.end_calls()
    await made.bulk.stop()
    made.transfers.close()


async def is_over(reader: asyncio.StreamReader) -> bool:
    """Whether the server ends a connection, within what a test waits."""
    async with asyncio.timeout(10):
        with suppress(ConnectionError, ssl.SSLError):
            while await reader.read(1 << 16):
                pass
    return True


# --- transfers ------------------------------------------------------------------------------------------------------


async def test_updates_arrive_over_one_connection(place: Place, federation: Federation) -> None:
    carrier = place.carrier(await federation.join("alpha"))
    for number in range(3):
        status = await upload(carrier, await place.grant("alpha"), place.update)
        assert status.complete
        await until(lambda number=number: place.done == ["alpha"] * (number + 1))  # type: ignore[misc]
    assert len(place.bulk._connections) == 1
    assert place.transfers.transferred("run") == (3 * len(UPDATE), 0)
    carrier.close()


async def test_a_kept_connection_that_the_server_has_ended_is_replaced(place: Place, federation: Federation) -> None:
    carrier = place.carrier(await federation.join("alpha"))
    assert (await upload(carrier, await place.grant("alpha"), place.update)).complete
    for connection in place.bulk._connections:
        connection.cancel()
    await until(lambda: not place.bulk._connections)
    assert (await upload(carrier, await place.grant("alpha"), place.update)).complete
    carrier.close()


async def test_a_withdrawn_upload_ends_and_goes_on_where_it_was(place: Place, federation: Federation) -> None:
    alpha = await federation.join("alpha")
    carrier, last = place.carrier(alpha), asyncio.Event()
    before_last = asyncio.Event()

    async def wait() -> None:
        before_last.set()
        await last.wait()

    sending = asyncio.create_task(upload(carrier, await place.grant("alpha"), place.update, before_last=wait))
    await before_last.wait()
    (coming,) = place.transfers._uploads.values()
    await until(lambda: coming.slot is not None and coming.slot.received_bytes == 2 << 20)
    grant = await place.grant("alpha")  # asked anew: the running call ends first, so the offset is the true one
    assert grant.offset == 2 << 20
    last.set()
    with pytest.raises(Unavailable):
        await sending
    assert (await upload(carrier, grant, place.update)).complete
    await until(lambda: place.done == ["alpha"])
    carrier.close()


async def test_a_sender_that_is_cancelled_leaves_nothing_running(place: Place, federation: Federation) -> None:
    carrier = place.carrier(await federation.join("alpha"))
    sending = asyncio.create_task(
        upload(carrier, await place.grant("alpha"), place.update, before_last=asyncio.Event().wait)  # type: ignore[arg-type]
    )
    await until(lambda: place.transfers.under_way.is_busy("alpha"))
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    await until(lambda: not place.bulk._connections)
    assert not place.transfers.under_way.is_busy()


async def test_an_upload_that_is_refused_midway_tells_its_sender_why(place: Place, federation: Federation) -> None:
    carrier, path = place.carrier(await federation.join("alpha")), place.folder / "other"
    path.write_bytes(bytes(len(UPDATE)))
    with pytest.raises(RemoteError, match="announced was"):
        await upload(carrier, await place.grant("alpha"), path)
    assert place.done == []


# --- who is let in --------------------------------------------------------------------------------------------------


async def test_a_revoked_site_is_refused_at_its_next_transfer(place: Place, federation: Federation) -> None:
    carrier = place.carrier(await federation.join("alpha"))
    assert (await upload(carrier, await place.grant("alpha"), place.update)).complete
    federation.store.revoke("alpha")
    with pytest.raises(Stranger, match="was revoked"):
        await upload(carrier, await place.grant("alpha"), place.update)


async def test_a_grant_is_for_its_site_alone(place: Place, federation: Federation) -> None:
    await federation.join("alpha")
    thief = place.carrier(await federation.join("beta"))
    grant = await place.grant("alpha")
    with pytest.raises(NotAllowed, match="for another transfer"):
        await upload(thief, grant, place.update)
    grant.grant = "x" * 24
    with pytest.raises(Stale):
        await upload(thief, grant, place.update)
    assert place.done == []


async def test_a_grant_is_for_one_call_at_a_time(place: Place, federation: Federation) -> None:
    alpha, held, last = await federation.join("alpha"), asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        held.set()
        await last.wait()

    grant = await place.grant("alpha")
    first, second = place.carrier(alpha), place.carrier(alpha)
    sending = asyncio.create_task(upload(first, grant, place.update, before_last=wait))
    await held.wait()
    with pytest.raises(Stale, match="in use on another line"):
        await upload(second, grant, place.update)
    last.set()
    assert (await sending).complete


async def test_people_are_refused(place: Place, federation: Federation) -> None:
    reader, writer = await place.call(await federation.join("olga", "operator"))
    writer.write(Request(kind=Kind.UP, grant="x" * 24, offset=0).encode())
    assert b"are for sites, not for operator olga" in await reader.read()


async def test_certificates_that_do_not_count(
    place: Place, federation: Federation, other_federation: Federation, ca_clock: Clock
) -> None:
    """Of another CA, none at all, of an expired date; and whoever does not speak TLS 1.3."""
    alpha = await federation.join("alpha")
    theirs = replace(await other_federation.join("alpha"), ca_pem=federation.authority.ca_pem)
    ca_clock.now -= timedelta(days=60)
    late = certified(federation, alpha, name="alpha")
    contexts = [client_context(theirs), client_context(late), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)]
    contexts[2].load_verify_locations(cadata=federation.authority.ca_pem.decode())
    old = client_context(alpha)
    old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_2
    for context in (*contexts, old):
        with pytest.raises((ConnectionError, ssl.SSLError, asyncio.IncompleteReadError)):
            await _first_byte(place.port, context)


async def _first_byte(port: int, context: ssl.SSLContext) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=SERVER_NAME)
    try:
        return await reader.readexactly(1)
    finally:
        writer.close()


async def test_a_line_is_opened_to_the_federations_server_alone(place: Place, other_federation: Federation) -> None:
    theirs, heard = await other_federation.join("alpha"), list[str]()
    assert await place.carrier(theirs, tell=heard.append)._dial() is None
    assert "not one of this federation" in heard[0]


# --- what strangers can cost ----------------------------------------------------------------------------------------


async def test_junk_ends_its_connection_and_nothing_else(place: Place, federation: Federation) -> None:
    alpha = await federation.join("alpha")
    plain, writer = await asyncio.open_connection("127.0.0.1", place.port)
    writer.write(b"GET / HTTP/1.1\r\n\r\n")
    assert await is_over(plain)
    reader, writer = await place.call(alpha)
    writer.write(os.urandom(REQUEST_BYTES + 1000))
    assert await is_over(reader)
    reader, writer = await place.call(alpha)
    grant = await place.grant("alpha")
    writer.write(Request(kind=Kind.UP, grant=grant.grant, offset=0).encode() + os.urandom(64))  # no frame
    assert b"frame" in await reader.read()
    status = await upload(place.carrier(alpha), await place.grant("alpha"), place.update)
    assert status.complete


async def test_strangers_that_say_nothing_lose_their_few_places(
    place: Place, federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "MOST_STRANGERS", 3)
    monkeypatch.setattr(bulk, "STRANGE_S", 2.0)
    alpha = await federation.join("alpha")
    silent = [await asyncio.open_connection("127.0.0.1", place.port) for _ in range(2)]
    silent.append(await place.call(alpha))  # a certificate alone is no place for long either
    crowded = await asyncio.open_connection("127.0.0.1", place.port)
    ends = {asyncio.create_task(is_over(ends[0])): ends for ends in (crowded, *silent)}
    first, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    assert [ends[end] for end in first] == [crowded]  # at once, while the others have their time
    assert all(await asyncio.gather(*ends))
    assert (await upload(place.carrier(alpha), await place.grant("alpha"), place.update)).complete


async def test_a_request_byte_by_byte_ends_in_time(
    place: Place, federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "STRANGE_S", 0.5)
    reader, writer = await place.call(await federation.join("alpha"))

    async def drip() -> None:
        for byte in Request(kind=Kind.UP, grant="x" * 24, offset=0).encode():
            writer.write(bytes([byte]))
            await asyncio.sleep(0.05)

    dripping = asyncio.create_task(drip())
    async with asyncio.timeout(3):
        assert await is_over(reader)
    dripping.cancel()


async def test_a_site_that_stalls_midway_loses_its_grant_and_its_thread(place: Place, federation: Federation) -> None:
    reader, writer = await place.call(await federation.join("alpha"))
    grant = await place.grant("alpha")
    writer.write(
        Request(kind=Kind.UP, grant=grant.grant, offset=0).encode() + encode_frame(0, memoryview(UPDATE)[:100])[:50]
    )
    await until(lambda: place.transfers.under_way.is_busy("alpha"))
    place.transfers.withdraw("alpha", None, Stale("moved too little", site="alpha"))  # as the server's clock does
    assert place.withdrawn == ["alpha"]
    assert await is_over(reader)
    await until(lambda: not place.transfers.under_way.is_busy("alpha"))


async def test_the_oldest_idle_line_of_a_site_gives_way(place: Place, federation: Federation) -> None:
    alpha = await federation.join("alpha")
    carriers = [place.carrier(alpha) for _ in range(bulk.MOST_PER_MEMBER + 2)]
    for carrier in carriers:
        assert (await upload(carrier, await place.grant("alpha"), place.update)).complete
    await until(lambda: len(place.bulk._connections) == bulk.MOST_PER_MEMBER)
    assert (await upload(carriers[0], await place.grant("alpha"), place.update)).complete  # by a new one


# --- no way through -------------------------------------------------------------------------------------------------


class Instead:
    """Stands for gRPC."""

    def __init__(self) -> None:
        self.sent = 0

    async def send(self, grant: pb.Grant, pieces: Any, before_last: Any) -> str:
        self.sent += 1
        return "by gRPC"


async def test_a_port_that_cannot_be_reached_is_said_once_and_grpc_carries_on(
    place: Place, federation: Federation, caplog: pytest.LogCaptureFixture
) -> None:
    heard, instead = list[str](), Instead()
    carrier = place.carrier(await federation.join("alpha"), instead, heard.append)
    await place.bulk.stop()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            grant = pb.Grant(grant="x" * 24, num_bytes=len(UPDATE))
            assert await upload(carrier, grant, place.update) == "by gRPC"
    (line,) = [record.getMessage() for record in caplog.records if "bulk port" in record.getMessage()]
    assert f"let this machine connect to TCP port {place.port} of 127.0.0.1" in line
    (told,) = heard  # a connection that was waiting when the port closed is reset
    assert re.fullmatch(
        f"gRPC: TCP port {place.port} of 127.0.0.1 cannot be reached: Connection (refused|reset).*", told
    )
    assert instead.sent == 2
