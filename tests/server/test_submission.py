"""What a researcher may submit: the model's tensors, and beside them what the job's rule has travel, no more and no less."""

from __future__ import annotations

import pytest

from atoll.aggregation.lanes import run_manifest
from atoll.aggregation.strategy import resolve
from atoll.server.settings import ServerSettings
from atoll.server.submission import read_submission
from atoll.wire import runs_pb2
from atoll.wire.errors import BadManifest, ConfigError
from atoll.wire.job import Job, parse_job
from atoll.wire.manifest import Manifest

SETTINGS = ServerSettings(federation="isles", address="127.0.0.1:1", enrolment_address="127.0.0.1:2")
MODEL = Manifest.build([("w", "bfloat16", (4,), "parameter"), ("steps", "int64", (), "buffer")])


def job(kind: str) -> Job:
    return parse_job({"job": {"name": "x", "app": "x", "rounds": 1}, "strategy": {"kind": kind}})


def lanes_of(kind: str) -> Manifest:
    return run_manifest(MODEL, resolve(job(kind)).lanes)


def request(kind: str, manifest: Manifest) -> runs_pb2.SubmitRequest:
    return runs_pb2.SubmitRequest(
        job=job(kind).canonical(), manifest=manifest.encode(), app_hash="ab" * 32, request="once"
    )


@pytest.mark.parametrize("kind", ["fedavg", "scaffold", "feddyn", "fednova"])
def test_the_lanes_of_the_jobs_rule_are_taken(kind: str) -> None:
    _, manifest = read_submission(request(kind, lanes_of(kind)), SETTINGS)
    assert manifest == lanes_of(kind)
    assert manifest.model == MODEL


@pytest.mark.parametrize(
    ("kind", "manifest", "words"),
    [
        ("scaffold", MODEL, r'"scaffold.control/w" is absent, manifest says a control of float32 \[4\]'),
        ("fednova", MODEL, r'"fednova.steps" is absent, manifest says a control of float64 \[\]'),
        ("fedavg", lanes_of("scaffold"), r'"scaffold.control/w" is a control of float32 \[4\], manifest says absent'),
        ("fednova", lanes_of("scaffold"), r'"fednova.steps" is absent'),
    ],
)
def test_others_are_refused(kind: str, manifest: Manifest, words: str) -> None:
    with pytest.raises(BadManifest, match=words):
        read_submission(request(kind, manifest), SETTINGS)


def test_a_masked_job_of_few_regions_is_taken_and_a_session_that_cannot_be_is_not() -> None:
    masked = {
        "job": {"name": "x", "app": "x", "rounds": 1},
        "strategy": {"schedule": {"kind": "rounds", "min": 2}, "buffers": "local"},
        "privacy": {"secure_aggregation": {"fewest_survivors": 3}},
    }
    asked = request("fedavg", MODEL)
    asked.job = parse_job(masked).canonical()
    read_submission(asked, SETTINGS)  # a region may have sessions of three
    masked["privacy"]["secure_aggregation"]["corrupt"] = 0.9  # type: ignore[index]
    asked.job = parse_job(masked).canonical()
    with pytest.raises(ConfigError, match="over 3 sites: against 2 corrupt sites 5 shares are needed"):
        read_submission(asked, SETTINGS)
