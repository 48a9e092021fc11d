"""Slots are reused, hold what was checked, and meet a full disk before the first byte."""

from __future__ import annotations

import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from atoll.transport.staging import StagingPool, StagingSlot
from atoll.wire.errors import BadFrame, LocalError, Unavailable
from atoll.wire.frames import encode_frame


def frame(offset: int, payload: bytes) -> bytes:
    return encode_frame(offset, memoryview(payload))


def test_a_slot_takes_one_object_after_the_other(tmp_path: Path) -> None:
    slot = StagingSlot(tmp_path / "slot")
    for data in (b"small", b"a larger one", b"", b"tiny"):
        slot.begin(len(data), zlib.crc32(data))
        if data:
            slot.write(frame(0, data))
        slot.check_whole()
        assert (slot.complete, bytes(slot.view), slot.crc32) == (True, data, zlib.crc32(data))
        assert slot.view.readonly
    slot.close()
    assert not list(tmp_path.iterdir())


def test_a_wrong_whole_leaves_the_slot_empty(tmp_path: Path) -> None:
    slot = StagingSlot(tmp_path / "slot")
    slot.begin(4, 123)
    slot.write(frame(0, b"abcd"))
    with pytest.raises(BadFrame):
        slot.check_whole()
    assert slot.received_bytes == 0


def test_a_frame_without_an_object_is_refused(tmp_path: Path) -> None:
    slot = StagingSlot(tmp_path / "slot")
    with pytest.raises(LocalError):
        slot._keep(0, memoryview(b"abcd"))


def test_views_outlive_the_growth_of_a_slot(tmp_path: Path) -> None:
    slot = StagingSlot(tmp_path / "slot")
    slot.begin(4)
    slot.write(frame(0, b"abcd"))
    view = slot.view
    slot.begin(1 << 20)
    assert bytes(view) == b"abcd"


def test_a_pool_lends_each_slot_once(tmp_path: Path) -> None:
    (tmp_path / "slot-7").write_bytes(b"left behind")
    pool = StagingPool(tmp_path, 2)
    assert not (tmp_path / "slot-7").exists()
    first, second = pool.acquire(), pool.acquire()
    assert first is not second
    with pytest.raises(Unavailable, match="all 2 staging slots"):
        pool.acquire()
    pool.release(first)
    pool.release(first)
    assert pool.num_free == 1
    assert pool.acquire() is first
    pool.close()
    assert not list(tmp_path.iterdir())


_FULL_DISK = """
import resource, sys
from pathlib import Path
from atoll.transport.staging import StagingSlot
from atoll.wire.errors import DiskFull
from atoll.wire.frames import encode_frame

path = Path(sys.argv[1])
slot = StagingSlot(path)
slot.begin(1000)
resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))
try:
    slot.begin(5000)
except DiskFull as error:
    print(error)
assert (slot.num_bytes, slot.received_bytes, path.stat().st_size) == (0, 0, 1000)
slot.begin(1000)
slot.write(encode_frame(0, memoryview(bytes(1000))))
assert slot.complete
"""


def test_a_full_disk_is_an_error_before_the_first_byte_and_the_slot_stays_usable(tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-c", _FULL_DISK, str(tmp_path / "slot")], capture_output=True, text=True, check=True
    )
    assert "no room on the disk" in process.stdout
    assert process.stdout.endswith("; free some, then start again\n")
