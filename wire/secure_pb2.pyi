from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SecurePlan(_message.Message):
    __slots__ = ("opening", "hash")
    OPENING_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    opening: bytes
    hash: bytes
    def __init__(self, opening: _Optional[bytes] = ..., hash: _Optional[bytes] = ...) -> None: ...

class SecureKeys(_message.Message):
    __slots__ = ("advertised",)
    ADVERTISED_FIELD_NUMBER: _ClassVar[int]
    advertised: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, advertised: _Optional[_Iterable[bytes]] = ...) -> None: ...

class SecureRing(_message.Message):
    __slots__ = ("nonces",)
    NONCES_FIELD_NUMBER: _ClassVar[int]
    nonces: _containers.RepeatedCompositeFieldContainer[SecureNonce]
    def __init__(self, nonces: _Optional[_Iterable[_Union[SecureNonce, _Mapping]]] = ...) -> None: ...

class SecureNonce(_message.Message):
    __slots__ = ("site", "nonce")
    SITE_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    site: int
    nonce: bytes
    def __init__(self, site: _Optional[int] = ..., nonce: _Optional[bytes] = ...) -> None: ...

class SecureShares(_message.Message):
    __slots__ = ("sharing", "items")
    SHARING_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    sharing: bytes
    items: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, sharing: _Optional[bytes] = ..., items: _Optional[_Iterable[bytes]] = ...) -> None: ...

class SecureConfirmations(_message.Message):
    __slots__ = ("confirmed",)
    CONFIRMED_FIELD_NUMBER: _ClassVar[int]
    confirmed: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, confirmed: _Optional[_Iterable[bytes]] = ...) -> None: ...

class SecureEnd(_message.Message):
    __slots__ = ("version", "reason")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    version: int
    reason: str
    def __init__(self, version: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class SecureShared(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, items: _Optional[_Iterable[bytes]] = ...) -> None: ...

class SecureInput(_message.Message):
    __slots__ = ("declared", "crc32")
    DECLARED_FIELD_NUMBER: _ClassVar[int]
    CRC32_FIELD_NUMBER: _ClassVar[int]
    declared: bytes
    crc32: int
    def __init__(self, declared: _Optional[bytes] = ..., crc32: _Optional[int] = ...) -> None: ...

class SecureRecord(_message.Message):
    __slots__ = ("threat", "num_sites", "threshold", "num_corrupt", "fewest_survivors", "sessions", "dropped", "liars", "parts")
    class LiarsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    THREAT_FIELD_NUMBER: _ClassVar[int]
    NUM_SITES_FIELD_NUMBER: _ClassVar[int]
    THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    NUM_CORRUPT_FIELD_NUMBER: _ClassVar[int]
    FEWEST_SURVIVORS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    LIARS_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    threat: str
    num_sites: int
    threshold: int
    num_corrupt: int
    fewest_survivors: int
    sessions: int
    dropped: _containers.RepeatedScalarFieldContainer[str]
    liars: _containers.ScalarMap[str, str]
    parts: int
    def __init__(self, threat: _Optional[str] = ..., num_sites: _Optional[int] = ..., threshold: _Optional[int] = ..., num_corrupt: _Optional[int] = ..., fewest_survivors: _Optional[int] = ..., sessions: _Optional[int] = ..., dropped: _Optional[_Iterable[str]] = ..., liars: _Optional[_Mapping[str, str]] = ..., parts: _Optional[int] = ...) -> None: ...
