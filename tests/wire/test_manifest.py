"""The manifest: what it promises of every model, and that nothing hostile becomes one."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from samples.manifests import entries, manifests

from atoll.wire import manifest_pb2 as pb
from atoll.wire.errors import BadManifest
from atoll.wire.manifest import (
    DTYPE_BYTES,
    MANIFEST_BYTES,
    MAX_TENSORS,
    MODEL_BYTES,
    NAME_BYTES,
    Entry,
    Manifest,
    TensorSpec,
)

SMALL: list[Entry] = [
    ("conv.weight", "float32", (4, 1, 3, 3), "parameter"),
    ("norm.count", "int64", (), "buffer"),
    ("conv.bias", "float32", (4,), "parameter"),
]


def spec(**changes: object) -> pb.TensorSpec:
    fields: dict[str, object] = {"name": "w", "dtype": pb.FLOAT32, "shape": [2, 2], "offset": 0, "role": pb.PARAMETER}
    return pb.TensorSpec(**(fields | changes))  # type: ignore[arg-type]


def message(*tensors: pb.TensorSpec, format: int = 1) -> bytes:
    return pb.Manifest(format=format, tensors=tensors).SerializeToString()


@given(entries())
def test_tensors_are_contiguous_aligned_and_in_order(given_entries: list[Entry]) -> None:
    manifest = Manifest.build(given_entries)
    end = 0
    for tensor in manifest:
        assert tensor.offset == end
        assert tensor.offset % DTYPE_BYTES[tensor.dtype] == 0
        end += tensor.num_bytes
    assert manifest.num_bytes == end
    by_item_size = sorted(given_entries, key=lambda entry: -DTYPE_BYTES[entry[1]])
    assert [(t.name, t.dtype, t.shape, t.role) for t in manifest] == by_item_size


@given(manifests)
def test_round_trip(manifest: Manifest) -> None:
    again = Manifest.decode(manifest.encode())
    assert again == manifest
    assert again.schema_hash == manifest.schema_hash
    assert again.encode() == manifest.encode()
    manifest.require_same(again)


def test_lookup() -> None:
    manifest = Manifest.build(SMALL)
    assert manifest["conv.bias"].shape == (4,)
    assert "conv.bias" in manifest
    assert "conv" not in manifest
    assert [tensor.name for tensor in manifest] == ["norm.count", "conv.weight", "conv.bias"]
    assert len(manifest) == 3


CHANGES: dict[str, tuple[list[Entry], str, str, str]] = {
    "dtype": (
        [SMALL[0], SMALL[1], ("conv.bias", "float64", (4,), "parameter")],
        "conv.bias", "a parameter of float64 [4]", "a parameter of float32 [4]",
    ),
    "shape": (
        [("conv.weight", "float32", (4, 3, 3, 1), "parameter"), *SMALL[1:]],
        "conv.weight", "a parameter of float32 [4, 3, 3, 1]", "a parameter of float32 [4, 1, 3, 3]",
    ),
    "role": (
        [SMALL[0], SMALL[1], ("conv.bias", "float32", (4,), "buffer")],
        "conv.bias", "a buffer of float32 [4]", "a parameter of float32 [4]",
    ),
    "name": (
        [SMALL[0], SMALL[1], ("conv.offset", "float32", (4,), "parameter")],
        "conv.bias", "absent", "a parameter of float32 [4]",
    ),
    "one less": (SMALL[:2], "conv.bias", "absent", "a parameter of float32 [4]"),
    "one more": (
        [*SMALL, ("head.weight", "float32", (2,), "parameter")],
        "head.weight", "a parameter of float32 [2]", "absent",
    ),
    "order": ([SMALL[2], SMALL[1], SMALL[0]], "conv.bias", "number 2", "number 3"),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_the_first_difference_is_named(change: str) -> None:
    changed, name, found, wanted = CHANGES[change]
    ours, theirs = Manifest.build(SMALL), Manifest.build(changed)
    assert ours.schema_hash != theirs.schema_hash
    with pytest.raises(BadManifest, match=rf"{name}.*; use the same app, version and \[app\] values$") as caught:
        ours.require_same(theirs, site="site-3", run="R", round=12)
    assert (caught.value.field, caught.value.value, caught.value.bound) == (name, found, wanted)
    assert (caught.value.site, caught.value.run, caught.value.round) == ("site-3", "R", 12)


HOSTILE: dict[str, Callable[[], bytes]] = {
    "nothing": lambda: b"",
    "no format": lambda: message(spec(), format=0),
    "a later format": lambda: message(spec(), format=2),
    "unknown field": lambda: message(spec()) + b"\x1a\x01x",
    "fixed64 field": lambda: message(spec()) + b"\x09" + bytes(8),
    "group": lambda: message(spec()) + b"\x13\x14",
    "endless varint": lambda: b"\xff" * 11,
    "tensor that claims 4 GiB": lambda: b"\x08\x01\x12\xff\xff\xff\xff\x0f",
    "tensor that claims 2^63 bytes": lambda: b"\x08\x01\x12" + b"\xff" * 9 + b"\x7f",
    "tensor larger than its bounds": lambda: message(spec(name="n" * 1100)),
    "empty name": lambda: message(spec(name="")),
    "long name": lambda: message(spec(name="n" * (NAME_BYTES + 1))),
    "name with a newline": lambda: message(spec(name="a\nb")),
    "name with a terminal escape": lambda: message(spec(name="\x1b[2J")),
    "name that turns the text around": lambda: message(spec(name="a\u202eb")),
    "reserved name": lambda: message(spec(name="__metadata__")),
    "name that is not UTF-8": lambda: message(spec(name="ab")).replace(b"ab", b"\xff\xfe"),
    "dtype 0": lambda: message(spec(dtype=0)),
    "unknown dtype": lambda: message(spec(dtype=99)),
    "role 0": lambda: message(spec(role=0)),
    "unknown role": lambda: message(spec(role=7)),
    "too many dimensions": lambda: message(spec(shape=[1] * 17)),
    "shape beyond 2^48": lambda: message(spec(shape=[1 << 25, 1 << 25])),
    "shape that overflows 64 bits": lambda: message(spec(shape=[(1 << 64) - 1] * 16)),
    "huge shape behind a zero": lambda: message(spec(shape=[0, 1 << 48, 1 << 48])),
    "gap": lambda: message(spec(), spec(name="v", offset=17)),
    "overlap": lambda: message(spec(), spec(name="v", offset=12)),
    "same place": lambda: message(spec(), spec(name="v", offset=0)),
    "first not at 0": lambda: message(spec(offset=4)),
    "offset beyond everything": lambda: message(spec(), spec(name="v", offset=(1 << 64) - 1)),
    "twice": lambda: message(spec(), spec(offset=16)),
    "rising item size": lambda: message(spec(), spec(name="v", dtype=pb.FLOAT64, offset=16)),
    "model beyond 2^48 bytes": lambda: message(
        spec(dtype=pb.INT8, shape=[MODEL_BYTES]), spec(name="v", dtype=pb.INT8, shape=[1], offset=MODEL_BYTES)
    ),
    "too large a message": lambda: bytes(MANIFEST_BYTES + 1),
    "eight million empty tensors": lambda: b"\x08\x01" + b"\x12\x00" * ((MANIFEST_BYTES - 2) // 2),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_bytes_are_refused_before_memory_is_spent(kind: str) -> None:
    data = HOSTILE[kind]()
    tracemalloc.start()
    try:
        with pytest.raises(BadManifest) as caught:
            Manifest.decode(data)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 256 << 10, "a refusal costs next to nothing, whatever sizes were claimed"
    assert len(caught.value.message) < 1000


def test_a_name_too_many_is_refused() -> None:
    tensors = [spec(name=str(i), shape=[], dtype=pb.BOOL, offset=i) for i in range(MAX_TENSORS + 1)]
    with pytest.raises(BadManifest, match=str(MAX_TENSORS)):
        Manifest.decode(message(*tensors))
    assert len(Manifest.decode(message(*tensors[:-1]))) == MAX_TENSORS


GOOD = Manifest.build(SMALL).encode()


@given(st.integers(0, len(GOOD) - 1))
def test_truncated(length: int) -> None:
    """A cut between two tensors leaves a valid, shorter manifest, which the schema hash tells apart."""
    try:
        shorter = Manifest.decode(GOOD[:length])
    except BadManifest:
        return
    with pytest.raises(BadManifest):
        Manifest.build(SMALL).require_same(shorter)


@given(st.integers(0, len(GOOD) * 8 - 1))
def test_a_flipped_bit_is_refused_or_seen(bit: int) -> None:
    damaged = bytearray(GOOD)
    damaged[bit // 8] ^= 1 << bit % 8
    try:
        manifest = Manifest.decode(bytes(damaged))
    except BadManifest:
        return
    assert manifest.schema_hash != Manifest.build(SMALL).schema_hash


@given(st.binary(max_size=200))
@example(b"\x08\x01")
def test_any_bytes_give_a_valid_manifest_or_the_error(data: bytes) -> None:
    try:
        manifest = Manifest.decode(data)
    except BadManifest:
        return
    assert Manifest.decode(manifest.encode()) == manifest


@pytest.mark.parametrize(
    "fault",
    [
        {"name": "\ud800"},
        {"dtype": "quint8"},
        {"shape": (-1,)},
        {"role": "gradient"},
    ],
)
def test_a_spec_that_exists_is_valid(fault: dict[str, object]) -> None:
    fields: dict[str, object] = {"name": "w", "dtype": "float32", "shape": (2,), "offset": 0, "role": "parameter"}
    with pytest.raises(BadManifest):
        TensorSpec(**(fields | fault))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("built_of", "words"),
    [
        ([("a", "float1", (1,), "parameter")], r"model\(\) make it one of: float64, "),
        ([("a", "float32", (1,), "weight")], "wanted one of parameter, buffer, control"),
        ([("a\n", "float32", (1,), "parameter")], "wanted 1 to 512 bytes .*; rename"),
        ([("\ud800", "float32", (1,), "parameter")], "is not UTF-8; rename"),
        ([("a", "float32", (1,), "parameter")] * 2, "'a' comes twice; rename"),
        ([("a", "float32", (1,) * 17, "parameter")], "at most 16 dimensions.*; split it"),
        ([(name, "float32", (1 << 47,), "parameter") for name in "abc"], "at most 281474976710656 are taken; make it"),
        (
            [(str(n), "bool", (), "buffer") for n in range(MAX_TENSORS + 1)],
            "has 100001 tensors, at most 100000 .*; make",
        ),
    ],
    ids=["dtype", "role", "name", "not-utf-8", "twice", "shape", "model", "tensors"],
)
def test_the_author_of_a_model_reads_what_to_do(built_of: list[Entry], words: str) -> None:
    with pytest.raises(BadManifest, match=words) as caught:
        Manifest.build(built_of)
    assert caught.value.field
    assert caught.value.value
    assert caught.value.bound


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\x08", "is truncated; whoever sent or wrote it is at fault: send it again"),
        (b"\x12\x7f", "send it again"),
        (b"\x12\x01\xff", "tensor 1 is damaged.*send it again"),
        (b"\x22\x00", "field 4 that format 1 does not know; update the older side"),
        (b"\x1a\x00", "frozen tensor 1 is damaged.*send it again"),
        (b"\x1a\x05\x0a\x01w\x12\x00", "frozen tensor 1 is damaged.*send it again"),
        (b"\x08\x02", "has format 2, this version reads 1; update the older side"),
        (b"\x0d\x00", "of wire type 5; update the older side"),
    ],
)
def test_a_manifest_that_cannot_be_read_says_what_to_do(data: bytes, words: str) -> None:
    with pytest.raises(BadManifest, match=words):
        Manifest.decode(data)


def test_a_manifest_that_no_peer_would_take_is_not_sent() -> None:
    long_names = Manifest.build((f"{i:06}" + "n" * 506, "bool", (), "buffer") for i in range(33_000))
    with pytest.raises(BadManifest, match=str(MANIFEST_BYTES)):
        long_names.encode()
