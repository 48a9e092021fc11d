from atoll.wire import errors_pb2 as _errors_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Card(_message.Message):
    __slots__ = ("federation", "site", "zone", "address", "certificate", "client_key")
    FEDERATION_FIELD_NUMBER: _ClassVar[int]
    SITE_FIELD_NUMBER: _ClassVar[int]
    ZONE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    CLIENT_KEY_FIELD_NUMBER: _ClassVar[int]
    federation: str
    site: str
    zone: str
    address: str
    certificate: bytes
    client_key: bytes
    def __init__(self, federation: _Optional[str] = ..., site: _Optional[str] = ..., zone: _Optional[str] = ..., address: _Optional[str] = ..., certificate: _Optional[bytes] = ..., client_key: _Optional[bytes] = ...) -> None: ...

class PeerCard(_message.Message):
    __slots__ = ("card", "signature")
    CARD_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    card: bytes
    signature: bytes
    def __init__(self, card: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class Introduction(_message.Message):
    __slots__ = ("run", "round", "peer", "card", "meeting", "calls", "relayed", "attempt", "peer_attempt", "num_bytes", "crc32", "tried")
    RUN_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    CARD_FIELD_NUMBER: _ClassVar[int]
    MEETING_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    RELAYED_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PEER_ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    CRC32_FIELD_NUMBER: _ClassVar[int]
    TRIED_FIELD_NUMBER: _ClassVar[int]
    run: str
    round: int
    peer: str
    card: PeerCard
    meeting: str
    calls: bool
    relayed: bool
    attempt: int
    peer_attempt: int
    num_bytes: int
    crc32: int
    tried: int
    def __init__(self, run: _Optional[str] = ..., round: _Optional[int] = ..., peer: _Optional[str] = ..., card: _Optional[_Union[PeerCard, _Mapping]] = ..., meeting: _Optional[str] = ..., calls: _Optional[bool] = ..., relayed: _Optional[bool] = ..., attempt: _Optional[int] = ..., peer_attempt: _Optional[int] = ..., num_bytes: _Optional[int] = ..., crc32: _Optional[int] = ..., tried: _Optional[int] = ...) -> None: ...

class MetPeer(_message.Message):
    __slots__ = ("run", "round", "peer", "received", "unreachable", "tried")
    RUN_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    UNREACHABLE_FIELD_NUMBER: _ClassVar[int]
    TRIED_FIELD_NUMBER: _ClassVar[int]
    run: str
    round: int
    peer: str
    received: bool
    unreachable: _errors_pb2.ErrorDetail
    tried: int
    def __init__(self, run: _Optional[str] = ..., round: _Optional[int] = ..., peer: _Optional[str] = ..., received: _Optional[bool] = ..., unreachable: _Optional[_Union[_errors_pb2.ErrorDetail, _Mapping]] = ..., tried: _Optional[int] = ...) -> None: ...

class Mixing(_message.Message):
    __slots__ = ("round", "attempt", "shares")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    round: int
    attempt: int
    shares: _containers.RepeatedCompositeFieldContainer[Share]
    def __init__(self, round: _Optional[int] = ..., attempt: _Optional[int] = ..., shares: _Optional[_Iterable[_Union[Share, _Mapping]]] = ...) -> None: ...

class Share(_message.Message):
    __slots__ = ("site", "weight")
    SITE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    site: str
    weight: float
    def __init__(self, site: _Optional[str] = ..., weight: _Optional[float] = ...) -> None: ...

class MeetRequest(_message.Message):
    __slots__ = ("meeting",)
    MEETING_FIELD_NUMBER: _ClassVar[int]
    meeting: str
    def __init__(self, meeting: _Optional[str] = ...) -> None: ...

class MeetReply(_message.Message):
    __slots__ = ("received_bytes", "complete")
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    received_bytes: int
    complete: bool
    def __init__(self, received_bytes: _Optional[int] = ..., complete: _Optional[bool] = ...) -> None: ...

class ExchangeRecord(_message.Message):
    __slots__ = ("round", "num_pairs", "num_direct", "relayed")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    NUM_PAIRS_FIELD_NUMBER: _ClassVar[int]
    NUM_DIRECT_FIELD_NUMBER: _ClassVar[int]
    RELAYED_FIELD_NUMBER: _ClassVar[int]
    round: int
    num_pairs: int
    num_direct: int
    relayed: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, round: _Optional[int] = ..., num_pairs: _Optional[int] = ..., num_direct: _Optional[int] = ..., relayed: _Optional[_Iterable[str]] = ...) -> None: ...
