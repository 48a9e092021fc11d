from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DTYPE_UNSPECIFIED: _ClassVar[DType]
    FLOAT64: _ClassVar[DType]
    FLOAT32: _ClassVar[DType]
    FLOAT16: _ClassVar[DType]
    BFLOAT16: _ClassVar[DType]
    FLOAT8_E4M3FN: _ClassVar[DType]
    FLOAT8_E5M2: _ClassVar[DType]
    FLOAT8_E4M3FNUZ: _ClassVar[DType]
    FLOAT8_E5M2FNUZ: _ClassVar[DType]
    INT64: _ClassVar[DType]
    INT32: _ClassVar[DType]
    INT16: _ClassVar[DType]
    INT8: _ClassVar[DType]
    UINT64: _ClassVar[DType]
    UINT32: _ClassVar[DType]
    UINT16: _ClassVar[DType]
    UINT8: _ClassVar[DType]
    BOOL: _ClassVar[DType]
    COMPLEX64: _ClassVar[DType]
    COMPLEX128: _ClassVar[DType]
    FLOAT8_E8M0FNU: _ClassVar[DType]
    COMPLEX32: _ClassVar[DType]
    FLOAT4_E2M1FN_X2: _ClassVar[DType]

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    PARAMETER: _ClassVar[Role]
    BUFFER: _ClassVar[Role]
    CONTROL: _ClassVar[Role]
DTYPE_UNSPECIFIED: DType
FLOAT64: DType
FLOAT32: DType
FLOAT16: DType
BFLOAT16: DType
FLOAT8_E4M3FN: DType
FLOAT8_E5M2: DType
FLOAT8_E4M3FNUZ: DType
FLOAT8_E5M2FNUZ: DType
INT64: DType
INT32: DType
INT16: DType
INT8: DType
UINT64: DType
UINT32: DType
UINT16: DType
UINT8: DType
BOOL: DType
COMPLEX64: DType
COMPLEX128: DType
FLOAT8_E8M0FNU: DType
COMPLEX32: DType
FLOAT4_E2M1FN_X2: DType
ROLE_UNSPECIFIED: Role
PARAMETER: Role
BUFFER: Role
CONTROL: Role

class TensorSpec(_message.Message):
    __slots__ = ("name", "dtype", "shape", "offset", "role")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: DType
    shape: _containers.RepeatedScalarFieldContainer[int]
    offset: int
    role: Role
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[_Union[DType, str]] = ..., shape: _Optional[_Iterable[int]] = ..., offset: _Optional[int] = ..., role: _Optional[_Union[Role, str]] = ...) -> None: ...

class FrozenTensor(_message.Message):
    __slots__ = ("name", "sha256")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    name: str
    sha256: bytes
    def __init__(self, name: _Optional[str] = ..., sha256: _Optional[bytes] = ...) -> None: ...

class Manifest(_message.Message):
    __slots__ = ("format", "tensors", "frozen")
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    FROZEN_FIELD_NUMBER: _ClassVar[int]
    format: int
    tensors: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    frozen: _containers.RepeatedCompositeFieldContainer[FrozenTensor]
    def __init__(self, format: _Optional[int] = ..., tensors: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ..., frozen: _Optional[_Iterable[_Union[FrozenTensor, _Mapping]]] = ...) -> None: ...
