from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MemberStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MEMBER_STATUS_UNSPECIFIED: _ClassVar[MemberStatus]
    ACTIVE: _ClassVar[MemberStatus]
    REVOKED: _ClassVar[MemberStatus]
MEMBER_STATUS_UNSPECIFIED: MemberStatus
ACTIVE: MemberStatus
REVOKED: MemberStatus

class Member(_message.Message):
    __slots__ = ("site", "organisation", "signing_key", "status")
    SITE_FIELD_NUMBER: _ClassVar[int]
    ORGANISATION_FIELD_NUMBER: _ClassVar[int]
    SIGNING_KEY_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    site: str
    organisation: str
    signing_key: bytes
    status: MemberStatus
    def __init__(self, site: _Optional[str] = ..., organisation: _Optional[str] = ..., signing_key: _Optional[bytes] = ..., status: _Optional[_Union[MemberStatus, str]] = ...) -> None: ...

class MemberList(_message.Message):
    __slots__ = ("federation", "version", "members", "signed_at_unix_s")
    FEDERATION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    SIGNED_AT_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    federation: str
    version: int
    members: _containers.RepeatedCompositeFieldContainer[Member]
    signed_at_unix_s: int
    def __init__(self, federation: _Optional[str] = ..., version: _Optional[int] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., signed_at_unix_s: _Optional[int] = ...) -> None: ...

class SignedMemberList(_message.Message):
    __slots__ = ("member_list", "signature")
    MEMBER_LIST_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    member_list: bytes
    signature: bytes
    def __init__(self, member_list: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...
