"""Uploads between a real client and a real server on loopback, with everything that can go wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import grpc
import grpc.aio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from samples.transfers import FRAME, SITE, WHOLE, Way, flipped, in_new_folder, loopback

from atoll.transport.grants import WINDOW_S
from atoll.transport.grpc_carrier import GRANT_METADATA_KEY, UPLOAD_METHOD
from atoll.transport.transfer import upload
from atoll.wire.control_pb2 import Grant
from atoll.wire.errors import (
    BadFrame,
    LocalError,
    RemoteError,
    Stale,
    TooLarge,
    Unavailable,
    from_rpc,
)
from atoll.wire.frames import encode_frame
from atoll.wire.transfer_pb2 import TransferStatus


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


@pytest.mark.parametrize("way", get_args(Way))
@pytest.mark.parametrize("num_bytes", [0, 1, FRAME, WHOLE])
async def test_an_upload_arrives_whole(
    tmp_path: Path, way: Way, payload: Callable[[bytes], Path], num_bytes: int
) -> None:
    async with loopback(tmp_path, num_bytes, way=way) as net, net.carrier() as carrier:
        path = payload(net.server.data)
        status = await upload(carrier, net.server.grant(up=True), path, frame_bytes=FRAME)
        assert status == TransferStatus(received_bytes=num_bytes, complete=True)
        assert bytes(net.server.slot.view) == net.server.data
        assert net.server.num_frames_in == -(-num_bytes // FRAME)


@pytest.mark.parametrize("way", get_args(Way))
@pytest.mark.parametrize("held_bytes", [1, FRAME - 1, FRAME, 5 * FRAME + 17, WHOLE - 1, WHOLE])
async def test_an_upload_resumes_at_any_offset(
    tmp_path: Path, way: Way, payload: Callable[[bytes], Path], held_bytes: int
) -> None:
    async with loopback(tmp_path, way=way) as net, net.carrier() as carrier:
        data = net.server.data
        net.server.slot.write(encode_frame(0, memoryview(data)[:held_bytes]))
        status = await upload(carrier, await net.server.resumed_upload(), payload(data), frame_bytes=FRAME)
        assert status.complete
        assert bytes(net.server.slot.view) == data
        assert net.server.num_bytes_in == WHOLE - held_bytes


@pytest.mark.parametrize("way", get_args(Way))
async def test_an_upload_cut_midway_counts_what_came_and_goes_on_from_there(
    tmp_path: Path, way: Way, payload: Callable[[bytes], Path]
) -> None:
    async with loopback(tmp_path, way=way) as net:
        server, path = net.server, payload(net.server.data)
        breaking = net.breaking_carrier(after_bytes_up=WHOLE // 2, once=lambda: server.slot.received_bytes)
        async with breaking as carrier:
            with pytest.raises(Unavailable):
                await upload(carrier, server.grant(up=True), path, frame_bytes=FRAME)
        grant = await server.resumed_upload()
        assert 0 < grant.offset < WHOLE // 2
        assert grant.offset % FRAME == 0
        async with net.carrier() as carrier:
            status = await upload(carrier, grant, path, frame_bytes=FRAME)
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


@pytest.mark.parametrize("way", get_args(Way))
async def test_our_own_upload_learns_the_reason_however_its_writes_fail(
    tmp_path: Path, way: Way, payload: Callable[[bytes], Path]
) -> None:
    async with loopback(tmp_path, way=way) as net, net.carrier() as carrier:
        path = payload(net.server.data)
        for _ in range(20):  # the failure of a write and the server's status race each other
            grant = await net.server.resumed_upload()
            net.server.slot.begin(FRAME, what="update of site-3, round 12")
            with pytest.raises(TooLarge, match="update of site-3, round 12"):
                await upload(carrier, grant, path, frame_bytes=2 * FRAME)


@pytest.mark.parametrize("way", get_args(Way))
async def test_other_bytes_than_announced_are_refused_and_nothing_is_kept(
    tmp_path: Path, way: Way, payload: Callable[[bytes], Path]
) -> None:
    async with loopback(tmp_path, way=way) as net, net.carrier() as carrier:
        other = payload(bytes(WHOLE))
        with pytest.raises(BadFrame, match="announced was"):
            await upload(carrier, net.server.grant(up=True), other, frame_bytes=FRAME)
        assert net.server.slot.received_bytes == 0


@pytest.mark.parametrize("way", get_args(Way))
async def test_a_file_of_another_size_than_granted_is_not_sent(
    tmp_path: Path, way: Way, payload: Callable[[bytes], Path]
) -> None:
    async with loopback(tmp_path, way=way) as net, net.carrier() as carrier:
        with pytest.raises(LocalError, match="the grant is for"):
            await upload(carrier, net.server.grant(up=True), payload(b"short"))


@pytest.mark.parametrize("way", get_args(Way))
async def test_a_grant_that_is_over_is_stale(tmp_path: Path, way: Way, payload: Callable[[bytes], Path]) -> None:
    async with loopback(tmp_path, way=way) as net, net.carrier() as carrier:
        grant = net.server.grant(up=True)
        net.server.grants.withdraw(grant.grant)
        with pytest.raises(Stale):
            await upload(carrier, grant, payload(net.server.data))


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


@pytest.mark.parametrize("way", get_args(Way))
@given(cuts=st.lists(st.integers(0, WHOLE + 3000), max_size=4), num_bytes=st.integers(0, WHOLE))
@settings(max_examples=12, deadline=None)
def test_an_upload_cut_anywhere_gives_the_same_bytes(way: Way, cuts: list[int], num_bytes: int) -> None:
    async def scenario(folder: Path) -> None:
        async with loopback(folder, num_bytes, way=way) as net:
            path = folder / "payload"
            path.write_bytes(net.server.data)
            for cut in cuts:
                async with net.breaking_carrier(after_bytes_up=max(1, cut)) as carrier:
                    try:
                        await upload(carrier, await net.server.resumed_upload(), path, frame_bytes=FRAME)
                    except Unavailable:
                        continue
            async with net.carrier() as carrier:
                status = await upload(carrier, await net.server.resumed_upload(), path, frame_bytes=FRAME)
            assert status.complete
            assert bytes(net.server.slot.view) == net.server.data

    in_new_folder(scenario)
