"""A member behind a proxy: the channel goes through CONNECT, and TLS stays end to end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from samples.loopback import Federation, call

from atoll.transport.credentials import open_channel
from atoll.transport.enrolment import SITE_ROLES, encode_token, enrol, renew

NAMES = ("grpc_proxy", "https_proxy", "http_proxy", "no_grpc_proxy", "no_proxy", "HTTPS_PROXY", "NO_PROXY")


class Proxy:
    """An HTTP proxy that knows one method, CONNECT, and one host, this machine."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        head = await reader.readuntil(b"\r\n\r\n")
        method, target, _ = head.split(b" ", 2)
        assert method == b"CONNECT"
        self.asked.append(target.decode())
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", int(target.rpartition(b":")[2]))
        writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        await asyncio.gather(self._pump(reader, up_writer), self._pump(up_reader, writer))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.close()


@pytest.fixture
async def proxy(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Proxy]:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    made = Proxy()
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    yield made
    server.close()


@pytest.mark.parametrize("name", ["https_proxy", "HTTPS_PROXY", "grpc_proxy"])
async def test_through_the_proxy(
    federation: Federation, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The server's name means nothing on this machine: only the proxy can have found it."""
    monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
    identity = replace(await federation.join("alpha"), address=f"isles.invalid:{federation.port}")
    async with open_channel(identity) as channel:
        assert await call(channel, "/atoll.wire.Admin/Sites") == b"site alpha"
    assert proxy.asked == [f"isles.invalid:{federation.port}"]


async def test_joining_and_renewing_go_through_it_too(
    federation: Federation, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{proxy.port}")
    token = federation.ticket("alpha", "site")
    token.address = f"isles.invalid:{federation.port}"
    token.enrolment_address = f"isles.invalid:{federation.enrolment_port}"
    joined = await asyncio.to_thread(enrol, encode_token(token), tmp_path / "alpha", roles=SITE_ROLES)
    renewed = await asyncio.to_thread(renew, joined)
    assert renewed.certificate_pem != joined.certificate_pem
    assert proxy.asked == [token.enrolment_address, token.address]


async def test_loopback_needs_no_proxy(federation: Federation, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{proxy.port}")
    async with open_channel(await federation.join("alpha")) as channel:
        assert await call(channel, "/atoll.wire.Admin/Sites") == b"site alpha"
    assert proxy.asked == []
