"""Tensors over contiguous bytes, described by a manifest. The only module of wire/ that loads torch.

A view shares the memory of its buffer: nothing is copied, and nothing is unpickled.
Assumes a little-endian machine, which is all that torch trains on.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import warnings
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from atoll.wire.errors import BadManifest, BadUpdate
from atoll.wire.frozen import FrozenTensor
from atoll.wire.manifest import DTYPE_BYTES, Entry, Manifest, Role, TensorSpec

Parameters = Literal["all", "trainable"]
"""Which parameters of a model travel: every one, or only those that require gradients."""

Buffer = bytes | bytearray | memoryview | mmap.mmap

DTYPES: Mapping[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_BYTES}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def state_of(module: nn.Module, parameters: Parameters = "all") -> dict[str, tuple[Tensor, Role]]:
    """The tensors of the module's state dict, themselves rather than copies, each with its role.

    Non-persistent buffers stay out, as they do of the state dict. A tensor that has several names (tied weights)
    comes once, under its first name: writing to it reaches all of them.

    Raises:
        BadManifest: an entry is no tensor, is neither parameter nor buffer, or is not materialised yet.
    """
    its_parameters = {id(parameter) for parameter in module.parameters()}
    buffers = {id(buffer) for buffer in module.buffers()}
    state: dict[str, tuple[Tensor, Role]] = {}
    seen: set[int] = set()
    for name, value in module.state_dict(keep_vars=True).items():
        if id(value) in seen:
            continue
        seen.add(id(value))
        if id(value) not in its_parameters and id(value) not in buffers:
            raise BadManifest(
                f"state dict entry {name!r} ({type(value).__name__}) is neither a parameter nor a buffer, so it cannot "
                "travel; register it as a buffer",
                field=name,
                value=type(value).__name__,
                bound="parameter or buffer",
            )
        if is_lazy(value):
            raise BadManifest(
                f"tensor {name!r} has no shape yet; run one batch through lazy modules in the app's model()",
                field=name,
                value="uninitialised",
            )
        is_parameter = id(value) in its_parameters
        if is_parameter and parameters == "trainable" and not value.requires_grad:
            continue
        state[name] = (value, "parameter" if is_parameter else "buffer")
    return state


def frozen_of(module: nn.Module) -> tuple[FrozenTensor, ...]:
    """The parameters that require no gradients, each with the SHA-256 of dtype, shape and bytes. Reads them all."""
    trainable = state_of(module, "trainable")
    frozen = {name: tensor for name, (tensor, _) in state_of(module).items() if name not in trainable}
    return tuple(FrozenTensor(name=name, sha256=_digest(tensor.detach())) for name, tensor in frozen.items())


def _digest(tensor: Tensor) -> bytes:
    described = json.dumps([_NAMES.get(tensor.dtype, str(tensor.dtype)), list(tensor.shape)], separators=(",", ":"))
    digest = hashlib.sha256(b"atoll/frozen/1\n" + described.encode() + b"\n")
    flat = (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).cpu().contiguous().reshape(-1)
    digest.update(flat.view(torch.uint8).numpy().data)
    return digest.digest()


def manifest_of(module: nn.Module, parameters: Parameters = "all", frozen: tuple[FrozenTensor, ...] = ()) -> Manifest:
    """The manifest of the module's state dict (see `state_of` for tied tensors), or of the trainable part of it.

    Args:
        frozen: what goes into it beside; `frozen_of` the module, where another machine is to compare.

    Raises:
        BadManifest: an entry cannot travel: no dense tensor, an unknown dtype, a bad name.
    """
    entries: list[Entry] = []
    for name, (tensor, role) in state_of(module, parameters).items():
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise BadManifest(
                f"tensor {name!r} is {tensor.layout}, quantised: {tensor.is_quantized}; only dense tensors travel",
                field=name,
                value=tensor.layout,
                bound="torch.strided",
            )
        dtype = _NAMES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
        entries.append((name, dtype, tuple(tensor.shape), role))
    if parameters == "trainable" and not any(role == "parameter" for *_, role in entries):
        raise BadManifest(
            'no parameter of the model requires gradients, so that parameters = "trainable" leaves nothing to learn; '
            "have the app's model() leave some trainable",
            field="strategy.parameters",
            value="trainable",
        )
    return Manifest.build(entries, frozen)


def views(manifest: Manifest, buffer: Buffer, *, writable: bool) -> dict[str, Tensor]:
    """Tensors by name over the manifest's bytes in `buffer`, without a copy; they keep the buffer alive.

    With `writable` false nothing may write to them (torch has no read-only tensors: over a read-only mapping a write
    ends the process), and the bytes are checked where not every byte is a value.

    Raises:
        BadManifest: the buffer has not the manifest's size.
        BadUpdate: a bool is neither 0 nor 1.
        ValueError: `writable` over a read-only buffer.
    """
    data = memoryview(buffer).cast("B")
    if data.nbytes != manifest.num_bytes:
        raise BadManifest(
            f"buffer holds {data.nbytes} bytes, manifest says {manifest.num_bytes}",
            field="data",
            value=data.nbytes,
            bound=manifest.num_bytes,
        )
    if writable and data.readonly:
        raise ValueError("writable views need a writable buffer")
    found = {spec.name: _view(spec, data) for spec in manifest}
    if not writable:
        _check_bools(found)
    return found


def write_state(manifest: Manifest, source: nn.Module | Mapping[str, Tensor], buffer: Buffer) -> None:
    """Copies the tensors of a module or mapping, from whatever device, into the manifest's bytes in `buffer`.

    Controls begin as zeros where the source, as a module, has none.

    Raises:
        BadManifest: a tensor is missing or has another dtype or shape; the buffer has another size.
    """
    tensors = (
        {name: tensor for name, (tensor, _) in state_of(source).items()} if isinstance(source, nn.Module) else source
    )
    targets = views(manifest, buffer, writable=True)
    given = [spec for spec in manifest if spec.role != "control" or spec.name in tensors]
    for spec in given:
        _require_fit(spec, tensors.get(spec.name))
    with torch.no_grad():
        for name in targets.keys() - {spec.name for spec in given}:
            targets[name].zero_()
        for spec in given:
            targets[spec.name].copy_(tensors[spec.name])


def load_state(manifest: Manifest, buffer: Buffer, module: nn.Module) -> None:
    """Copies the manifest's bytes into the module's own tensors, in place and strictly: all of them, or none.

    Controls are no tensors of the module, and left out. Tensors that the manifest names as frozen stay as they are.

    Raises:
        BadManifest: the module has another schema, or the buffer another size.
        BadUpdate: a bool is neither 0 nor 1.
    """
    parameters: Parameters = "trainable" if manifest.frozen else "all"
    manifest.model.require_same(manifest_of(module, parameters))
    sources = views(manifest, buffer, writable=False)
    with torch.no_grad():
        for name, (target, _) in state_of(module, parameters).items():
            target.copy_(sources[name])


def _view(spec: TensorSpec, data: memoryview) -> Tensor:
    dtype = DTYPES[spec.dtype]
    if spec.num_elements == 0:
        return torch.empty(spec.shape, dtype=dtype)
    with warnings.catch_warnings():
        # Said once a process about read-only buffers; `views` documents what it warns of.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        flat = torch.frombuffer(data, dtype=dtype, count=spec.num_elements, offset=spec.offset)
    return flat.view(spec.shape)


def _check_bools(tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype == torch.bool and tensor.numel() and int(tensor.view(torch.uint8).max()) > 1:
            raise BadUpdate(f'tensor "{name}" is bool and holds bytes other than 0 and 1', field=name, bound="0 or 1")


def _require_fit(spec: TensorSpec, tensor: Tensor | None) -> None:
    wanted = f"{spec.dtype} {list(spec.shape)}"
    found = "absent" if tensor is None else f"{_NAMES.get(tensor.dtype, tensor.dtype)} {list(tensor.shape)}"
    if found != wanted:
        raise BadManifest(
            f'tensor "{spec.name}" is {found}, manifest says {wanted}', field=spec.name, value=found, bound=wanted
        )
