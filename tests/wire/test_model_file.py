"""Models on disk: durable, mapped, readable by the safetensors library, and refused where damaged."""

from __future__ import annotations

import errno
import json
import os
import struct
import tracemalloc
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from samples.manifests import manifests

from atoll.wire.errors import BadManifest, DiskFull, LocalError
from atoll.wire.manifest import DTYPE_BYTES, Manifest
from atoll.wire.model_file import DATA_ALIGNMENT, crc32_of_file, create, open_model, remove_drafts
from atoll.wire.tensors import DTYPES, views

MANIFEST = Manifest.build([("w", "float32", (2, 3), "parameter"), ("n", "int64", (), "buffer")])
DATA = bytes(range(32))


def write(path: Path, manifest: Manifest = MANIFEST, data: bytes = DATA) -> Path:
    with create(path, manifest, {"atoll.round": "3"}) as target:
        target[:] = data
    return path


@given(manifests, st.data())
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, manifest: Manifest, data: st.DataObject) -> None:
    raw = data.draw(st.binary(min_size=manifest.num_bytes, max_size=manifest.num_bytes))
    path = write(tmp_path_factory.mktemp("model") / "m.safetensors", manifest, raw)
    with open_model(path) as model:
        assert model.manifest == manifest
        assert bytes(model.map) == raw
        assert model.map.readonly
        assert model.num_bytes == manifest.num_bytes
        assert model.data_offset % DATA_ALIGNMENT == 0
        assert model.metadata["atoll.round"] == "3"
    assert path.read_bytes()[model.data_offset :] == raw
    assert crc32_of_file(path) == zlib.crc32(raw)


@pytest.mark.parametrize("name", DTYPE_BYTES)
def test_the_safetensors_library_loads_it(tmp_path: Path, name: str) -> None:
    manifest = Manifest.build([("w", name, (2, 3), "parameter"), ("s", name, (), "buffer")])
    raw = b"\x01" * manifest.num_bytes
    path = write(tmp_path / "m.safetensors", manifest, raw)
    loaded, ours = load_file(path), views(manifest, raw, writable=False)
    for key, tensor in ours.items():
        found = torch.view_as_complex(loaded[key]) if name in ("complex128", "complex32") else loaded[key]
        assert torch.equal(found.view(DTYPES[name]).reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
        assert found.shape == tensor.shape


def test_an_error_in_the_block_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="assignment"), create(tmp_path / "m", MANIFEST) as data:
        data[:4] = b"more than four bytes"
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = write(tmp_path / "m")
    with open_model(path) as before:
        with create(path, MANIFEST) as data:
            data[:] = bytes(32)
            assert bytes(before.map) == DATA
        assert bytes(before.map) == DATA, "a reader keeps the version that it opened"
    with open_model(path) as after:
        assert bytes(after.map) == bytes(32)
    assert list(tmp_path.iterdir()) == [path]


def test_tensors_over_the_data_may_outlive_the_block(tmp_path: Path) -> None:
    path = tmp_path / "m"
    with create(path, MANIFEST) as data:
        tensors = views(MANIFEST, data, writable=True)
        tensors["w"].fill_(1.5)
        tensors["n"].fill_(9)
    with open_model(path) as model:
        found = views(model.manifest, model.map, writable=False)
    assert found["w"].eq(1.5).all()
    assert found["n"] == 9
    assert torch.equal(found["w"], tensors["w"])


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    kept = write(tmp_path / "m")
    (tmp_path / ".m.0011aabb.draft").write_bytes(b"half")
    remove_drafts(tmp_path)
    assert list(tmp_path.iterdir()) == [kept]


def test_a_full_disk_is_an_error_before_the_first_byte(tmp_path: Path) -> None:
    """2^48 bytes are on no disk; a filesystem answers ENOSPC or EFBIG when they are reserved."""
    huge = Manifest.build([("w", "int8", (1 << 48,), "parameter")])
    with pytest.raises(LocalError, match=str(tmp_path)), create(tmp_path / "m", huge):
        pytest.fail("the block must not be entered")
    assert list(tmp_path.iterdir()) == []


def test_enospc_is_disk_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DiskFull, match="free some"), create(tmp_path / "m", MANIFEST):
        pytest.fail("the block must not be entered")
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_the_caller_is_not_renamed(tmp_path: Path) -> None:
    with pytest.raises(ConnectionResetError), create(tmp_path / "m", MANIFEST):
        raise ConnectionResetError("peer")


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="cannot be written"), create(tmp_path / "no" / "m", MANIFEST):
        pytest.fail("the block must not be entered")
    with pytest.raises(LocalError, match="cannot be read"):
        open_model(tmp_path / "no" / "m")


def with_header(path: Path, header: bytes, data: bytes = b"") -> Path:
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)
    return path


def entry(**changes: object) -> bytes:
    fields: dict[str, object] = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    return json.dumps({"w": fields | changes}).encode()


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"null",
        b"[]",
        b"{",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"__metadata__": 3}',
        b'{"w": 3}',
        b'{"w": {}}',
        b'{"__metadata__": {"atoll.dtypes": "[1]"}, "w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}',
        entry(dtype="F31"),
        entry(dtype=["F32"]),
        entry(shape="ab"),
        entry(shape=[-2]),
        entry(shape=[1 << 70]),
        entry(shape=[3]),
        entry(shape=[1e400]),
        entry(data_offsets=[0]),
        entry(data_offsets=[8, 0]),
        entry(data_offsets=[4, 12]),
        entry(data_offsets=[0, 9]),
        json.dumps({"\ud800": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode(),
    ],
)
def test_hostile_headers(tmp_path: Path, header: bytes) -> None:
    path = with_header(tmp_path / "m", header, bytes(8))
    with pytest.raises(BadManifest):
        open_model(path)


@pytest.mark.parametrize("claimed", [1, 1 << 20, 1 << 40, (1 << 64) - 1])
def test_a_header_that_claims_too_much(tmp_path: Path, claimed: int) -> None:
    path = tmp_path / "m"
    path.write_bytes(struct.pack("<Q", claimed))
    tracemalloc.start()
    try:
        with pytest.raises(BadManifest, match="header"):
            open_model(path)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 256 << 10


@given(st.integers(0, 10_000))
def test_truncated(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    path = write(tmp_path_factory.mktemp("model") / "m")
    whole = path.read_bytes()
    path.write_bytes(whole[: cut % len(whole)])
    with pytest.raises(BadManifest):
        open_model(path)


@given(st.integers(0, 1 << 20))
def test_a_flipped_bit_in_the_header_never_crashes(tmp_path_factory: pytest.TempPathFactory, bit: int) -> None:
    path = write(tmp_path_factory.mktemp("model") / "m")
    damaged = bytearray(path.read_bytes())
    header_bits = (len(damaged) - len(DATA)) * 8
    damaged[bit % header_bits // 8] ^= 1 << bit % 8
    path.write_bytes(damaged)
    try:
        open_model(path).close()
    except BadManifest:
        return
