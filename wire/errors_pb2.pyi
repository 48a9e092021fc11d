from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class ErrorDetail(_message.Message):
    __slots__ = ("kind", "message", "site", "run", "round", "field", "value", "bound")
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    SITE_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    BOUND_FIELD_NUMBER: _ClassVar[int]
    kind: str
    message: str
    site: str
    run: str
    round: int
    field: str
    value: str
    bound: str
    def __init__(self, kind: _Optional[str] = ..., message: _Optional[str] = ..., site: _Optional[str] = ..., run: _Optional[str] = ..., round: _Optional[int] = ..., field: _Optional[str] = ..., value: _Optional[str] = ..., bound: _Optional[str] = ...) -> None: ...
