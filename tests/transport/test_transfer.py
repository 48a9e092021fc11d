"""Uploads and downloads between a real client and a real server on loopback, with everything that can go wrong."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.transport.grants import WINDOW_S, Ask, GrantTable, Subject
from atoll.transport.staging import StagingPool, StagingSlot
from atoll.transport.transfer import (
    GRANT_METADATA_KEY,
    UPLOAD_METHOD,
    Checksums,
    Withdrawal,
    download,
    frames,
    part_of,
    partial_bytes,
    receive,
    transfer_handlers,
    upload,
)
from atoll.wire.control_pb2 import Grant
from atoll.wire.errors import (
    METADATA_KEY,
    AtollError,
    BadFrame,
    DiskFull,
    LocalError,
    RemoteError,
    Stale,
    TooLarge,
    Unavailable,
    from_rpc,
    to_detail,
)
from atoll.wire.frames import decode_frame, encode_frame
from atoll.wire.transfer_pb2 import DownloadRequest, TransferStatus

FRAME = 16 << 10
WHOLE = 10 * FRAME + 123
SITE = "site-3"


class Server:
    """A server with one slot and one file to give, and a clock that tests move."""

    def __init__(self, folder: Path, data: bytes) -> None:
        self.now_s = 0.0
        self.data = data
        self.source = folder / "source"
        self.source.write_bytes(b"a header" + data)
        self.grants = GrantTable(1, 1, lambda: self.now_s)
        self.slot: StagingSlot = StagingPool(folder / "staging", 1).acquire()
        self.slot.begin(len(data), zlib.crc32(data), f"update of {SITE}, round 12")
        self.withdrawals: dict[str, Withdrawal] = {}
        self.num_frames_in = self.num_bytes_in = self.num_bytes_out = 0
        self.progressed = asyncio.Event()  # set by each frame that is in
        self.num_uploads_open = 0
        self.upload_ended = asyncio.Condition()
        self.flip_bit_of_frame: int | None = None  # damage one frame on its way out

    def grant(self, *, up: bool, offset: int = 0) -> Grant:
        """A new grant for the whole object, whatever was granted before."""
        subject = Subject(direction="up" if up else "down", run="0" * 26, task="train-12" if up else "", version=7)
        ask = Ask(site=SITE, subject=subject, num_bytes=len(self.data), offset=offset, crc32=zlib.crc32(self.data))
        self.grants.ask(ask)
        (grant,) = self.grants.admit()
        return grant.to_message()

    async def resumed_upload(self) -> Grant:
        """A grant for what is lacking, once nobody writes to the slot any more."""
        async with self.upload_ended:
            await self.upload_ended.wait_for(lambda: self.num_uploads_open == 0)
        return self.grant(up=True, offset=self.slot.received_bytes)

    async def on_upload(self, request_iterator: AsyncIterator[bytes], context: Any) -> TransferStatus:
        grant_id = dict(context.invocation_metadata())[GRANT_METADATA_KEY]
        self.num_uploads_open += 1
        try:
            self.grants.find(grant_id, SITE, "up")
            async with Withdrawal() as withdrawal:
                self.withdrawals[grant_id] = withdrawal
                status = await receive(self._counted(request_iterator), self.slot, self._progress(grant_id))
            self.grants.finish(grant_id)
            return status
        except AtollError as error:
            await refuse(context, error)
            raise
        finally:
            self.num_uploads_open -= 1
            async with self.upload_ended:
                self.upload_ended.notify_all()

    async def on_download(self, request: DownloadRequest, context: Any) -> AsyncIterator[bytes]:
        try:
            self.grants.find(request.grant, SITE, "down")
            stream = frames(self.source, len(b"a header"), len(self.data), request.offset, frame_bytes=FRAME)
            async for frame in stream:
                self.num_bytes_out += len(frame) - 16
                number = self.num_bytes_out // FRAME
                yield flipped(frame) if number == self.flip_bit_of_frame else frame
        except AtollError as error:
            await refuse(context, error)

    async def _counted(self, request_iterator: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for frame in request_iterator:
            self.num_frames_in += 1
            self.num_bytes_in += len(frame) - 16
            yield frame

    def _progress(self, grant_id: str) -> Callable[[int], None]:
        def note(received_bytes: int) -> None:
            self.grants.progress(grant_id, received_bytes)
            self.progressed.set()

        return note


async def refuse(context: Any, error: AtollError) -> None:
    """Lets the error reach the peer in the form that travels."""
    if not isinstance(error, RemoteError):
        raise error
    await context.abort(error.status, error.message, ((METADATA_KEY, to_detail(error).SerializeToString()),))


def flipped(frame: bytes) -> bytes:
    return frame[:-1] + bytes([frame[-1] ^ 1])


class Loopback:
    """A started server, channels to it, and channels that break after so many bytes."""

    def __init__(self, server: Server, port: int) -> None:
        self.server, self.port = server, port

    @asynccontextmanager
    async def channel(self, port: int | None = None) -> AsyncIterator[grpc.aio.Channel]:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port or self.port}") as channel:
            yield channel

    @asynccontextmanager
    async def breaking_channel(
        self,
        *,
        after_bytes_up: int = 1 << 60,
        after_bytes_down: int = 1 << 60,
        once: Callable[[], object] = lambda: True,
    ) -> AsyncIterator[Any]:
        """A channel through a proxy that drops the connection when one direction has carried so many bytes.

        Args:
            once: holds them back until this is so too. An end that learns of the break first forgets what it has not
                read yet.
        """
        tasks: list[asyncio.Task[None]] = []

        async def carry(
            reader: asyncio.StreamReader, writer: asyncio.StreamWriter, budget: int, cut: Callable[[], None]
        ) -> None:
            while data := await reader.read(min(4096, budget)):
                writer.write(data)
                await writer.drain()
                budget -= len(data)
                if budget == 0:
                    break
            while not once():
                await asyncio.sleep(0.005)
            cut()

        async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if tasks:  # one connection, then none: what breaks stays broken
                writer.transport.abort()
                return
            to_reader, to_writer = await asyncio.open_connection("127.0.0.1", self.port)

            def cut() -> None:
                writer.transport.abort()
                to_writer.transport.abort()

            tasks.append(asyncio.create_task(carry(reader, to_writer, after_bytes_up, cut)))
            tasks.append(asyncio.create_task(carry(to_reader, writer, after_bytes_down, cut)))

        proxy = await asyncio.start_server(on_connection, "127.0.0.1", 0)
        try:
            async with self.channel(proxy.sockets[0].getsockname()[1]) as channel:
                yield channel
        finally:
            proxy.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def loopback(folder: Path, num_bytes: int = WHOLE) -> AsyncIterator[Loopback]:
    server = Server(folder, os.urandom(num_bytes))
    grpc_server = grpc.aio.server()
    grpc_server.add_generic_rpc_handlers((transfer_handlers(server.on_upload, server.on_download),))
    port = grpc_server.add_insecure_port("127.0.0.1:0")
    await grpc_server.start()
    try:
        yield Loopback(server, port)
    finally:
        await grpc_server.stop(None)


@pytest.fixture
def payload(tmp_path: Path) -> Callable[[bytes], Path]:
    def write(data: bytes) -> Path:
        path = tmp_path / "update.payload"
        path.write_bytes(data)
        return path

    return write


async def send(channel: grpc.aio.Channel, grant: Grant, raw_frames: Sequence[bytes]) -> TransferStatus:
    """What a client does that is not ours: any frames at all."""
    method: Any = channel.stream_unary(UPLOAD_METHOD, response_deserializer=TransferStatus.FromString)
    try:
        status: TransferStatus = await method(iter(raw_frames), metadata=[(GRANT_METADATA_KEY, grant.grant)])
    except grpc.aio.AioRpcError as error:
        raise from_rpc(error) from None
    return status


# --- up ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_bytes", [0, 1, FRAME, WHOLE])
async def test_an_upload_arrives_whole(tmp_path: Path, payload: Callable[[bytes], Path], num_bytes: int) -> None:
    async with loopback(tmp_path, num_bytes) as net, net.channel() as channel:
        path = payload(net.server.data)
        status = await upload(channel, net.server.grant(up=True), path, frame_bytes=FRAME)
        assert status == TransferStatus(received_bytes=num_bytes, complete=True)
        assert bytes(net.server.slot.view) == net.server.data
        assert net.server.num_frames_in == -(-num_bytes // FRAME)


@pytest.mark.parametrize("held_bytes", [1, FRAME - 1, FRAME, 5 * FRAME + 17, WHOLE - 1, WHOLE])
async def test_an_upload_resumes_at_any_offset(
    tmp_path: Path, payload: Callable[[bytes], Path], held_bytes: int
) -> None:
    async with loopback(tmp_path) as net, net.channel() as channel:
        data = net.server.data
        net.server.slot.write(encode_frame(0, memoryview(data)[:held_bytes]))
        status = await upload(channel, await net.server.resumed_upload(), payload(data), frame_bytes=FRAME)
        assert status.complete
        assert bytes(net.server.slot.view) == data
        assert net.server.num_bytes_in == WHOLE - held_bytes


async def test_an_upload_cut_midway_counts_what_came_and_goes_on_from_there(
    tmp_path: Path, payload: Callable[[bytes], Path]
) -> None:
    async with loopback(tmp_path) as net:
        server, path = net.server, payload(net.server.data)
        breaking = net.breaking_channel(after_bytes_up=WHOLE // 2, once=lambda: server.slot.received_bytes)
        async with breaking as channel:
            with pytest.raises(Unavailable):
                await upload(channel, server.grant(up=True), path, frame_bytes=FRAME)
        grant = await server.resumed_upload()
        assert 0 < grant.offset < WHOLE // 2
        assert grant.offset % FRAME == 0
        async with net.channel() as channel:
            status = await upload(channel, grant, path, frame_bytes=FRAME)
        assert status.complete
        assert bytes(server.slot.view) == server.data
        assert server.num_bytes_in <= WHOLE + FRAME


async def test_a_stream_that_ends_early_says_what_the_server_holds(tmp_path: Path) -> None:
    async with loopback(tmp_path) as net, net.channel() as channel:
        whole = memoryview(net.server.data)
        status = await send(channel, net.server.grant(up=True), [encode_frame(0, whole[:FRAME])])
        assert status == TransferStatus(received_bytes=FRAME, complete=False)


def cut_into_frames(data: bytes) -> list[bytes]:
    return [encode_frame(start, memoryview(data)[start : start + FRAME]) for start in range(0, len(data), FRAME)]


def with_flipped_bit(sound: list[bytes]) -> list[bytes]:
    return [*sound[:3], flipped(sound[3]), *sound[4:]]


def with_a_gap(sound: list[bytes]) -> list[bytes]:
    return [*sound[:3], *sound[4:]]


def with_a_frame_twice(sound: list[bytes]) -> list[bytes]:
    return [*sound[:3], *sound[2:]]


def with_more_than_announced(sound: list[bytes]) -> list[bytes]:
    return [*sound, encode_frame(WHOLE, memoryview(b"more"))]


def with_a_last_frame_too_long(sound: list[bytes]) -> list[bytes]:
    return [*sound[:-1], encode_frame(10 * FRAME, memoryview(bytes(124)))]


@pytest.mark.parametrize(
    ("change", "error", "field", "num_frames_kept"),
    [
        (with_flipped_bit, BadFrame, "crc32", 3),
        (with_a_gap, BadFrame, "offset", 3),
        (with_a_frame_twice, BadFrame, "offset", 3),
        (with_more_than_announced, TooLarge, "num_bytes", 11),
        (with_a_last_frame_too_long, TooLarge, "num_bytes", 10),
    ],
)
async def test_a_refused_frame_reaches_the_sender_as_an_error_and_keeps_what_came_before(
    tmp_path: Path,
    change: Callable[[list[bytes]], list[bytes]],
    error: type[RemoteError],
    field: str,
    num_frames_kept: int,
) -> None:
    async with loopback(tmp_path) as net, net.channel() as channel:
        with pytest.raises(error) as caught:
            await send(channel, net.server.grant(up=True), change(cut_into_frames(net.server.data)))
        assert caught.value.field == field
        kept = min(num_frames_kept * FRAME, WHOLE)
        assert bytes(net.server.slot.view) == net.server.data[:kept]


async def test_our_own_upload_learns_the_reason_however_its_writes_fail(
    tmp_path: Path, payload: Callable[[bytes], Path]
) -> None:
    async with loopback(tmp_path) as net, net.channel() as channel:
        path = payload(net.server.data)
        for _ in range(20):  # the failure of a write and the server's status race each other
            grant = await net.server.resumed_upload()
            net.server.slot.begin(FRAME, what="update of site-3, round 12")
            with pytest.raises(TooLarge, match="update of site-3, round 12"):
                await upload(channel, grant, path, frame_bytes=2 * FRAME)


async def test_other_bytes_than_announced_are_refused_and_nothing_is_kept(
    tmp_path: Path, payload: Callable[[bytes], Path]
) -> None:
    async with loopback(tmp_path) as net, net.channel() as channel:
        other = payload(bytes(WHOLE))
        with pytest.raises(BadFrame, match="announced was"):
            await upload(channel, net.server.grant(up=True), other, frame_bytes=FRAME)
        assert net.server.slot.received_bytes == 0


async def test_a_file_of_another_size_than_granted_is_not_sent(
    tmp_path: Path, payload: Callable[[bytes], Path]
) -> None:
    async with loopback(tmp_path) as net, net.channel() as channel:
        with pytest.raises(LocalError, match="the grant is for"):
            await upload(channel, net.server.grant(up=True), payload(b"short"))


async def test_a_grant_that_is_over_is_stale(tmp_path: Path, payload: Callable[[bytes], Path]) -> None:
    async with loopback(tmp_path) as net, net.channel() as channel:
        grant = net.server.grant(up=True)
        net.server.grants.withdraw(grant.grant)
        with pytest.raises(Stale):
            await upload(channel, grant, payload(net.server.data))


async def test_a_slow_sender_loses_its_grant_by_the_clock(tmp_path: Path) -> None:
    async with loopback(tmp_path) as net, net.channel() as channel:
        server = net.server
        grant = server.grant(up=True)
        method: Any = channel.stream_unary(UPLOAD_METHOD, response_deserializer=TransferStatus.FromString)
        call = method(metadata=[(GRANT_METADATA_KEY, grant.grant)])
        sound = cut_into_frames(server.data)
        await call.write(sound[0])
        await call.write(sound[1])  # the count of the first is in when the second has come; then the sender stalls
        await server.progressed.wait()
        server.now_s += WINDOW_S
        (overdue,) = server.grants.overdue()
        server.withdrawals[overdue.id].withdraw(Stale("slower than granted", site=SITE, bound=grant.min_bytes_per_s))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        refusal = from_rpc(caught.value)
        assert isinstance(refusal, Stale)
        assert (refusal.site, refusal.bound) == (SITE, str(grant.min_bytes_per_s))
        assert (await server.resumed_upload()).offset == 2 * FRAME  # both are kept for the next grant


# --- down ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_bytes", [0, 1, FRAME, WHOLE])
@pytest.mark.parametrize("header", [b"", b"header of a model file"])
async def test_a_download_arrives_whole(tmp_path: Path, num_bytes: int, header: bytes) -> None:
    async with loopback(tmp_path, num_bytes) as net, net.channel() as channel:
        path = tmp_path / "models" / "version-7"
        await download(channel, net.server.grant(up=False), path, header=header)
        assert path.read_bytes() == header + net.server.data
        assert [file.name for file in path.parent.iterdir()] == ["version-7"]
        assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("held_bytes", [1, FRAME, 5 * FRAME + 17, WHOLE - 1, WHOLE])
@pytest.mark.parametrize("header", [b"", b"header of a model file"])
async def test_a_download_resumes_at_any_offset(tmp_path: Path, held_bytes: int, header: bytes) -> None:
    async with loopback(tmp_path) as net, net.channel() as channel:
        path, data = tmp_path / "version-7", net.server.data
        (tmp_path / "version-7.part").write_bytes(header + data[:held_bytes])
        assert partial_bytes(path, header) == held_bytes
        await download(channel, net.server.grant(up=False, offset=held_bytes), path, header=header)
        assert path.read_bytes() == header + data
        assert net.server.num_bytes_out == WHOLE - held_bytes


async def test_a_download_cut_midway_goes_on_from_what_came(tmp_path: Path) -> None:
    async with loopback(tmp_path) as net:
        path, server = tmp_path / "version-7", net.server
        async with net.breaking_channel(after_bytes_down=WHOLE // 2, once=lambda: partial_bytes(path)) as channel:
            with pytest.raises(Unavailable):
                await download(channel, server.grant(up=False), path)
        held = partial_bytes(path)
        assert 0 < held < WHOLE // 2
        assert not path.exists()
        server.num_bytes_out = 0
        async with net.channel() as channel:
            await download(channel, server.grant(up=False, offset=held), path)
        assert path.read_bytes() == server.data
        assert server.num_bytes_out == WHOLE - held


async def test_a_part_of_something_else_is_left_to_whoever_else_has_it(tmp_path: Path) -> None:
    """A region's server links the base versions that its agent has fetched."""
    async with loopback(tmp_path) as net, net.channel() as channel:
        path, linked = tmp_path / "version-7", tmp_path / "linked"
        linked.write_bytes(b"another header and its data")
        part_of(path).hardlink_to(linked)
        await download(channel, net.server.grant(up=False), path, header=b"header")
        assert path.read_bytes() == b"header" + net.server.data
        assert linked.read_bytes() == b"another header and its data"


async def test_a_damaged_frame_is_refused_and_the_next_try_goes_on_before_it(tmp_path: Path) -> None:
    async with loopback(tmp_path) as net, net.channel() as channel:
        path = tmp_path / "version-7"
        net.server.flip_bit_of_frame = 4
        with pytest.raises(BadFrame):
            await download(channel, net.server.grant(up=False), path)
        assert partial_bytes(path) == 3 * FRAME
        net.server.flip_bit_of_frame = None
        await download(channel, net.server.grant(up=False, offset=3 * FRAME), path)
        assert path.read_bytes() == net.server.data


@pytest.mark.parametrize("left_behind", [bytes(FRAME), bytes(WHOLE)])
async def test_a_part_with_other_bytes_is_dropped_at_the_end_and_the_next_try_is_right(
    tmp_path: Path, left_behind: bytes
) -> None:
    async with loopback(tmp_path) as net, net.channel() as channel:
        path = tmp_path / "version-7"
        path.with_name("version-7.part").write_bytes(left_behind)
        with pytest.raises(BadFrame, match="version 7 of run"):
            await download(channel, net.server.grant(up=False), path)
        assert partial_bytes(path) == 0
        await download(channel, net.server.grant(up=False), path)
        assert path.read_bytes() == net.server.data


@pytest.mark.parametrize("left_behind", [bytes(WHOLE + 1), b"another header" + bytes(10)])
async def test_a_part_that_cannot_be_of_this_object_is_not_used(tmp_path: Path, left_behind: bytes) -> None:
    header = b"header of ours"
    async with loopback(tmp_path) as net, net.channel() as channel:
        path = tmp_path / "version-7"
        path.with_name("version-7.part").write_bytes(left_behind)
        await download(channel, net.server.grant(up=False), path, header=header)
        assert path.read_bytes() == header + net.server.data


async def test_a_grant_beyond_what_is_here_is_stale(tmp_path: Path) -> None:
    async with loopback(tmp_path) as net, net.channel() as channel:
        with pytest.raises(Stale, match="fetch again"):
            await download(channel, net.server.grant(up=False, offset=5), tmp_path / "version-7")


async def test_checksums_are_computed_once_for_all_readers_of_an_object(tmp_path: Path) -> None:
    path, data, checksums = tmp_path / "file", os.urandom(100), Checksums()
    path.write_bytes(b"header" + data)

    async def read(offset: int) -> list[bytes]:
        stream = frames(path, 6, 100, offset, frame_bytes=40, checksums=checksums)
        return [bytes(decode_frame(frame)[1]) async for frame in stream]

    assert await read(0) == [data[:40], data[40:80], data[80:]]
    assert checksums == {
        (0, 40): zlib.crc32(data[:40]),
        (40, 80): zlib.crc32(data[40:80]),
        (80, 100): zlib.crc32(data[80:]),
    }
    assert await read(7) == [data[7:40], data[40:80], data[80:]]  # cut alike after the first
    assert len(checksums) == 4
    checksums[80, 100] ^= 1
    with pytest.raises(BadFrame):  # so it is used
        await read(0)


async def test_an_offset_beyond_the_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    with pytest.raises(Stale):
        await anext(frames(path, 2, 8, 9))
    with pytest.raises(LocalError, match="cut short"):
        await anext(frames(path, 2, 9, 0))


_FULL_DISK = """
import asyncio, resource, sys
from pathlib import Path
import grpc.aio
from atoll.transport.transfer import download
from atoll.wire.control_pb2 import Grant
from atoll.wire.errors import DiskFull

async def main():
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
    async with grpc.aio.insecure_channel(sys.argv[1]) as channel:
        try:
            await download(channel, Grant.FromString(bytes.fromhex(sys.argv[2])), Path(sys.argv[3]))
        except DiskFull as error:
            print(error)

asyncio.run(main())
"""


async def test_a_full_disk_ends_a_download_with_nothing_half_kept(tmp_path: Path) -> None:
    async with loopback(tmp_path) as net:
        folder = tmp_path / "models"
        grant = net.server.grant(up=False).SerializeToString().hex()
        arguments = [f"127.0.0.1:{net.port}", grant, str(folder / "version-7")]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _FULL_DISK, *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        output, errors = await process.communicate()
        assert process.returncode == 0, errors
        assert b"no room on the disk" in output
        assert list(folder.iterdir()) == []


async def test_a_download_that_cannot_fit_is_not_begun(tmp_path: Path) -> None:
    async with loopback(tmp_path) as net, net.channel() as channel:
        grant = net.server.grant(up=False)
        grant.num_bytes = 1 << 48
        with pytest.raises(DiskFull, match="are free"):
            await download(channel, grant, tmp_path / "models" / "version-7")
        assert list((tmp_path / "models").iterdir()) == []
        assert net.server.num_bytes_out == 0


# --- any cut -------------------------------------------------------------------------------------------------------


@given(cuts=st.lists(st.integers(0, WHOLE + 3000), max_size=4), num_bytes=st.integers(0, WHOLE))
@settings(max_examples=12, deadline=None)
def test_an_upload_cut_anywhere_gives_the_same_bytes(cuts: list[int], num_bytes: int) -> None:
    async def scenario(folder: Path) -> None:
        async with loopback(folder, num_bytes) as net:
            path = folder / "payload"
            path.write_bytes(net.server.data)
            for cut in cuts:
                async with net.breaking_channel(after_bytes_up=max(1, cut)) as channel:
                    try:
                        await upload(channel, await net.server.resumed_upload(), path, frame_bytes=FRAME)
                    except Unavailable:
                        continue
            async with net.channel() as channel:
                status = await upload(channel, await net.server.resumed_upload(), path, frame_bytes=FRAME)
            assert status.complete
            assert bytes(net.server.slot.view) == net.server.data

    in_new_folder(scenario)


@given(cuts=st.lists(st.integers(0, WHOLE + 3000), max_size=4), num_bytes=st.integers(0, WHOLE))
@settings(max_examples=12, deadline=None)
def test_a_download_cut_anywhere_gives_the_same_bytes(cuts: list[int], num_bytes: int) -> None:
    async def scenario(folder: Path) -> None:
        async with loopback(folder, num_bytes) as net:
            path = folder / "version-7"
            for cut in cuts:
                async with net.breaking_channel(after_bytes_down=max(1, cut)) as channel:
                    try:
                        await download(channel, net.server.grant(up=False, offset=partial_bytes(path)), path)
                    except Unavailable:
                        continue
            async with net.channel() as channel:
                await download(channel, net.server.grant(up=False, offset=partial_bytes(path)), path)
            assert path.read_bytes() == net.server.data

    in_new_folder(scenario)


def in_new_folder(scenario: Callable[[Path], Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(scenario(Path(folder)))
