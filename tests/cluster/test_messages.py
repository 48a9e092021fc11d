from __future__ import annotations

import json
import subprocess
import sys

import pytest

from atoll.cluster.messages import (
    Cancel,
    Close,
    Evaluate,
    Evaluated,
    Failed,
    Message,
    Prepare,
    Prepared,
    Progress,
    Train,
    Trained,
    decode,
    encode,
)
from atoll.wire.errors import (
    AppFailed,
    AtollError,
    BadUpdate,
    ConfigError,
    DeviceMissing,
    DiskFull,
    Malformed,
    RemoteError,
)

MESSAGES: list[Message] = [
    Prepare(
        run="01J", site="north", app_name="a", distribution="d", entry_point="e", app_hash="f" * 64,
        data={"path": "/data/x.npz", "columns": ["a", "b"], "deep": {"n": 1}}, job='{"job":{}}',
        manifest_path="/m", state_folder="/s", device="cuda:1", rounding_seed_hex="00" * 32,
    ),
    Train(key="t/1", round=1, base_version=0, base_path="/b", out_path="/o", config={"epochs": 2}),
    Evaluate(key="t/1", round=0, base_version=0, base_path="/b"),
    Cancel(key="t/1"),
    Close(),
    Prepared(max_weight=7, update_bytes=64, device="cpu"),
    Progress(key="t/1", done=1, total=9),
    Trained(key="t/1", weight=1, metrics={"loss": (0.5, 3.0)}, num_bytes=64, crc32=5),
    Evaluated(key="t/1", metrics={}),
    Failed(key="t/1", error={"kind": "AppFailed", "message": "no", "round": 2}),
]  # fmt: skip


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.kind)
def test_comes_back_as_it_went(message: Message) -> None:
    line = encode(message)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert decode(line) == message


@pytest.mark.parametrize(
    "line",
    [b"", b"{}", b"[]", b"null", b"\xff\xfe", b'{"kind":"close"', b'{"kind":"no such"}', b'{"kind":"close","more":1}',
     b'{"kind":"trained","key":"a","weight":0,"metrics":{},"num_bytes":1,"crc32":1}',
     b'{"kind":"trained","key":"a","weight":"1","metrics":{},"num_bytes":1,"crc32":1}',
     b'{"kind":"evaluated","key":"a","metrics":{"loss":[NaN,1]}}',
     b'{"kind":"evaluated","key":"a","metrics":{"loss":[1]}}'],
)  # fmt: skip
def test_refuses_what_is_no_message(line: bytes) -> None:
    with pytest.raises(Malformed):
        decode(line)


@pytest.mark.parametrize("cut", range(0, 60, 7))
def test_refuses_a_truncated_message(cut: int) -> None:
    with pytest.raises(Malformed):
        decode(encode(MESSAGES[1])[:cut])


def test_a_sender_cannot_say_that_a_metric_is_infinite() -> None:
    with pytest.raises(Malformed, match="metrics"):
        encode(Evaluated(key="a", metrics={"loss": (float("inf"), 1.0)}))


@pytest.mark.parametrize(
    "error",
    [BadUpdate("beyond", site="north", run="01J", round=3, field="fc.weight", value=2048.0, bound=1024.0),
     AppFailed("raised"), DeviceMissing("cuda:1"), DiskFull("full"), ConfigError("lr")],
)  # fmt: skip
def test_errors_keep_kind_message_and_place(error: AtollError) -> None:
    failed = decode(encode(Failed.of("t/1", error)))
    assert isinstance(failed, Failed)
    found = failed.to_error()
    assert type(found) is type(error)
    assert str(found) == str(error)
    if isinstance(error, RemoteError) and isinstance(found, RemoteError):
        places = ("site", "run", "round", "field", "value", "bound")
        assert [getattr(found, name) for name in places] == [getattr(error, name) for name in places]


def test_an_unknown_kind_of_error_is_still_an_error() -> None:
    assert type(Failed(key="a", error={"kind": "FromTheFuture", "message": "x"}).to_error()) is RemoteError


def test_the_agents_side_loads_no_torch() -> None:
    code = (
        "import sys, atoll.cluster.messages, atoll.cluster.registry, atoll.cluster.worker_process\n"
        "print(sorted({'torch', 'numpy', 'sqlalchemy'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(found.stdout) == []
