"""Models on disk: a safetensors header, then the manifest's contiguous bytes. Loads no torch.

Invariant: a file under its final name is whole and durable. It is written beside, fsynced, renamed, and the folder is
fsynced; a crash at any point leaves the old file or none. Any safetensors reader can load the file. Four dtypes that
the format lacks are stored under a stand-in (complex as pairs of reals, exotic bytes as U8), named in the metadata.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from atoll.wire.checksum import crc32_of
from atoll.wire.errors import BadManifest, DiskFull, LocalError
from atoll.wire.manifest import DTYPE_BYTES, Manifest, Role, TensorSpec
from atoll.wire.room import NO_ROOM, reserve

HEADER_BYTES = 64 << 20  # longest header read; the format itself allows 100 MB
DATA_ALIGNMENT = 64  # of the data in the file, and so in a mapping of it: a cache line, and every item size
DRAFT_SUFFIX = ".draft"

_LENGTH = struct.Struct("<Q")
_BUFFERS_KEY, _CONTROLS_KEY, _DTYPES_KEY = "atoll.buffers", "atoll.controls", "atoll.dtypes"

_CODES: Final[Mapping[str, str]] = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "U8",
    "float4_e2m1fn_x2": "U8",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "complex128": "F64",
    "complex64": "C64",
    "complex32": "F16",
}
_PAIRS = frozenset({"complex128", "complex32"})  # stored as reals with a last dimension of two
_STAND_INS = _PAIRS | {"float8_e8m0fnu", "float4_e2m1fn_x2"}
_DTYPE_OF = {code: name for name, code in _CODES.items() if name not in _STAND_INS}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFile:
    """An open model: `map` is a read-only view of the manifest's bytes in the page cache. Close it, or use `with`."""

    manifest: Manifest
    data_offset: int  # of the data in the file, bytes
    num_bytes: int  # of the data
    map: memoryview
    metadata: Mapping[str, str]

    def close(self) -> None:
        """Lets go of the mapping; it ends once no view of it is left."""
        with suppress(BufferError):
            self.map.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@contextmanager
def create(path: Path, manifest: Manifest, metadata: Mapping[str, str] | None = None) -> Iterator[memoryview]:
    """A writable view of a new model's data; leaving the block makes the file durable at `path`, an error leaves none.

    The room is reserved before the first byte is written, so a full disk is an error here and never a crash later.
    Views of the data must not be written to after the block.

    Raises:
        DiskFull: there is no room for the file.
        LocalError: the file cannot be written for another reason.
    """
    header = header_of(manifest, metadata or {})
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}{DRAFT_SUFFIX}")
    try:
        with _storage_errors(path):
            mapping = _draft_file(draft, header, manifest.num_bytes)
        data = memoryview(mapping)[len(header) :]
        yield data
        with _storage_errors(path):
            mapping.flush()
            _publish(draft, path)
        with suppress(BufferError):  # tensors over the data may still live; the mapping ends with the last of them
            data.release()
    finally:
        draft.unlink(missing_ok=True)


def remove_drafts(folder: Path) -> None:
    """Removes what a process that was killed inside `create` left in `folder`."""
    for draft in folder.glob(f".*{DRAFT_SUFFIX}"):
        draft.unlink(missing_ok=True)


def open_model(path: Path) -> ModelFile:
    """The model in a file that `create` wrote, mapped and not read.

    Raises:
        BadManifest: the header is truncated, damaged or hostile, or the file has not the size that it says.
        LocalError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            header = _read_header(file.read(_LENGTH.size), file.fileno(), size, path)
            mapping = memoryview(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ))
    except OSError as error:
        raise LocalError(f"{path}: cannot be read: {error.strerror}") from None
    manifest, metadata = _parse_header(header, path)
    data_offset = _LENGTH.size + len(header)
    if size - data_offset != manifest.num_bytes:
        raise BadManifest(
            f"{path} holds {size - data_offset} bytes of data, its header says {manifest.num_bytes}",
            field="data",
            value=size - data_offset,
            bound=manifest.num_bytes,
        )
    return ModelFile(
        manifest=manifest,
        data_offset=data_offset,
        num_bytes=manifest.num_bytes,
        map=mapping[data_offset:],
        metadata=metadata,
    )


@contextmanager
def map_file(path: Path) -> Iterator[memoryview]:
    """A read-only view of a whole file, which is not empty. Raises LocalError where it cannot be read."""
    try:
        with path.open("rb") as file:
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise LocalError(f"{path}: cannot be read: {error}") from None
    view = memoryview(mapping)
    yield view
    with suppress(BufferError):  # a view of it is still in use; the mapping ends with the last one
        view.release()


def crc32_of_file(path: Path) -> int:
    """The crc32 (zlib) of the data of a model file. Raises as `open_model` does."""
    with open_model(path) as model:
        return crc32_of(model.map)


def fsync_folder(folder: Path) -> None:
    """Makes the names in `folder` durable: after a rename, the file is found under its new name whatever happens."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _storage_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in NO_ROOM:
            raise DiskFull(f"{path}: no room on the disk; free some, then try again") from None
        raise LocalError(f"{path}: cannot be written: {error.strerror}") from None


def _draft_file(draft: Path, header: bytes, num_bytes: int) -> mmap.mmap:
    """A mapping of a new file whose room is reserved and whose header is written."""
    with draft.open("x+b") as file:
        reserve(file.fileno(), len(header) + num_bytes)
        file.write(header)
        file.flush()
        return mmap.mmap(file.fileno(), len(header) + num_bytes)


def _publish(draft: Path, path: Path) -> None:
    descriptor = os.open(draft, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    draft.replace(path)
    fsync_folder(path.parent)


def header_of(manifest: Manifest, metadata: Mapping[str, str]) -> bytes:
    """What stands before the data in a model file: for a transfer that puts the data where it stays.

    Length and JSON of a safetensors header, padded so that the data is aligned.
    """
    more = {
        _BUFFERS_KEY: json.dumps([spec.name for spec in manifest if spec.role == "buffer"]),
        _DTYPES_KEY: json.dumps({spec.name: spec.dtype for spec in manifest if spec.dtype in _STAND_INS}),
    }
    if controls := [spec.name for spec in manifest if spec.role == "control"]:
        more[_CONTROLS_KEY] = json.dumps(controls)
    table: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata, **more}}
    for spec in manifest:
        shape = [*spec.shape, 2] if spec.dtype in _PAIRS else list(spec.shape)
        span = [spec.offset, spec.offset + spec.num_bytes]
        table[spec.name] = {"dtype": _CODES[spec.dtype], "shape": shape, "data_offsets": span}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(_LENGTH.size + len(text)) % DATA_ALIGNMENT)
    return _LENGTH.pack(len(text)) + text


def _read_header(prefix: bytes, descriptor: int, size: int, path: Path) -> bytes:
    length = _LENGTH.unpack(prefix)[0] if len(prefix) == _LENGTH.size else -1
    if not 0 <= length <= min(HEADER_BYTES, size - _LENGTH.size):
        raise BadManifest(
            f"{path} is no model file, or truncated: its header claims {length} bytes",
            field="header",
            value=length,
            bound=min(HEADER_BYTES, size),
        )
    return os.pread(descriptor, length, _LENGTH.size)


def _parse_header(header: bytes, path: Path) -> tuple[Manifest, dict[str, str]]:
    try:
        table = json.loads(header)
        metadata = {str(key): str(value) for key, value in table.pop("__metadata__", {}).items()}
        roles: dict[str, Role] = dict.fromkeys(json.loads(metadata.pop(_BUFFERS_KEY, "[]")), "buffer")
        roles |= dict.fromkeys(json.loads(metadata.pop(_CONTROLS_KEY, "[]")), "control")
        dtypes = dict(json.loads(metadata.pop(_DTYPES_KEY, "{}")))
        specs = [
            _parse_tensor(name, entry, roles.get(name, "parameter"), dtypes.get(name)) for name, entry in table.items()
        ]
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        raise BadManifest(f"{path}: the header is damaged, or not one of a model file", field="header") from None
    return Manifest(tuple(sorted(specs, key=lambda spec: spec.offset))), metadata


def _parse_tensor(name: str, entry: dict[str, Any], role: Role, stored_as: str | None) -> TensorSpec:
    dtype = stored_as if stored_as is not None else _DTYPE_OF[entry["dtype"]]
    start, end = (int(offset) for offset in entry["data_offsets"])
    shape = tuple(int(dimension) for dimension in entry["shape"])
    if dtype not in DTYPE_BYTES or _CODES[dtype] != entry["dtype"] or (dtype in _PAIRS and shape[-1:] != (2,)):
        raise ValueError("stand-in does not match")
    spec = TensorSpec(name=name, dtype=dtype, shape=shape[:-1] if dtype in _PAIRS else shape, offset=start, role=role)
    if end - start != spec.num_bytes:
        raise ValueError("offsets do not match the shape")
    return spec
