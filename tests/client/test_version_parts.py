"""A version that is made of the one before it and the part that came."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.client.version_parts import Part, compose, part_file, part_of_version
from atoll.wire.errors import LocalError
from atoll.wire.manifest import Manifest
from atoll.wire.model_file import create, header_of, open_model

MANIFEST = Manifest.build([("a", "float32", (4, 4), "parameter"), ("b", "float32", (8,), "parameter")])
FRAGMENTS = [(0, 64), (64, 96)]


def test_what_differs_from_the_version_before() -> None:
    assert part_of_version(FRAGMENTS, 0) is None
    assert part_of_version([], 3) is None
    assert [part_of_version(FRAGMENTS, version) for version in (1, 2, 3)] == [
        Part(first_byte=0, num_bytes=64),
        Part(first_byte=64, num_bytes=32),
        Part(first_byte=0, num_bytes=64),
    ]


def test_a_version_is_composed_and_the_one_before_stays(tmp_path: Path) -> None:
    before, path = tmp_path / "9.safetensors", tmp_path / "10.safetensors"
    data = bytes(range(96))
    with create(before, MANIFEST, {"atoll.version": "9"}) as out:
        out[:] = data
    part_file(path).write_bytes(b"\xff" * 32)
    header = header_of(MANIFEST, {"atoll.version": "10", "atoll.run": "of another length"})
    compose(before, part_file(path), Part(first_byte=64, num_bytes=32), path, header)
    with open_model(path) as made, open_model(before) as old:
        assert bytes(made.map) == data[:64] + b"\xff" * 32
        assert made.metadata["atoll.version"] == "10"
        assert bytes(old.map) == data
    assert sorted(tmp_path.iterdir()) == sorted([before, path])


def test_a_part_of_another_length_makes_no_version(tmp_path: Path) -> None:
    before, path = tmp_path / "1.safetensors", tmp_path / "2.safetensors"
    with create(before, MANIFEST) as out:
        out[:] = bytes(96)
    part_file(path).write_bytes(bytes(31))
    with pytest.raises(LocalError, match="is not of the 32 bytes that were fetched"):
        compose(before, part_file(path), Part(first_byte=64, num_bytes=32), path, header_of(MANIFEST, {}))
    assert not path.exists()
