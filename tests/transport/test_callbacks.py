"""Callbacks: what they hear, and that none of them can hold anybody up."""

from __future__ import annotations

import json
import logging
import threading
import time
from pathlib import Path

import pytest
from pydantic import BaseModel

from atoll.aggregation import plugins
from atoll.aggregation.plugins import Plugin
from atoll.transport import callbacks
from atoll.transport.callbacks import Callbacks, json_lines
from atoll.transport.news import Evaluated, RoundClosed, RunEnded, RunNews, RunStarted, SnapshotReader, VersionCommitted
from atoll.wire.control_pb2 import MetricSum
from atoll.wire.errors import ConfigError
from atoll.wire.errors_pb2 import ErrorDetail
from atoll.wire.job import Part
from atoll.wire.runs_pb2 import RoundRecord, RunSnapshot

STARTED = RunStarted(run="r", name="digits")
ENDED = RunEnded(run="r", status="finished", reason="")
HELD = threading.Event()


class Recorder:
    class Options(BaseModel):
        pass

    heard: list[RunNews] = []  # noqa: RUF012

    def __init__(self, options: Options) -> None:
        self.heard.clear()

    def on(self, news: RunNews) -> None:
        if self.heard == []:
            self.heard.append(news)
            raise RuntimeError("the first is too much")
        self.heard.append(news)


class Hanging(Recorder):
    def on(self, news: RunNews) -> None:
        self.heard.append(news)
        HELD.wait(30)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {"recorder": Recorder, "hanging": Hanging, "no_class": 5}
    monkeypatch.setattr(
        plugins,
        "find",
        lambda part, kind, key: Plugin(kind=kind, source="x 1.0", value=kinds[kind]) if kind in kinds else None,
    )


def part(kind: str, **options: str) -> Part:
    return Part.model_validate({"kind": kind, **options})


def test_a_file_of_lines(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for news in (STARTED, ENDED):  # a second process appends
        heard = Callbacks(json_lines(path))
        heard.tell(news)
        heard.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line.pop("at")[:2] for line in lines] == ["20", "20"]
    assert lines == [
        {"event": "RunStarted", "run": "r", "name": "digits"},
        {"event": "RunEnded", "run": "r", "status": "finished", "reason": ""},
    ]


@pytest.mark.usefixtures("installed")
def test_one_that_raises_is_named_and_hears_on(caplog: pytest.LogCaptureFixture) -> None:
    heard = Callbacks({"audit": part("recorder")})
    heard.tell(STARTED)
    heard.tell(ENDED)
    heard.close()
    assert Recorder.heard == [STARTED, ENDED]
    assert "callback audit raised on RunStarted" in caplog.text
    assert "the first is too much" in caplog.text


@pytest.mark.usefixtures("installed")
def test_one_that_hangs_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(callbacks, "PATIENCE_S", 0.05)
    monkeypatch.setattr(callbacks, "CLOSE_S", 0.2)
    HELD.clear()
    path = tmp_path / "events.jsonl"
    heard = Callbacks({"slow": part("hanging"), **json_lines(path)})
    heard.tell(STARTED)
    deadline_s = time.monotonic() + 10
    while "callback slow has not returned" not in caplog.text and time.monotonic() < deadline_s:
        heard.tell(ENDED)
        time.sleep(0.01)
    began_s = time.monotonic()
    heard.close()
    assert time.monotonic() - began_s < 5
    assert caplog.text.count("callback slow has not returned") == 1
    assert "callback slow: left behind" in caplog.text
    assert path.read_text().count("RunStarted") == 1
    HELD.set()


@pytest.mark.usefixtures("installed")
def test_one_that_is_far_behind_misses_what_comes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(callbacks, "QUEUE_LENGTH", 2)
    HELD.clear()
    heard = Callbacks({"slow": part("hanging")})
    with caplog.at_level(logging.ERROR):
        for _ in range(5):
            heard.tell(STARTED)
    HELD.set()
    heard.close()
    assert "callback slow is 2 events behind" in caplog.text


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("table", "words"),
    [
        (part("absent"), ["callbacks.it.kind = 'absent'", "json_lines"]),
        (part("json_lines"), ["callbacks.it.path is missing"]),
        (part("json_lines", path="/no/such/folder/x"), ["callbacks.it", "cannot be made"]),
        (part("no_class"), ["wanted a class with Options"]),
    ],
)
def test_what_cannot_be_made_is_told_at_the_start(table: Part, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        Callbacks({"it": table})
    for word in words:
        assert word in str(caught.value)


def test_what_is_new_in_the_snapshots_of_a_run() -> None:
    def record(number: int) -> RoundRecord:
        made = RoundRecord(round=number, version=number, num_sites=2, weight=7, missing=["c"], best=number == 1)
        made.train_metrics["loss"].CopyFrom(MetricSum(sum=1, count=4))
        made.evaluate_metrics["accuracy"].CopyFrom(MetricSum(sum=3, count=4))
        return made

    reader = SnapshotReader()

    def read(status: str, rounds: int, reason: str = "") -> list[RunNews]:
        records = [record(number) for number in range(1, rounds + 1)]
        snapshot = RunSnapshot(
            run="r", name="digits", status=status, rounds=records, reason=ErrorDetail(message=reason)
        )
        return list(reader.read(snapshot))

    assert read("queued", 0) == []
    assert read("running", 0) == [STARTED]
    first = RoundClosed(run="r", round=1, sites=2, missing=("c",), weight=7, metrics={"loss": 0.25})
    assert read("running", 1) == [first, VersionCommitted(run="r", round=1, version=1)]
    assert read("running", 1) == [], "its evaluation may not be whole yet"
    judged = Evaluated(run="r", round=1, version=1, sites={"accuracy": 0.75}, server={}, best=True)
    assert judged in read("running", 2)
    ended = read("failed", 2, "no disk")
    assert [type(news) for news in ended] == [Evaluated, RunEnded]
    assert ended[-1] == RunEnded(run="r", status="failed", reason="no disk")
