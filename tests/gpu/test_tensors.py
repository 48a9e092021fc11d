"""Tensors between the wire's bytes and a CUDA device, for every dtype that a model can hold."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from atoll.wire.manifest import DTYPE_BYTES
from atoll.wire.tensors import DTYPES, load_state, manifest_of, write_state

pytestmark = pytest.mark.gpu


class Everything(nn.Module):
    def __init__(self, dtype: torch.dtype, fill: int) -> None:
        super().__init__()
        raw = torch.full((6 * dtype.itemsize,), fill, dtype=torch.uint8, device="cuda")
        self.weight = nn.Parameter(raw.view(dtype).view(2, 3), requires_grad=False)
        self.register_buffer("count", raw[: dtype.itemsize].clone().view(dtype).view(()))


@pytest.mark.parametrize("name", DTYPE_BYTES)
def test_every_dtype_goes_to_the_device_and_back(name: str) -> None:
    source, target = Everything(DTYPES[name], 1), Everything(DTYPES[name], 0)
    manifest = manifest_of(source)
    data, again = bytearray(manifest.num_bytes), bytearray(manifest.num_bytes)
    write_state(manifest, source, data)
    assert bytes(data) == b"\x01" * manifest.num_bytes
    load_state(manifest, data, target)
    assert target.weight.is_cuda
    write_state(manifest, target, again)
    assert again == data
