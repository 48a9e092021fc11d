from atoll.wire import control_pb2 as _control_pb2
from atoll.wire import errors_pb2 as _errors_pb2
from atoll.wire import gossip_pb2 as _gossip_pb2
from atoll.wire import secure_pb2 as _secure_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SubmitRequest(_message.Message):
    __slots__ = ("job", "manifest", "app_hash", "crc32", "request")
    JOB_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    APP_HASH_FIELD_NUMBER: _ClassVar[int]
    CRC32_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    job: bytes
    manifest: bytes
    app_hash: str
    crc32: int
    request: str
    def __init__(self, job: _Optional[bytes] = ..., manifest: _Optional[bytes] = ..., app_hash: _Optional[str] = ..., crc32: _Optional[int] = ..., request: _Optional[str] = ...) -> None: ...

class SubmitReply(_message.Message):
    __slots__ = ("run", "upload")
    RUN_FIELD_NUMBER: _ClassVar[int]
    UPLOAD_FIELD_NUMBER: _ClassVar[int]
    run: str
    upload: _control_pb2.Grant
    def __init__(self, run: _Optional[str] = ..., upload: _Optional[_Union[_control_pb2.Grant, _Mapping]] = ...) -> None: ...

class ListRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListReply(_message.Message):
    __slots__ = ("runs",)
    RUNS_FIELD_NUMBER: _ClassVar[int]
    runs: _containers.RepeatedCompositeFieldContainer[RunSnapshot]
    def __init__(self, runs: _Optional[_Iterable[_Union[RunSnapshot, _Mapping]]] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: str
    def __init__(self, run: _Optional[str] = ...) -> None: ...

class RunSnapshot(_message.Message):
    __slots__ = ("run", "name", "status", "reason", "round", "num_rounds", "version", "sites", "rounds", "submitted_by", "submitted_at_unix_s", "best_version", "continues", "exchange")
    RUN_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    NUM_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SITES_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    SUBMITTED_BY_FIELD_NUMBER: _ClassVar[int]
    SUBMITTED_AT_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    BEST_VERSION_FIELD_NUMBER: _ClassVar[int]
    CONTINUES_FIELD_NUMBER: _ClassVar[int]
    EXCHANGE_FIELD_NUMBER: _ClassVar[int]
    run: str
    name: str
    status: str
    reason: _errors_pb2.ErrorDetail
    round: int
    num_rounds: int
    version: int
    sites: _containers.RepeatedCompositeFieldContainer[SiteProgress]
    rounds: _containers.RepeatedCompositeFieldContainer[RoundRecord]
    submitted_by: str
    submitted_at_unix_s: float
    best_version: int
    continues: str
    exchange: _gossip_pb2.ExchangeRecord
    def __init__(self, run: _Optional[str] = ..., name: _Optional[str] = ..., status: _Optional[str] = ..., reason: _Optional[_Union[_errors_pb2.ErrorDetail, _Mapping]] = ..., round: _Optional[int] = ..., num_rounds: _Optional[int] = ..., version: _Optional[int] = ..., sites: _Optional[_Iterable[_Union[SiteProgress, _Mapping]]] = ..., rounds: _Optional[_Iterable[_Union[RoundRecord, _Mapping]]] = ..., submitted_by: _Optional[str] = ..., submitted_at_unix_s: _Optional[float] = ..., best_version: _Optional[int] = ..., continues: _Optional[str] = ..., exchange: _Optional[_Union[_gossip_pb2.ExchangeRecord, _Mapping]] = ...) -> None: ...

class SiteProgress(_message.Message):
    __slots__ = ("site", "state", "done", "total", "detail")
    SITE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    site: str
    state: str
    done: int
    total: int
    detail: str
    def __init__(self, site: _Optional[str] = ..., state: _Optional[str] = ..., done: _Optional[int] = ..., total: _Optional[int] = ..., detail: _Optional[str] = ...) -> None: ...

class RoundRecord(_message.Message):
    __slots__ = ("round", "version", "num_sites", "weight", "seconds", "train_metrics", "evaluate_metrics", "server_metrics", "missing", "bytes_up", "bytes_down", "best", "reasons", "features", "by_site", "exchange", "secure")
    class TrainMetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: _control_pb2.MetricSum
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[_control_pb2.MetricSum, _Mapping]] = ...) -> None: ...
    class EvaluateMetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: _control_pb2.MetricSum
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[_control_pb2.MetricSum, _Mapping]] = ...) -> None: ...
    class ServerMetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: _control_pb2.MetricSum
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[_control_pb2.MetricSum, _Mapping]] = ...) -> None: ...
    class ReasonsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ROUND_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NUM_SITES_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    TRAIN_METRICS_FIELD_NUMBER: _ClassVar[int]
    EVALUATE_METRICS_FIELD_NUMBER: _ClassVar[int]
    SERVER_METRICS_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    BYTES_UP_FIELD_NUMBER: _ClassVar[int]
    BYTES_DOWN_FIELD_NUMBER: _ClassVar[int]
    BEST_FIELD_NUMBER: _ClassVar[int]
    REASONS_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    BY_SITE_FIELD_NUMBER: _ClassVar[int]
    EXCHANGE_FIELD_NUMBER: _ClassVar[int]
    SECURE_FIELD_NUMBER: _ClassVar[int]
    round: int
    version: int
    num_sites: int
    weight: int
    seconds: float
    train_metrics: _containers.MessageMap[str, _control_pb2.MetricSum]
    evaluate_metrics: _containers.MessageMap[str, _control_pb2.MetricSum]
    server_metrics: _containers.MessageMap[str, _control_pb2.MetricSum]
    missing: _containers.RepeatedScalarFieldContainer[str]
    bytes_up: int
    bytes_down: int
    best: bool
    reasons: _containers.ScalarMap[str, str]
    features: _containers.RepeatedCompositeFieldContainer[FeatureSummary]
    by_site: _containers.RepeatedCompositeFieldContainer[SiteAnswer]
    exchange: _gossip_pb2.ExchangeRecord
    secure: _secure_pb2.SecureRecord
    def __init__(self, round: _Optional[int] = ..., version: _Optional[int] = ..., num_sites: _Optional[int] = ..., weight: _Optional[int] = ..., seconds: _Optional[float] = ..., train_metrics: _Optional[_Mapping[str, _control_pb2.MetricSum]] = ..., evaluate_metrics: _Optional[_Mapping[str, _control_pb2.MetricSum]] = ..., server_metrics: _Optional[_Mapping[str, _control_pb2.MetricSum]] = ..., missing: _Optional[_Iterable[str]] = ..., bytes_up: _Optional[int] = ..., bytes_down: _Optional[int] = ..., best: _Optional[bool] = ..., reasons: _Optional[_Mapping[str, str]] = ..., features: _Optional[_Iterable[_Union[FeatureSummary, _Mapping]]] = ..., by_site: _Optional[_Iterable[_Union[SiteAnswer, _Mapping]]] = ..., exchange: _Optional[_Union[_gossip_pb2.ExchangeRecord, _Mapping]] = ..., secure: _Optional[_Union[_secure_pb2.SecureRecord, _Mapping]] = ...) -> None: ...

class SiteAnswer(_message.Message):
    __slots__ = ("site", "metrics", "features")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: _control_pb2.MetricSum
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[_control_pb2.MetricSum, _Mapping]] = ...) -> None: ...
    SITE_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    site: str
    metrics: _containers.MessageMap[str, _control_pb2.MetricSum]
    features: _containers.RepeatedCompositeFieldContainer[FeatureSummary]
    def __init__(self, site: _Optional[str] = ..., metrics: _Optional[_Mapping[str, _control_pb2.MetricSum]] = ..., features: _Optional[_Iterable[_Union[FeatureSummary, _Mapping]]] = ...) -> None: ...

class FeatureSummary(_message.Message):
    __slots__ = ("name", "num_sites", "num_withheld", "count", "mean", "variance", "edges", "least", "most", "quantiles")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUM_SITES_FIELD_NUMBER: _ClassVar[int]
    NUM_WITHHELD_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    MEAN_FIELD_NUMBER: _ClassVar[int]
    VARIANCE_FIELD_NUMBER: _ClassVar[int]
    EDGES_FIELD_NUMBER: _ClassVar[int]
    LEAST_FIELD_NUMBER: _ClassVar[int]
    MOST_FIELD_NUMBER: _ClassVar[int]
    QUANTILES_FIELD_NUMBER: _ClassVar[int]
    name: str
    num_sites: int
    num_withheld: int
    count: int
    mean: float
    variance: float
    edges: _containers.RepeatedScalarFieldContainer[float]
    least: _containers.RepeatedScalarFieldContainer[int]
    most: _containers.RepeatedScalarFieldContainer[int]
    quantiles: _containers.RepeatedCompositeFieldContainer[QuantileSummary]
    def __init__(self, name: _Optional[str] = ..., num_sites: _Optional[int] = ..., num_withheld: _Optional[int] = ..., count: _Optional[int] = ..., mean: _Optional[float] = ..., variance: _Optional[float] = ..., edges: _Optional[_Iterable[float]] = ..., least: _Optional[_Iterable[int]] = ..., most: _Optional[_Iterable[int]] = ..., quantiles: _Optional[_Iterable[_Union[QuantileSummary, _Mapping]]] = ...) -> None: ...

class QuantileSummary(_message.Message):
    __slots__ = ("q", "value", "lower", "upper")
    Q_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    LOWER_FIELD_NUMBER: _ClassVar[int]
    UPPER_FIELD_NUMBER: _ClassVar[int]
    q: float
    value: float
    lower: float
    upper: float
    def __init__(self, q: _Optional[float] = ..., value: _Optional[float] = ..., lower: _Optional[float] = ..., upper: _Optional[float] = ...) -> None: ...

class StopRequest(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: str
    def __init__(self, run: _Optional[str] = ...) -> None: ...

class StopReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ModelRequest(_message.Message):
    __slots__ = ("run", "version", "newest", "best")
    RUN_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    BEST_FIELD_NUMBER: _ClassVar[int]
    run: str
    version: int
    newest: bool
    best: bool
    def __init__(self, run: _Optional[str] = ..., version: _Optional[int] = ..., newest: _Optional[bool] = ..., best: _Optional[bool] = ...) -> None: ...

class ModelReply(_message.Message):
    __slots__ = ("download", "manifest", "version", "best")
    DOWNLOAD_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BEST_FIELD_NUMBER: _ClassVar[int]
    download: _control_pb2.Grant
    manifest: bytes
    version: int
    best: bool
    def __init__(self, download: _Optional[_Union[_control_pb2.Grant, _Mapping]] = ..., manifest: _Optional[bytes] = ..., version: _Optional[int] = ..., best: _Optional[bool] = ...) -> None: ...
