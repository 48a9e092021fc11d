from atoll.wire import errors_pb2 as _errors_pb2
from atoll.wire import gossip_pb2 as _gossip_pb2
from atoll.wire import members_pb2 as _members_pb2
from atoll.wire import secure_pb2 as _secure_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TaskKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TASK_KIND_UNSPECIFIED: _ClassVar[TaskKind]
    TRAIN: _ClassVar[TaskKind]
    EVALUATE: _ClassVar[TaskKind]
    STATISTICS: _ClassVar[TaskKind]
    EXCHANGE: _ClassVar[TaskKind]
    COLLECT: _ClassVar[TaskKind]

class Direction(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DIRECTION_UNSPECIFIED: _ClassVar[Direction]
    UP: _ClassVar[Direction]
    DOWN: _ClassVar[Direction]
TASK_KIND_UNSPECIFIED: TaskKind
TRAIN: TaskKind
EVALUATE: TaskKind
STATISTICS: TaskKind
EXCHANGE: TaskKind
COLLECT: TaskKind
DIRECTION_UNSPECIFIED: Direction
UP: Direction
DOWN: Direction

class SiteMessage(_message.Message):
    __slots__ = ("hello", "heartbeat", "offer_reply", "progress", "result", "task_failed", "fetch", "leave_run", "met_peer", "secure_answer")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    OFFER_REPLY_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    TASK_FAILED_FIELD_NUMBER: _ClassVar[int]
    FETCH_FIELD_NUMBER: _ClassVar[int]
    LEAVE_RUN_FIELD_NUMBER: _ClassVar[int]
    MET_PEER_FIELD_NUMBER: _ClassVar[int]
    SECURE_ANSWER_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    heartbeat: Heartbeat
    offer_reply: OfferReply
    progress: Progress
    result: Result
    task_failed: TaskFailed
    fetch: Fetch
    leave_run: LeaveRun
    met_peer: _gossip_pb2.MetPeer
    secure_answer: SecureAnswer
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., offer_reply: _Optional[_Union[OfferReply, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., result: _Optional[_Union[Result, _Mapping]] = ..., task_failed: _Optional[_Union[TaskFailed, _Mapping]] = ..., fetch: _Optional[_Union[Fetch, _Mapping]] = ..., leave_run: _Optional[_Union[LeaveRun, _Mapping]] = ..., met_peer: _Optional[_Union[_gossip_pb2.MetPeer, _Mapping]] = ..., secure_answer: _Optional[_Union[SecureAnswer, _Mapping]] = ...) -> None: ...

class ServerMessage(_message.Message):
    __slots__ = ("welcome", "run_offer", "task", "grant", "grant_withdrawn", "verdict", "committed", "cancel_task", "run_ended", "member_list", "drain", "introduction", "secure_step")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    RUN_OFFER_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    GRANT_WITHDRAWN_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    CANCEL_TASK_FIELD_NUMBER: _ClassVar[int]
    RUN_ENDED_FIELD_NUMBER: _ClassVar[int]
    MEMBER_LIST_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    INTRODUCTION_FIELD_NUMBER: _ClassVar[int]
    SECURE_STEP_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    run_offer: RunOffer
    task: Task
    grant: Grant
    grant_withdrawn: GrantWithdrawn
    verdict: Verdict
    committed: Committed
    cancel_task: CancelTask
    run_ended: RunEnded
    member_list: _members_pb2.SignedMemberList
    drain: Drain
    introduction: _gossip_pb2.Introduction
    secure_step: SecureStep
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., run_offer: _Optional[_Union[RunOffer, _Mapping]] = ..., task: _Optional[_Union[Task, _Mapping]] = ..., grant: _Optional[_Union[Grant, _Mapping]] = ..., grant_withdrawn: _Optional[_Union[GrantWithdrawn, _Mapping]] = ..., verdict: _Optional[_Union[Verdict, _Mapping]] = ..., committed: _Optional[_Union[Committed, _Mapping]] = ..., cancel_task: _Optional[_Union[CancelTask, _Mapping]] = ..., run_ended: _Optional[_Union[RunEnded, _Mapping]] = ..., member_list: _Optional[_Union[_members_pb2.SignedMemberList, _Mapping]] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ..., introduction: _Optional[_Union[_gossip_pb2.Introduction, _Mapping]] = ..., secure_step: _Optional[_Union[SecureStep, _Mapping]] = ...) -> None: ...

class TaskKey(_message.Message):
    __slots__ = ("run", "task", "attempt")
    RUN_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    run: str
    task: str
    attempt: int
    def __init__(self, run: _Optional[str] = ..., task: _Optional[str] = ..., attempt: _Optional[int] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_min", "protocol_max", "features", "software", "capacity", "held_updates", "open_tasks", "joined_runs", "member_list_version", "card")
    PROTOCOL_MIN_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_MAX_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    HELD_UPDATES_FIELD_NUMBER: _ClassVar[int]
    OPEN_TASKS_FIELD_NUMBER: _ClassVar[int]
    JOINED_RUNS_FIELD_NUMBER: _ClassVar[int]
    MEMBER_LIST_VERSION_FIELD_NUMBER: _ClassVar[int]
    CARD_FIELD_NUMBER: _ClassVar[int]
    protocol_min: int
    protocol_max: int
    features: _containers.RepeatedScalarFieldContainer[str]
    software: str
    capacity: Capacity
    held_updates: _containers.RepeatedCompositeFieldContainer[TaskKey]
    open_tasks: _containers.RepeatedCompositeFieldContainer[TaskKey]
    joined_runs: _containers.RepeatedScalarFieldContainer[str]
    member_list_version: int
    card: _gossip_pb2.PeerCard
    def __init__(self, protocol_min: _Optional[int] = ..., protocol_max: _Optional[int] = ..., features: _Optional[_Iterable[str]] = ..., software: _Optional[str] = ..., capacity: _Optional[_Union[Capacity, _Mapping]] = ..., held_updates: _Optional[_Iterable[_Union[TaskKey, _Mapping]]] = ..., open_tasks: _Optional[_Iterable[_Union[TaskKey, _Mapping]]] = ..., joined_runs: _Optional[_Iterable[str]] = ..., member_list_version: _Optional[int] = ..., card: _Optional[_Union[_gossip_pb2.PeerCard, _Mapping]] = ...) -> None: ...

class Capacity(_message.Message):
    __slots__ = ("runs_at_once", "num_devices", "memory_bytes", "labels")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    RUNS_AT_ONCE_FIELD_NUMBER: _ClassVar[int]
    NUM_DEVICES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    runs_at_once: int
    num_devices: int
    memory_bytes: int
    labels: _containers.ScalarMap[str, str]
    def __init__(self, runs_at_once: _Optional[int] = ..., num_devices: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., labels: _Optional[_Mapping[str, str]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("protocol", "features", "federation", "server_software", "heartbeat_s", "lease_s", "max_frame_bytes", "bulk_port")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    FEDERATION_FIELD_NUMBER: _ClassVar[int]
    SERVER_SOFTWARE_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_S_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    MAX_FRAME_BYTES_FIELD_NUMBER: _ClassVar[int]
    BULK_PORT_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    features: _containers.RepeatedScalarFieldContainer[str]
    federation: str
    server_software: str
    heartbeat_s: int
    lease_s: int
    max_frame_bytes: int
    bulk_port: int
    def __init__(self, protocol: _Optional[int] = ..., features: _Optional[_Iterable[str]] = ..., federation: _Optional[str] = ..., server_software: _Optional[str] = ..., heartbeat_s: _Optional[int] = ..., lease_s: _Optional[int] = ..., max_frame_bytes: _Optional[int] = ..., bulk_port: _Optional[int] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("member_list_version",)
    MEMBER_LIST_VERSION_FIELD_NUMBER: _ClassVar[int]
    member_list_version: int
    def __init__(self, member_list_version: _Optional[int] = ...) -> None: ...

class RunOffer(_message.Message):
    __slots__ = ("run", "job", "manifest", "app_hash", "submitted_by", "fewest_sites")
    RUN_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    APP_HASH_FIELD_NUMBER: _ClassVar[int]
    SUBMITTED_BY_FIELD_NUMBER: _ClassVar[int]
    FEWEST_SITES_FIELD_NUMBER: _ClassVar[int]
    run: str
    job: bytes
    manifest: bytes
    app_hash: str
    submitted_by: str
    fewest_sites: int
    def __init__(self, run: _Optional[str] = ..., job: _Optional[bytes] = ..., manifest: _Optional[bytes] = ..., app_hash: _Optional[str] = ..., submitted_by: _Optional[str] = ..., fewest_sites: _Optional[int] = ...) -> None: ...

class OfferReply(_message.Message):
    __slots__ = ("run", "accept", "decline")
    RUN_FIELD_NUMBER: _ClassVar[int]
    ACCEPT_FIELD_NUMBER: _ClassVar[int]
    DECLINE_FIELD_NUMBER: _ClassVar[int]
    run: str
    accept: Accept
    decline: _errors_pb2.ErrorDetail
    def __init__(self, run: _Optional[str] = ..., accept: _Optional[_Union[Accept, _Mapping]] = ..., decline: _Optional[_Union[_errors_pb2.ErrorDetail, _Mapping]] = ...) -> None: ...

class Accept(_message.Message):
    __slots__ = ("max_weight", "region")
    MAX_WEIGHT_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    max_weight: int
    region: Region
    def __init__(self, max_weight: _Optional[int] = ..., region: _Optional[_Union[Region, _Mapping]] = ...) -> None: ...

class Region(_message.Message):
    __slots__ = ("num_sites", "sum_weights")
    NUM_SITES_FIELD_NUMBER: _ClassVar[int]
    SUM_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    num_sites: int
    sum_weights: int
    def __init__(self, num_sites: _Optional[int] = ..., sum_weights: _Optional[int] = ...) -> None: ...

class Task(_message.Message):
    __slots__ = ("key", "kind", "round", "base_version", "config", "deadline_s", "sum", "counted_round", "mixing")
    KEY_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    SUM_FIELD_NUMBER: _ClassVar[int]
    COUNTED_ROUND_FIELD_NUMBER: _ClassVar[int]
    MIXING_FIELD_NUMBER: _ClassVar[int]
    key: TaskKey
    kind: TaskKind
    round: int
    base_version: int
    config: bytes
    deadline_s: int
    sum: SumTerms
    counted_round: int
    mixing: _gossip_pb2.Mixing
    def __init__(self, key: _Optional[_Union[TaskKey, _Mapping]] = ..., kind: _Optional[_Union[TaskKind, str]] = ..., round: _Optional[int] = ..., base_version: _Optional[int] = ..., config: _Optional[bytes] = ..., deadline_s: _Optional[int] = ..., sum: _Optional[_Union[SumTerms, _Mapping]] = ..., counted_round: _Optional[int] = ..., mixing: _Optional[_Union[_gossip_pb2.Mixing, _Mapping]] = ...) -> None: ...

class SumTerms(_message.Message):
    __slots__ = ("num_sites", "max_weight")
    NUM_SITES_FIELD_NUMBER: _ClassVar[int]
    MAX_WEIGHT_FIELD_NUMBER: _ClassVar[int]
    num_sites: int
    max_weight: int
    def __init__(self, num_sites: _Optional[int] = ..., max_weight: _Optional[int] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("key", "done", "total")
    KEY_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    key: TaskKey
    done: int
    total: int
    def __init__(self, key: _Optional[_Union[TaskKey, _Mapping]] = ..., done: _Optional[int] = ..., total: _Optional[int] = ...) -> None: ...

class MetricSum(_message.Message):
    __slots__ = ("sum", "count")
    SUM_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    sum: float
    count: float
    def __init__(self, sum: _Optional[float] = ..., count: _Optional[float] = ...) -> None: ...

class Payload(_message.Message):
    __slots__ = ("name", "num_bytes", "crc32")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    CRC32_FIELD_NUMBER: _ClassVar[int]
    name: str
    num_bytes: int
    crc32: int
    def __init__(self, name: _Optional[str] = ..., num_bytes: _Optional[int] = ..., crc32: _Optional[int] = ...) -> None: ...

class Result(_message.Message):
    __slots__ = ("key", "round", "weight", "metrics", "payloads", "statistics")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: MetricSum
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[MetricSum, _Mapping]] = ...) -> None: ...
    KEY_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    PAYLOADS_FIELD_NUMBER: _ClassVar[int]
    STATISTICS_FIELD_NUMBER: _ClassVar[int]
    key: TaskKey
    round: int
    weight: int
    metrics: _containers.MessageMap[str, MetricSum]
    payloads: _containers.RepeatedCompositeFieldContainer[Payload]
    statistics: _containers.RepeatedCompositeFieldContainer[FeatureStatistics]
    def __init__(self, key: _Optional[_Union[TaskKey, _Mapping]] = ..., round: _Optional[int] = ..., weight: _Optional[int] = ..., metrics: _Optional[_Mapping[str, MetricSum]] = ..., payloads: _Optional[_Iterable[_Union[Payload, _Mapping]]] = ..., statistics: _Optional[_Iterable[_Union[FeatureStatistics, _Mapping]]] = ...) -> None: ...

class FeatureStatistics(_message.Message):
    __slots__ = ("name", "count", "sum", "sum_low", "squares", "stops", "counts")
    NAME_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    SUM_FIELD_NUMBER: _ClassVar[int]
    SUM_LOW_FIELD_NUMBER: _ClassVar[int]
    SQUARES_FIELD_NUMBER: _ClassVar[int]
    STOPS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    count: int
    sum: float
    sum_low: float
    squares: float
    stops: _containers.RepeatedScalarFieldContainer[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., count: _Optional[int] = ..., sum: _Optional[float] = ..., sum_low: _Optional[float] = ..., squares: _Optional[float] = ..., stops: _Optional[_Iterable[int]] = ..., counts: _Optional[_Iterable[int]] = ...) -> None: ...

class TaskFailed(_message.Message):
    __slots__ = ("key", "error")
    KEY_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    key: TaskKey
    error: _errors_pb2.ErrorDetail
    def __init__(self, key: _Optional[_Union[TaskKey, _Mapping]] = ..., error: _Optional[_Union[_errors_pb2.ErrorDetail, _Mapping]] = ...) -> None: ...

class Fetch(_message.Message):
    __slots__ = ("run", "version", "offset", "first_byte", "part_bytes", "key")
    RUN_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    FIRST_BYTE_FIELD_NUMBER: _ClassVar[int]
    PART_BYTES_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    run: str
    version: int
    offset: int
    first_byte: int
    part_bytes: int
    key: TaskKey
    def __init__(self, run: _Optional[str] = ..., version: _Optional[int] = ..., offset: _Optional[int] = ..., first_byte: _Optional[int] = ..., part_bytes: _Optional[int] = ..., key: _Optional[_Union[TaskKey, _Mapping]] = ...) -> None: ...

class Grant(_message.Message):
    __slots__ = ("grant", "direction", "key", "payload", "version", "offset", "num_bytes", "crc32", "min_bytes_per_s", "first_byte")
    GRANT_FIELD_NUMBER: _ClassVar[int]
    DIRECTION_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    CRC32_FIELD_NUMBER: _ClassVar[int]
    MIN_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    FIRST_BYTE_FIELD_NUMBER: _ClassVar[int]
    grant: str
    direction: Direction
    key: TaskKey
    payload: str
    version: int
    offset: int
    num_bytes: int
    crc32: int
    min_bytes_per_s: int
    first_byte: int
    def __init__(self, grant: _Optional[str] = ..., direction: _Optional[_Union[Direction, str]] = ..., key: _Optional[_Union[TaskKey, _Mapping]] = ..., payload: _Optional[str] = ..., version: _Optional[int] = ..., offset: _Optional[int] = ..., num_bytes: _Optional[int] = ..., crc32: _Optional[int] = ..., min_bytes_per_s: _Optional[int] = ..., first_byte: _Optional[int] = ...) -> None: ...

class GrantWithdrawn(_message.Message):
    __slots__ = ("grant", "reason")
    GRANT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    grant: str
    reason: _errors_pb2.ErrorDetail
    def __init__(self, grant: _Optional[str] = ..., reason: _Optional[_Union[_errors_pb2.ErrorDetail, _Mapping]] = ...) -> None: ...

class Verdict(_message.Message):
    __slots__ = ("key", "accepted", "refused", "released")
    KEY_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    key: TaskKey
    accepted: bool
    refused: _errors_pb2.ErrorDetail
    released: bool
    def __init__(self, key: _Optional[_Union[TaskKey, _Mapping]] = ..., accepted: _Optional[bool] = ..., refused: _Optional[_Union[_errors_pb2.ErrorDetail, _Mapping]] = ..., released: _Optional[bool] = ...) -> None: ...

class Committed(_message.Message):
    __slots__ = ("run", "round", "version")
    RUN_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    run: str
    round: int
    version: int
    def __init__(self, run: _Optional[str] = ..., round: _Optional[int] = ..., version: _Optional[int] = ...) -> None: ...

class CancelTask(_message.Message):
    __slots__ = ("key", "reason")
    KEY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    key: TaskKey
    reason: _errors_pb2.ErrorDetail
    def __init__(self, key: _Optional[_Union[TaskKey, _Mapping]] = ..., reason: _Optional[_Union[_errors_pb2.ErrorDetail, _Mapping]] = ...) -> None: ...

class LeaveRun(_message.Message):
    __slots__ = ("run", "reason")
    RUN_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    run: str
    reason: _errors_pb2.ErrorDetail
    def __init__(self, run: _Optional[str] = ..., reason: _Optional[_Union[_errors_pb2.ErrorDetail, _Mapping]] = ...) -> None: ...

class RunEnded(_message.Message):
    __slots__ = ("run", "status", "reason")
    RUN_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    run: str
    status: str
    reason: _errors_pb2.ErrorDetail
    def __init__(self, run: _Optional[str] = ..., status: _Optional[str] = ..., reason: _Optional[_Union[_errors_pb2.ErrorDetail, _Mapping]] = ...) -> None: ...

class Drain(_message.Message):
    __slots__ = ("reconnect_after_s",)
    RECONNECT_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    reconnect_after_s: int
    def __init__(self, reconnect_after_s: _Optional[int] = ...) -> None: ...

class SecureStep(_message.Message):
    __slots__ = ("key", "session", "plan", "keys", "ring", "shares", "survivors", "confirmations", "end")
    KEY_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    RING_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    SURVIVORS_FIELD_NUMBER: _ClassVar[int]
    CONFIRMATIONS_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    key: TaskKey
    session: int
    plan: _secure_pb2.SecurePlan
    keys: _secure_pb2.SecureKeys
    ring: _secure_pb2.SecureRing
    shares: _secure_pb2.SecureShares
    survivors: bytes
    confirmations: _secure_pb2.SecureConfirmations
    end: _secure_pb2.SecureEnd
    def __init__(self, key: _Optional[_Union[TaskKey, _Mapping]] = ..., session: _Optional[int] = ..., plan: _Optional[_Union[_secure_pb2.SecurePlan, _Mapping]] = ..., keys: _Optional[_Union[_secure_pb2.SecureKeys, _Mapping]] = ..., ring: _Optional[_Union[_secure_pb2.SecureRing, _Mapping]] = ..., shares: _Optional[_Union[_secure_pb2.SecureShares, _Mapping]] = ..., survivors: _Optional[bytes] = ..., confirmations: _Optional[_Union[_secure_pb2.SecureConfirmations, _Mapping]] = ..., end: _Optional[_Union[_secure_pb2.SecureEnd, _Mapping]] = ...) -> None: ...

class SecureAnswer(_message.Message):
    __slots__ = ("key", "session", "advertised", "ring_nonce", "shared", "input", "confirmation", "unmasked", "refused")
    KEY_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    ADVERTISED_FIELD_NUMBER: _ClassVar[int]
    RING_NONCE_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    INPUT_FIELD_NUMBER: _ClassVar[int]
    CONFIRMATION_FIELD_NUMBER: _ClassVar[int]
    UNMASKED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    key: TaskKey
    session: int
    advertised: bytes
    ring_nonce: bytes
    shared: _secure_pb2.SecureShared
    input: _secure_pb2.SecureInput
    confirmation: bytes
    unmasked: bytes
    refused: _errors_pb2.ErrorDetail
    def __init__(self, key: _Optional[_Union[TaskKey, _Mapping]] = ..., session: _Optional[int] = ..., advertised: _Optional[bytes] = ..., ring_nonce: _Optional[bytes] = ..., shared: _Optional[_Union[_secure_pb2.SecureShared, _Mapping]] = ..., input: _Optional[_Union[_secure_pb2.SecureInput, _Mapping]] = ..., confirmation: _Optional[bytes] = ..., unmasked: _Optional[bytes] = ..., refused: _Optional[_Union[_errors_pb2.ErrorDetail, _Mapping]] = ...) -> None: ...
