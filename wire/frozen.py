"""Tensors that take part in a run without travelling: each machine has its own, and they must be the same everywhere.

The manifest names each with a digest, which a site compares with its own before it takes part. Loads no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from atoll.wire import manifest_pb2 as pb
from atoll.wire.errors import BadManifest

DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenTensor:
    """`sha256` is over dtype, shape and bytes (`wire.tensors.frozen_of`)."""

    name: str
    sha256: bytes

    def message(self) -> pb.FrozenTensor:
        return pb.FrozenTensor(name=self.name, sha256=self.sha256)


def decode_frozen(data: bytes, position: int) -> FrozenTensor:
    """The frozen tensor in its serialised message, number `position` of a manifest. Raises BadManifest."""
    try:
        message = pb.FrozenTensor.FromString(data)
    except DecodeError:
        message = pb.FrozenTensor()
    if not message.name or len(message.sha256) != DIGEST_BYTES:
        raise BadManifest(
            f"manifest: frozen tensor {position + 1} is damaged; whoever sent or wrote it is at fault: send it again, and "
            "update that side if this comes again",
            field=f"frozen[{position}]",
            value=len(message.sha256),
            bound=DIGEST_BYTES,
        )
    return FrozenTensor(name=message.name, sha256=message.sha256)


def require_same_frozen(wanted: Sequence[FrozenTensor], found: Sequence[FrozenTensor]) -> None:
    """Returns where `found` are the frozen tensors that the run was submitted with.

    Raises:
        BadManifest: names the first tensor that differs.
    """
    here = {tensor.name: tensor.sha256.hex() for tensor in found}
    there = {tensor.name: tensor.sha256.hex() for tensor in wanted}
    for name in [*there, *here]:
        if here.get(name) != there.get(name):
            value, bound = here.get(name, "not frozen here"), there.get(name, "not frozen in this run")
            raise BadManifest(
                f'frozen tensor "{name}" differs from that of the run: {value:.16} here, {bound:.16} there; have the '
                "app load the same file of weights everywhere, of the same version and with the same [app] values",
                field=name,
                value=value,
                bound=bound,
            )
