"""How a model version travels to the sites where a codec makes it smaller: the same bytes to every site.

The server keeps each version in full. What sites begin a round with, and judge, is what the codec left of it; they send
the difference to that. Parameters are encoded; buffers and tensors of other dtypes travel as they are.

Invariant: the bytes are a function of the version, the job's seed and the codec, so they can be made again at any time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from atoll.aggregation.blocks import blocks, byte_view, reals
from atoll.aggregation.codecs.encoding import Codec
from atoll.aggregation.encode import encode_update
from atoll.aggregation.layout import HEADER_BYTES, update_layout
from atoll.aggregation.rounding import Rounding, rounding_key
from atoll.wire.errors import BadUpdate
from atoll.wire.manifest import Manifest
from atoll.wire.tensors import Buffer, views


class Download:
    """The form in which versions of one run go to its sites."""

    def __init__(self, manifest: Manifest, codec: Codec, seed: int) -> None:
        self._manifest = manifest
        self._layout = update_layout(manifest, codec, "first")
        self._secret = hashlib.sha256(f"atoll/download {seed}".encode()).digest()

    @property
    def num_bytes(self) -> int:
        return self._layout.num_bytes

    def write(self, model: Buffer, version: int, out: Buffer) -> None:
        """Encodes a version's bytes into `out` of `num_bytes`.

        Raises:
            BadUpdate: a value is beyond what the codec can write; names the tensor.
        """
        values = views(self._manifest, model, writable=False)
        encode_update(
            self._layout,
            _Zeros(values),
            values,
            out,
            rounding=Rounding(rounding_key(self._secret, version)),
            bound=float("inf"),
        )

    def read(self, payload: Buffer, out: Buffer) -> None:
        """Writes the bytes of the model that `payload` stands for into `out`, as the manifest lays them out.

        Raises:
            BadUpdate: the payload is of another model or codec, or damaged.
        """
        data, layout = byte_view(payload), self._layout
        if data.numel() != layout.num_bytes or bytes(memoryview(payload)[:HEADER_BYTES]) != layout.header:
            raise BadUpdate("the model version was encoded for another model or codec; update the older side")
        tensors = views(self._manifest, out, writable=True)
        for entry in layout.means:
            region = data[entry.offset : entry.offset + entry.num_bytes]
            values_V = reals(tensors[entry.spec.name])
            for start, stop in blocks(entry.num_values):
                block_P = torch.empty(stop - start, dtype=torch.float64)
                entry.encoding.decode(region, start, block_P)
                values_V[start:stop].copy_(block_P)
        whole = byte_view(out)
        for raw in layout.raws:
            place = slice(raw.spec.offset, raw.spec.offset + raw.spec.num_bytes)
            whole[place].copy_(data[raw.offset : raw.offset + raw.num_bytes])


class _Zeros(Mapping[str, Tensor]):
    """A zero of each tensor, made when it is asked for: the difference to it is the value itself."""

    def __init__(self, like: Mapping[str, Tensor]) -> None:
        self._like = like

    def __getitem__(self, name: str) -> Tensor:
        return torch.zeros_like(self._like[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._like)

    def __len__(self) -> int:
        return len(self._like)
