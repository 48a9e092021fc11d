"""A drained server and a researcher's version 0 that is under way. Of sites' updates: tests/chaos/test_drain.py."""

from __future__ import annotations

import asyncio
import time
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from zlib import crc32

import grpc.aio
import pytest
from samples.whole_server import ask, make, server_in

from atoll.server.main import Server
from atoll.transport.credentials import open_channel
from atoll.transport.enrolment import enrol
from atoll.transport.grpc_carrier import GRANT_METADATA_KEY, UPLOAD_METHOD
from atoll.transport.identity import Identity, load_identity
from atoll.wire import admin_pb2, runs_pb2, runs_pb2_grpc
from atoll.wire.errors import Unavailable, from_rpc
from atoll.wire.frames import encode_frame
from atoll.wire.job import parse_job
from atoll.wire.manifest import Manifest
from atoll.wire.transfer_pb2 import TransferStatus

ONE = Manifest.build([("w", "float32", (40,), "parameter")])
MODEL = bytes(range(ONE.num_bytes))
HALF = ONE.num_bytes // 2
JOB = """
[job]
name = "drained"
app = "any"
rounds = 1

[strategy]
kind = "fedavg"
"""


class Upload:
    """A researcher's submission whose version 0 has come half way; the other half follows when it is let go."""

    def __init__(self, ada: Identity) -> None:
        self._ada = ada
        self._half = asyncio.Event()
        self.rest = asyncio.Event()
        self.run = ""

    async def send(self) -> TransferStatus:
        """What the server says at the end. Raises its refusal."""
        async with open_channel(self._ada) as channel:
            request = runs_pb2.SubmitRequest(
                job=parse_job(tomllib.loads(JOB)).canonical(),
                manifest=ONE.encode(),
                app_hash="0" * 64,
                crc32=crc32(MODEL),
                request="one",
            )
            reply = await runs_pb2_grpc.RunsStub(channel).Submit(request, timeout=20)
            self.run = reply.run
            method: Any = channel.stream_unary(UPLOAD_METHOD, response_deserializer=TransferStatus.FromString)
            try:
                status: TransferStatus = await method(
                    self._frames(), metadata=[(GRANT_METADATA_KEY, reply.upload.grant)]
                )
            except grpc.aio.AioRpcError as error:
                raise from_rpc(error) from None
            return status

    async def until_half(self, server: Server) -> None:
        async with asyncio.timeout(20):
            while not self.run or server.coordinator.runs.sink(self.run).slot.received_bytes < HALF:
                await asyncio.sleep(0.005)

    async def _frames(self) -> AsyncIterator[bytes]:
        yield encode_frame(0, memoryview(MODEL)[:HALF])
        await self.rest.wait()
        yield encode_frame(HALF, memoryview(MODEL)[HALF:])


async def enrol_ada(folder: Path) -> Identity:
    request = admin_pb2.AddRequest(name="ada", role="researcher")
    token = (await ask(load_identity(folder / "operator"), "Add", request)).token
    return await asyncio.to_thread(enrol, token, folder.parent / "ada", roles=frozenset({"researcher"}))


async def test_a_model_that_has_time_arrives_before_the_server_ends(tmp_path: Path) -> None:
    folder = make(tmp_path)
    async with server_in(folder) as server:
        upload = Upload(await enrol_ada(folder))
        sending = asyncio.create_task(upload.send())
        await upload.until_half(server)
        draining = asyncio.create_task(server.drain())
        await asyncio.sleep(0.1)
        assert not draining.done()
        upload.rest.set()
        assert (await sending).complete
        await draining
    async with server_in(folder) as server:
        driver = server.coordinator.runs.get(upload.run)
        assert driver is not None  # queued, with its model
        assert MODEL in driver.models.path(0).read_bytes()


async def test_a_model_that_stalls_is_refused_as_unavailable_and_can_be_sent_again(tmp_path: Path) -> None:
    folder = make(tmp_path)
    drain_s = 2.0
    (folder / "server.toml").write_text((folder / "server.toml").read_text() + f"\n[limits]\ndrain_s = {drain_s}\n")
    async with server_in(folder) as server:
        ada = await enrol_ada(folder)
        upload = Upload(ada)
        sending = asyncio.create_task(upload.send())
        await upload.until_half(server)
        began_s = time.monotonic()
        await server.drain()
        assert time.monotonic() - began_s < drain_s + 1.0
        with pytest.raises(Unavailable, match="the server goes down; send it again when the server is back"):
            await sending
    async with server_in(folder):
        again = Upload(ada)
        again.rest.set()
        assert (await again.send()).complete
        assert again.run == upload.run
