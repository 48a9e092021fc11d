"""What a model is made of: ordered names, dtypes, shapes, offsets and roles of its contiguous bytes. Loads no torch.

Invariant: a `Manifest` that exists is valid. Tensors follow one another without gap or overlap, by falling item size,
so every tensor is aligned to its item size wherever the data itself is; names are unique, printable and UTF-8; all
sizes are bounded. Numbers are little endian, as on every machine that torch trains on.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from google.protobuf.message import DecodeError

from atoll.wire import manifest_pb2 as pb
from atoll.wire.errors import BadManifest
from atoll.wire.frozen import FrozenTensor, decode_frozen

Role = Literal["parameter", "buffer", "control"]
"""Of the model: parameter or buffer. A control is none of its tensors: a local rule has it travel beside the model."""
Entry = tuple[str, str, tuple[int, ...], Role]  # name, dtype, shape, role

MANIFEST_BYTES = 16 << 20  # as control.proto and runs.proto say
MODEL_BYTES = 1 << 48  # data of one model: 256 TiB
MAX_TENSORS = 100_000  # ten times the largest state dicts in use
MAX_DIMENSIONS = 16
NAME_BYTES = 512
FORMAT = 1

_TENSOR_BYTES = 1024  # an encoded TensorSpec within its bounds has at most 512 + 16 * 7 and a few bytes more
_RENAME = "rename its module or tensor in the app's model()"
_OLD = "update the older side"
_DAMAGED = "whoever sent or wrote it is at fault: send it again, and update that side if this comes again"
_RESERVED_NAMES = frozenset({"__metadata__"})  # a key of safetensors headers

DTYPE_BYTES: Mapping[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,  # two values to a byte; the shape counts bytes, as torch does
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "uint8": 1,
    "bool": 1,
    "complex128": 16,
    "complex64": 8,
    "complex32": 4,
}

_DTYPE_OF = {pb.DType.Value(name.upper()): name for name in DTYPE_BYTES}
_ROLES: Mapping[Role, pb.Role] = {"parameter": pb.PARAMETER, "buffer": pb.BUFFER, "control": pb.CONTROL}
_ROLE_OF: Mapping[int, Role] = {number: role for role, number in _ROLES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor: `offset` counts bytes from the start of the model's data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    role: Role

    def __post_init__(self) -> None:
        _check_name(self.name)
        if self.dtype not in DTYPE_BYTES:
            raise BadManifest(
                f"tensor {self.name!r} has dtype {self.dtype}, which does not travel; have the app's model() make it one of: "
                f"{', '.join(DTYPE_BYTES)}",
                field=self.name,
                value=self.dtype,
                bound="a known dtype",
            )
        if self.role not in _ROLES:
            bound = ", ".join(_ROLES)
            text = f"tensor {self.name!r} has role {self.role!r}: wanted one of {bound}"
            raise BadManifest(text, field=self.name, value=self.role, bound=bound)
        _check_shape(self.name, self.shape)

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)  # not slotted: the properties below are worked out once and kept
class Manifest:
    """The tensors of a model, in the order of their bytes."""

    tensors: tuple[TensorSpec, ...]
    frozen: tuple[FrozenTensor, ...] = ()  # that do not travel and must be the same everywhere

    def __post_init__(self) -> None:
        _check_order(self.tensors)
        if len(self.frozen) > MAX_TENSORS:
            raise _too_many_tensors(len(self.frozen))

    @classmethod
    def build(cls, entries: Iterable[Entry], frozen: Iterable[FrozenTensor] = ()) -> Manifest:
        """The manifest of tensors given as name, dtype, shape and role, in the model's order.

        Raises:
            BadManifest: a name, dtype, shape or the whole is out of bounds, or a name comes twice.
        """
        unplaced = [TensorSpec(name=n, dtype=d, shape=tuple(s), offset=0, role=r) for n, d, s, r in entries]
        unplaced.sort(key=lambda spec: -DTYPE_BYTES[spec.dtype])  # stable: the model's order within an item size
        placed, offset = [], 0
        for spec in unplaced:
            placed.append(TensorSpec(name=spec.name, dtype=spec.dtype, shape=spec.shape, offset=offset, role=spec.role))
            offset += spec.num_bytes
        return cls(tuple(placed), tuple(frozen))

    @cached_property
    def num_bytes(self) -> int:
        """Size of the model's data."""
        return sum(spec.num_bytes for spec in self.tensors)

    @cached_property
    def schema_hash(self) -> str:
        """SHA-256, hex, of names, dtypes, shapes and roles in order: equal hashes mean interchangeable bytes."""
        digest = hashlib.sha256(b"atoll/manifest/1\n")
        for spec in self.tensors:
            line = json.dumps([spec.name, spec.dtype, spec.shape, spec.role], separators=(",", ":"))
            digest.update(line.encode() + b"\n")
        return digest.hexdigest()

    @cached_property
    def model(self) -> Manifest:
        """The tensors of the model itself, without what travels beside it; their offsets are those of such a model."""
        own: list[Entry] = [(s.name, s.dtype, s.shape, s.role) for s in self.tensors if s.role != "control"]
        return self if len(own) == len(self.tensors) else Manifest.build(own, self.frozen)

    @cached_property
    def _by_name(self) -> dict[str, TensorSpec]:
        return {spec.name: spec for spec in self.tensors}

    def __getitem__(self, name: str) -> TensorSpec:
        return self._by_name[name]

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def __iter__(self) -> Iterator[TensorSpec]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def encode(self) -> bytes:
        """The serialised Manifest of manifest.proto: equal manifests give equal bytes.

        Raises:
            BadManifest: it would be over MANIFEST_BYTES, so no peer would take it.
        """
        message = pb.Manifest(format=FORMAT)
        for spec in self.tensors:
            message.tensors.add(
                name=spec.name,
                dtype=pb.DType.Value(spec.dtype.upper()),
                shape=spec.shape,
                offset=spec.offset,
                role=_ROLES[spec.role],
            )
        message.frozen.extend(tensor.message() for tensor in self.frozen)
        data = message.SerializeToString(deterministic=True)
        _check_encoded_size(len(data))
        return data

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """The manifest in serialised bytes from a peer or a file, read one tensor at a time.

        A refused message costs at most the memory of the tensors before the fault, whatever sizes it claims.

        Raises:
            BadManifest: truncated, too large, of another format, or breaking a rule of manifest.proto.
        """
        _check_encoded_size(len(data))
        format_seen = 0
        specs: list[TensorSpec] = []
        frozen: list[FrozenTensor] = []
        for number, value in _fields(data):
            if number == 1 and isinstance(value, int):
                format_seen = value
            elif number == 2 and isinstance(value, bytes):
                if len(specs) == MAX_TENSORS:
                    raise _too_many_tensors(f"more than {MAX_TENSORS}")
                specs.append(_decode_tensor(value, len(specs)))
            elif number == 3 and isinstance(value, bytes):
                if len(frozen) == MAX_TENSORS:
                    raise _too_many_tensors(f"more than {MAX_TENSORS}")
                frozen.append(decode_frozen(value, len(frozen)))
            else:
                raise BadManifest(
                    f"manifest has a field {number} that format {FORMAT} does not know; {_OLD}", field="format"
                )
        if format_seen != FORMAT:
            raise BadManifest(
                f"manifest has format {format_seen}, this version reads {FORMAT}; update the older side",
                field="format",
                value=format_seen,
                bound=FORMAT,
            )
        return cls(tuple(specs), tuple(frozen))

    def require_same(self, other: Manifest, *, site: str = "", run: str = "", round: int = 0) -> None:
        """Returns where `other` has the same schema as this one, which is the one wanted.

        Raises:
            BadManifest: names the first tensor that differs, what it is and what it should be.
        """
        if self.tensors == other.tensors:
            return
        name, found, wanted = _first_difference(self, other)
        raise BadManifest(
            f'tensor "{name}" is {found}, manifest says {wanted}; use the same app, version and [app] values',
            site=site,
            run=run,
            round=round,
            field=name,
            value=found,
            bound=wanted,
        )


def _first_difference(wanted: Manifest, found: Manifest) -> tuple[str, str, str]:
    """Name of the first tensor that differs, what it is, what it should be."""
    for spec in wanted:
        text = _describe(found[spec.name]) if spec.name in found else "absent"
        if text != _describe(spec):
            return spec.name, text, _describe(spec)
    for spec in found:
        if spec.name not in wanted:
            return spec.name, _describe(spec), "absent"
    position, spec = next((i, spec) for i, spec in enumerate(found) if spec != wanted.tensors[i])
    return spec.name, f"number {position + 1}", f"number {wanted.tensors.index(wanted[spec.name]) + 1}"


def _describe(spec: TensorSpec) -> str:
    return f"a {spec.role} of {spec.dtype} {list(spec.shape)}"


def _too_many_tensors(num_tensors: int | str) -> BadManifest:
    text = f"manifest has {num_tensors} tensors, at most {MAX_TENSORS} are taken; make the model of fewer"
    return BadManifest(text, field="tensors", value=num_tensors, bound=MAX_TENSORS)


def _check_name(name: str) -> None:
    try:
        num_bytes = len(name.encode())
    except UnicodeEncodeError:
        text = f"tensor name {name!r:.200} is not UTF-8; {_RENAME}"
        raise BadManifest(text, field="name", value=repr(name), bound="UTF-8") from None
    if not 1 <= num_bytes <= NAME_BYTES or not name.isprintable() or name in _RESERVED_NAMES:
        bound = f"1 to {NAME_BYTES} bytes of printable UTF-8, not __metadata__"
        text = f"tensor name {name!r:.200}: wanted {bound}; {_RENAME}"
        raise BadManifest(text, field="name", value=repr(name), bound=bound)


def _check_shape(name: str, shape: tuple[int, ...]) -> None:
    # A dimension of zero must not hide huge ones beside it: strides are computed from all of them.
    size = math.prod(max(dimension, 1) for dimension in shape)
    if len(shape) > MAX_DIMENSIONS or any(dimension < 0 for dimension in shape) or size > MODEL_BYTES:
        bound = f"at most {MAX_DIMENSIONS} dimensions, none negative, product at most 2^48"
        raise BadManifest(
            f"tensor {name!r:.200} has shape {list(shape)!s:.200}: wanted {bound}; split it in the app's model()",
            field=name,
            value=shape,
            bound=bound,
        )


def _check_order(tensors: tuple[TensorSpec, ...]) -> None:
    if len(tensors) > MAX_TENSORS:
        raise _too_many_tensors(len(tensors))
    seen: set[str] = set()
    end, item_bytes = 0, max(DTYPE_BYTES.values())
    for spec in tensors:
        if spec.name in seen:
            text = f"tensor {spec.name!r} comes twice; {_RENAME}"
            raise BadManifest(text, field=spec.name, value="twice", bound="once")
        if spec.offset != end:
            raise BadManifest(
                f"tensor {spec.name!r} starts at byte {spec.offset}, the one before it ends at {end}; {_DAMAGED}",
                field=spec.name,
                value=spec.offset,
                bound=end,
            )
        if DTYPE_BYTES[spec.dtype] > item_bytes:
            raise BadManifest(
                f"tensor {spec.name!r} of {spec.dtype} stands after smaller items; tensors go by falling item size; {_DAMAGED}",
                field=spec.name,
                value=spec.dtype,
                bound=f"at most {item_bytes} bytes an item",
            )
        seen.add(spec.name)
        end, item_bytes = end + spec.num_bytes, DTYPE_BYTES[spec.dtype]
    if end > MODEL_BYTES:
        text = f"model of {end} bytes, at most {MODEL_BYTES} are taken; make it smaller"
        raise BadManifest(text, field="tensors", value=end, bound=MODEL_BYTES)


def _check_encoded_size(num_bytes: int) -> None:
    if num_bytes > MANIFEST_BYTES:
        raise BadManifest(
            f"manifest of {num_bytes} bytes, at most {MANIFEST_BYTES} are taken; give the model fewer tensors or shorter "
            "names",
            field="manifest",
            value=num_bytes,
            bound=MANIFEST_BYTES,
        )


def _decode_tensor(data: bytes, position: int) -> TensorSpec:
    try:
        message = pb.TensorSpec.FromString(data)
    except DecodeError:
        raise BadManifest(
            f"manifest: tensor {position + 1} is damaged, or its name is not UTF-8; {_DAMAGED}",
            field=f"tensors[{position}]",
        ) from None
    dtype, role = _DTYPE_OF.get(message.dtype), _ROLE_OF.get(message.role)
    if dtype is None or role is None:
        raise BadManifest(
            f"manifest: tensor {position + 1} has dtype {message.dtype} and role {message.role}, one of them unknown here; {_OLD}",
            field=f"tensors[{position}]",
            value=f"dtype {message.dtype}, role {message.role}",
            bound="the enums of manifest.proto",
        )
    return TensorSpec(name=message.name, dtype=dtype, shape=tuple(message.shape), offset=message.offset, role=role)


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Number and value of each top-level protobuf field, one at a time.

    Parsing the message at once would let two bytes of input claim a whole object, eight million of them in 16 MiB.
    """
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        number, wire_type = key >> 3, key & 7
        value, position = _varint(data, position)
        if wire_type == 0:
            yield number, value
        elif wire_type == 2:
            if value > _TENSOR_BYTES or value > len(data) - position:
                raise BadManifest(
                    f"manifest is truncated, or a tensor in it is larger than {_TENSOR_BYTES} bytes; {_DAMAGED}",
                    field="tensors",
                    value=value,
                    bound=min(_TENSOR_BYTES, len(data) - position),
                )
            yield number, data[position : position + value]
            position += value
        else:
            raise BadManifest(f"manifest has a field {number} of wire type {wire_type}; {_OLD}", field="format")


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """The number at `position`, and the position behind it."""
    number = 0
    for shift in range(0, 64, 7):
        if position >= len(data):
            break
        byte = data[position]
        position += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, position
    raise BadManifest(f"manifest is truncated; {_DAMAGED}", field="tensors")
