"""Tensors to bytes and back: every dtype that a model can hold, tied and odd tensors, bad bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from samples.manifests import manifests
from torch import Tensor, nn

from atoll.wire.errors import BadManifest, BadUpdate
from atoll.wire.manifest import DTYPE_BYTES, Manifest
from atoll.wire.tensors import DTYPES, load_state, manifest_of, views, write_state


def bytes_of(tensor: Tensor) -> bytes:
    """The tensor's bytes; equal bytes are equal tensors even where values compare unequal (NaN)."""
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


class Everything(nn.Module):
    """One parameter and one buffer of a dtype, and a scalar buffer."""

    def __init__(self, dtype: torch.dtype, fill: int) -> None:
        super().__init__()
        raw = torch.full((6 * dtype.itemsize,), fill, dtype=torch.uint8)
        self.weight = nn.Parameter(raw.view(dtype).view(2, 3), requires_grad=False)
        self.register_buffer("statistic", raw.view(dtype).view(3, 2).clone())
        self.register_buffer("count", raw[: dtype.itemsize].view(dtype).view(()).clone())


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Linear(3, 2, dtype=torch.float64))


def saved(module: nn.Module) -> tuple[Manifest, bytearray]:
    manifest = manifest_of(module)
    data = bytearray(manifest.num_bytes)
    write_state(manifest, module, data)
    return manifest, data


@pytest.mark.parametrize("name", DTYPE_BYTES)
def test_every_dtype_round_trips(name: str) -> None:
    assert DTYPES[name].itemsize == DTYPE_BYTES[name]
    source, target = Everything(DTYPES[name], 1), Everything(DTYPES[name], 0)
    manifest, data = saved(source)
    assert {spec.dtype for spec in manifest} == {name}
    assert {spec.name: spec.role for spec in manifest} == {
        "weight": "parameter", "statistic": "buffer", "count": "buffer",
    }  # fmt: skip
    kept = target.weight
    load_state(Manifest.decode(manifest.encode()), bytes(data), target)
    assert target.weight is kept, "in place"
    for key, value in source.state_dict().items():
        assert bytes_of(target.state_dict()[key]) == bytes_of(value)
        assert target.state_dict()[key].dtype == DTYPES[name]


def test_every_dtype_of_torch_travels_or_is_refused() -> None:
    """A dtype that a later torch brings shows up here: either it can be copied and belongs to the wire, or not."""
    for dtype in {value for value in vars(torch).values() if isinstance(value, torch.dtype)}:
        name = str(dtype).removeprefix("torch.")
        travels = name in DTYPE_BYTES
        opaque = name.startswith(("bits", "int1", "int2", "int3", "int4", "int5", "int6", "int7", "uint1", "uint2"))
        opaque = opaque or name.startswith(("uint3", "uint4", "uint5", "uint6", "uint7", "qint", "quint"))
        assert travels or opaque, f"{name}: give it a number in manifest.proto"


@given(manifests, st.data())
def test_views_share_memory(manifest: Manifest, data: st.DataObject) -> None:
    raw = data.draw(st.binary(min_size=manifest.num_bytes, max_size=manifest.num_bytes))
    buffer = bytearray(raw)
    found = views(manifest, buffer, writable=True)
    assert list(found) == [spec.name for spec in manifest]
    for spec in manifest:
        tensor = found[spec.name]
        assert (tensor.dtype, tuple(tensor.shape)) == (DTYPES[spec.dtype], spec.shape)
        assert bytes_of(tensor) == raw[spec.offset : spec.offset + spec.num_bytes]
        if spec.num_bytes:
            tensor.view(-1).view(torch.uint8).fill_(7)
    assert bytes(buffer) == b"\x07" * manifest.num_bytes


def test_non_contiguous_tensors_are_written_in_order() -> None:
    weight = torch.arange(6, dtype=torch.float32).view(2, 3)
    manifest = Manifest.build([("w", "float32", (3, 2), "parameter")])
    buffer = bytearray(manifest.num_bytes)
    write_state(manifest, {"w": weight.t()}, buffer)
    assert views(manifest, buffer, writable=False)["w"].flatten().tolist() == [0, 3, 1, 4, 2, 5]


def test_tied_weights_come_once_and_stay_tied() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 4)
            self.head = nn.Linear(4, 5, bias=False)
            self.head.weight = self.embed.weight

    source, target = Tied(), Tied()
    manifest, data = saved(source)
    assert [spec.name for spec in manifest] == ["embed.weight"]
    load_state(manifest, data, target)
    assert target.head.weight is target.embed.weight
    assert torch.equal(target.head.weight, source.head.weight)


def test_non_persistent_buffers_stay_out() -> None:
    module = nn.Linear(2, 2)
    module.register_buffer("cache", torch.zeros(3), persistent=False)
    assert {spec.name for spec in manifest_of(module)} == {"weight", "bias"}


def test_batch_norm_counters_keep_their_dtype() -> None:
    manifest, data = saved(model())
    counter = manifest["1.num_batches_tracked"]
    assert (counter.dtype, counter.shape, counter.role) == ("int64", (), "buffer")
    target = model()
    target[1].num_batches_tracked += 5  # type: ignore[index]
    load_state(manifest, data, target)
    assert target.state_dict()["1.num_batches_tracked"].dtype == torch.int64
    assert target.state_dict()["1.num_batches_tracked"] == 0


class ExtraState(nn.Linear):
    def get_extra_state(self) -> object:
        return {"anything": 1}

    def set_extra_state(self, state: object) -> None:
        pass


def sparse() -> nn.Module:
    module = nn.Module()
    module.register_buffer("adjacency", torch.eye(3).to_sparse())
    return module


def opaque() -> nn.Module:
    module = nn.Module()
    module.register_buffer("weights", torch.empty(4, dtype=torch.bits8))
    return module


@pytest.mark.parametrize(
    ("module", "field", "word"),
    [
        (ExtraState(2, 2), "_extra_state", "register it as a buffer"),
        (sparse(), "adjacency", "dense"),
        (opaque(), "weights", "bits8"),
        (nn.LazyLinear(2), "weight", "lazy"),
    ],
)
def test_what_cannot_travel_is_named(module: nn.Module, field: str, word: str) -> None:
    with pytest.raises(BadManifest, match=word) as caught:
        manifest_of(module)
    assert caught.value.field == field


def test_another_schema_changes_nothing() -> None:
    manifest, data = saved(model())
    target = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Linear(3, 2))
    before = {name: bytes_of(tensor) for name, tensor in target.state_dict().items()}
    with pytest.raises(BadManifest, match=r"2\.weight"):
        load_state(manifest, data, target)
    assert {name: bytes_of(tensor) for name, tensor in target.state_dict().items()} == before


def test_bytes_that_are_no_bool_are_refused() -> None:
    manifest = Manifest.build([("mask", "bool", (3,), "buffer")])
    with pytest.raises(BadUpdate, match="mask"):
        views(manifest, b"\x00\x01\x02", writable=False)


@pytest.mark.parametrize("size", [0, 11, 13])
def test_a_buffer_of_another_size_is_refused(size: int) -> None:
    manifest = Manifest.build([("w", "float32", (3,), "parameter")])
    with pytest.raises(BadManifest, match="12"):
        views(manifest, bytes(size), writable=False)


def test_a_read_only_buffer_gives_no_writable_views() -> None:
    manifest = Manifest.build([("w", "float32", (3,), "parameter")])
    with pytest.raises(ValueError, match="writable"):
        views(manifest, bytes(12), writable=True)


@pytest.mark.parametrize("tensor", [None, torch.zeros(2), torch.zeros(3, dtype=torch.float64)])
def test_write_state_is_strict(tensor: Tensor | None) -> None:
    manifest = Manifest.build([("w", "float32", (3,), "parameter")])
    with pytest.raises(BadManifest, match="manifest says float32"):
        write_state(manifest, {} if tensor is None else {"w": tensor}, bytearray(12))
