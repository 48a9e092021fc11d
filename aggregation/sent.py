"""An update as its receiver reads it: the differences that a site's own state has to keep step with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from atoll.aggregation.blocks import blocks, byte_view
from atoll.aggregation.layout import UpdateLayout
from atoll.wire.tensors import Buffer


class Sent(Mapping[str, Tensor]):
    """Differences by name of the tensor, of all that is averaged; decoded when asked for.

    Each is float64, or complex128, on the CPU: what the codec left of it, to the last bit.
    """

    def __init__(self, layout: UpdateLayout, payload: Buffer) -> None:
        self._entries = {entry.spec.name: entry for entry in layout.means}
        self._data = byte_view(payload)

    def __getitem__(self, name: str) -> Tensor:
        entry = self._entries[name]
        region = self._data[entry.offset : entry.offset + entry.num_bytes]
        values_V = torch.empty(entry.num_values, dtype=torch.float64)
        for start, stop in blocks(entry.num_values):
            entry.encoding.decode(region, start, values_V[start:stop])
        if entry.spec.dtype.startswith("complex"):
            return torch.view_as_complex(values_V.view(*entry.spec.shape, 2))
        return values_V.view(entry.spec.shape)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
