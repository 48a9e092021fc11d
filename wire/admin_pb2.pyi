from atoll.wire import control_pb2 as _control_pb2
from atoll.wire import members_pb2 as _members_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AddRequest(_message.Message):
    __slots__ = ("name", "organisation", "role", "valid_s")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ORGANISATION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    VALID_S_FIELD_NUMBER: _ClassVar[int]
    name: str
    organisation: str
    role: str
    valid_s: int
    def __init__(self, name: _Optional[str] = ..., organisation: _Optional[str] = ..., role: _Optional[str] = ..., valid_s: _Optional[int] = ...) -> None: ...

class AddReply(_message.Message):
    __slots__ = ("token",)
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    token: str
    def __init__(self, token: _Optional[str] = ...) -> None: ...

class PendingRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PendingReply(_message.Message):
    __slots__ = ("current", "pending", "revoked")
    CURRENT_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    REVOKED_FIELD_NUMBER: _ClassVar[int]
    current: _members_pb2.SignedMemberList
    pending: _containers.RepeatedCompositeFieldContainer[_members_pb2.Member]
    revoked: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, current: _Optional[_Union[_members_pb2.SignedMemberList, _Mapping]] = ..., pending: _Optional[_Iterable[_Union[_members_pb2.Member, _Mapping]]] = ..., revoked: _Optional[_Iterable[str]] = ...) -> None: ...

class PublishReply(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    def __init__(self, version: _Optional[int] = ...) -> None: ...

class RevokeRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class RevokeReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SitesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SitesReply(_message.Message):
    __slots__ = ("sites", "server_unix_s")
    SITES_FIELD_NUMBER: _ClassVar[int]
    SERVER_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    sites: _containers.RepeatedCompositeFieldContainer[SiteState]
    server_unix_s: float
    def __init__(self, sites: _Optional[_Iterable[_Union[SiteState, _Mapping]]] = ..., server_unix_s: _Optional[float] = ...) -> None: ...

class SiteState(_message.Message):
    __slots__ = ("site", "organisation", "state", "connected", "last_heard_unix_s", "capacity", "runs", "certificate_expires_unix_s", "software")
    SITE_FIELD_NUMBER: _ClassVar[int]
    ORGANISATION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    LAST_HEARD_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_EXPIRES_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_FIELD_NUMBER: _ClassVar[int]
    site: str
    organisation: str
    state: str
    connected: bool
    last_heard_unix_s: float
    capacity: _control_pb2.Capacity
    runs: _containers.RepeatedScalarFieldContainer[str]
    certificate_expires_unix_s: float
    software: str
    def __init__(self, site: _Optional[str] = ..., organisation: _Optional[str] = ..., state: _Optional[str] = ..., connected: _Optional[bool] = ..., last_heard_unix_s: _Optional[float] = ..., capacity: _Optional[_Union[_control_pb2.Capacity, _Mapping]] = ..., runs: _Optional[_Iterable[str]] = ..., certificate_expires_unix_s: _Optional[float] = ..., software: _Optional[str] = ...) -> None: ...
