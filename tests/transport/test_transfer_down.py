"""Downloads between a real client and a real server on loopback, with everything that can go wrong."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import zlib
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from samples.transfers import FRAME, WHOLE, Way, in_new_folder, loopback

from atoll.transport.grpc_carrier import frames
from atoll.transport.pieces import Checksums, Pieces
from atoll.transport.transfer import download, part_of, partial_bytes
from atoll.wire.errors import (
    BadFrame,
    DiskFull,
    LocalError,
    Stale,
    Unavailable,
)
from atoll.wire.frames import decode_frame


@pytest.mark.parametrize("way", get_args(Way))
@pytest.mark.parametrize("num_bytes", [0, 1, FRAME, WHOLE])
@pytest.mark.parametrize("header", [b"", b"header of a model file"])
async def test_a_download_arrives_whole(tmp_path: Path, way: Way, num_bytes: int, header: bytes) -> None:
    async with loopback(tmp_path, num_bytes, way=way) as net, net.carrier() as carrier:
        path = tmp_path / "models" / "version-7"
        await download(carrier, net.server.grant(up=False), path, header=header)
        assert path.read_bytes() == header + net.server.data
        assert [file.name for file in path.parent.iterdir()] == ["version-7"]
        assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("way", get_args(Way))
@pytest.mark.parametrize("held_bytes", [1, FRAME, 5 * FRAME + 17, WHOLE - 1, WHOLE])
@pytest.mark.parametrize("header", [b"", b"header of a model file"])
async def test_a_download_resumes_at_any_offset(tmp_path: Path, way: Way, held_bytes: int, header: bytes) -> None:
    async with loopback(tmp_path, way=way) as net, net.carrier() as carrier:
        path, data = tmp_path / "version-7", net.server.data
        (tmp_path / "version-7.part").write_bytes(header + data[:held_bytes])
        assert partial_bytes(path, header) == held_bytes
        await download(carrier, net.server.grant(up=False, offset=held_bytes), path, header=header)
        assert path.read_bytes() == header + data
        assert await net.server.bytes_out() == WHOLE - held_bytes


@pytest.mark.parametrize("way", get_args(Way))
async def test_a_download_cut_midway_goes_on_from_what_came(tmp_path: Path, way: Way) -> None:
    async with loopback(tmp_path, way=way) as net:
        path, server = tmp_path / "version-7", net.server
        async with net.breaking_carrier(after_bytes_down=WHOLE // 2, once=lambda: partial_bytes(path)) as carrier:
            with pytest.raises(Unavailable):
                await download(carrier, server.grant(up=False), path)
        held = partial_bytes(path)
        assert 0 < held < WHOLE // 2
        assert not path.exists()
        await server.bytes_out()
        async with net.carrier() as carrier:
            await download(carrier, server.grant(up=False, offset=held), path)
        assert path.read_bytes() == server.data
        assert await server.bytes_out() == WHOLE - held


@pytest.mark.parametrize("way", get_args(Way))
async def test_a_part_of_something_else_is_left_to_whoever_else_has_it(tmp_path: Path, way: Way) -> None:
    """A region's server links the base versions that its agent has fetched."""
    async with loopback(tmp_path, way=way) as net, net.carrier() as carrier:
        path, linked = tmp_path / "version-7", tmp_path / "linked"
        linked.write_bytes(b"another header and its data")
        part_of(path).hardlink_to(linked)
        await download(carrier, net.server.grant(up=False), path, header=b"header")
        assert path.read_bytes() == b"header" + net.server.data
        assert linked.read_bytes() == b"another header and its data"


@pytest.mark.parametrize("way", get_args(Way))
async def test_a_damaged_frame_is_refused_and_the_next_try_goes_on_before_it(tmp_path: Path, way: Way) -> None:
    async with loopback(tmp_path, way=way) as net, net.carrier() as carrier:
        path = tmp_path / "version-7"
        net.server.flip_bit_of_frame = 4
        with pytest.raises(BadFrame):
            await download(carrier, net.server.grant(up=False), path)
        assert partial_bytes(path) == 3 * FRAME
        net.server.flip_bit_of_frame = None
        await download(carrier, net.server.grant(up=False, offset=3 * FRAME), path)
        assert path.read_bytes() == net.server.data


@pytest.mark.parametrize("way", get_args(Way))
@pytest.mark.parametrize("left_behind", [bytes(FRAME), bytes(WHOLE)])
async def test_a_part_with_other_bytes_is_dropped_at_the_end_and_the_next_try_is_right(
    tmp_path: Path, way: Way, left_behind: bytes
) -> None:
    async with loopback(tmp_path, way=way) as net, net.carrier() as carrier:
        path = tmp_path / "version-7"
        path.with_name("version-7.part").write_bytes(left_behind)
        with pytest.raises(BadFrame, match="version 7 of run"):
            await download(carrier, net.server.grant(up=False), path)
        assert partial_bytes(path) == 0
        await download(carrier, net.server.grant(up=False), path)
        assert path.read_bytes() == net.server.data


@pytest.mark.parametrize("way", get_args(Way))
@pytest.mark.parametrize("left_behind", [bytes(WHOLE + 1), b"another header" + bytes(10)])
async def test_a_part_that_cannot_be_of_this_object_is_not_used(tmp_path: Path, way: Way, left_behind: bytes) -> None:
    header = b"header of ours"
    async with loopback(tmp_path, way=way) as net, net.carrier() as carrier:
        path = tmp_path / "version-7"
        path.with_name("version-7.part").write_bytes(left_behind)
        await download(carrier, net.server.grant(up=False), path, header=header)
        assert path.read_bytes() == header + net.server.data


@pytest.mark.parametrize("way", get_args(Way))
async def test_a_grant_beyond_what_is_here_is_stale(tmp_path: Path, way: Way) -> None:
    async with loopback(tmp_path, way=way) as net, net.carrier() as carrier:
        with pytest.raises(Stale, match="fetch again"):
            await download(carrier, net.server.grant(up=False, offset=5), tmp_path / "version-7")


async def test_checksums_are_computed_once_for_all_readers_of_an_object(tmp_path: Path) -> None:
    path, data, checksums = tmp_path / "file", os.urandom(100), Checksums()
    path.write_bytes(b"header" + data)

    async def read(offset: int) -> list[bytes]:
        stream = frames(Pieces(path, 6, 100, offset, frame_bytes=40, checksums=checksums))
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
        await anext(frames(Pieces(path, 2, 8, 9)))
    with pytest.raises(LocalError, match="cut short"):
        await anext(frames(Pieces(path, 2, 9, 0)))


_FULL_DISK = """
import asyncio, resource, sys
from pathlib import Path
import grpc.aio
from atoll.transport.grpc_carrier import GrpcCarrier
from atoll.transport.transfer import download
from atoll.wire.control_pb2 import Grant
from atoll.wire.errors import DiskFull

async def main():
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
    async with grpc.aio.insecure_channel(sys.argv[1]) as channel:
        try:
            await download(GrpcCarrier(channel), Grant.FromString(bytes.fromhex(sys.argv[2])), Path(sys.argv[3]))
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


@pytest.mark.parametrize("way", get_args(Way))
async def test_a_download_that_cannot_fit_is_not_begun(tmp_path: Path, way: Way) -> None:
    async with loopback(tmp_path, way=way) as net, net.carrier() as carrier:
        grant = net.server.grant(up=False)
        grant.num_bytes = 1 << 48
        with pytest.raises(DiskFull, match="are free"):
            await download(carrier, grant, tmp_path / "models" / "version-7")
        assert list((tmp_path / "models").iterdir()) == []
        assert await net.server.bytes_out() == 0


@pytest.mark.parametrize("way", get_args(Way))
@given(cuts=st.lists(st.integers(0, WHOLE + 3000), max_size=4), num_bytes=st.integers(0, WHOLE))
@settings(max_examples=12, deadline=None)
def test_a_download_cut_anywhere_gives_the_same_bytes(way: Way, cuts: list[int], num_bytes: int) -> None:
    async def scenario(folder: Path) -> None:
        async with loopback(folder, num_bytes, way=way) as net:
            path = folder / "version-7"
            for cut in cuts:
                async with net.breaking_carrier(after_bytes_down=max(1, cut)) as carrier:
                    try:
                        await download(carrier, net.server.grant(up=False, offset=partial_bytes(path)), path)
                    except Unavailable:
                        continue
            async with net.carrier() as carrier:
                await download(carrier, net.server.grant(up=False, offset=partial_bytes(path)), path)
            assert path.read_bytes() == net.server.data

    in_new_folder(scenario)
