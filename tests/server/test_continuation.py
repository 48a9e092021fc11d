"""A run that goes on from another: what it takes over, what is refused, and a server killed before the run is queued."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from samples import whole_server

from atoll.aggregation.lanes import run_manifest
from atoll.aggregation.strategy import resolve
from atoll.server.continuation import source_of, take_over
from atoll.server.events import Continued, encode_event
from atoll.server.models import RunModels
from atoll.server.records import RoundRow, RunRow
from atoll.server.run import begin
from atoll.server.security import Caller
from atoll.server.settings import ServerFolder
from atoll.server.store import Store
from atoll.wire import runs_pb2
from atoll.wire.errors import AtollError, BadManifest, ConfigError, NotAllowed, Stale, Unknown
from atoll.wire.job import Job, parse_job
from atoll.wire.manifest import Manifest
from atoll.wire.names import new_run_id

MODEL = Manifest.build([("w", "float32", (4,), "parameter")])
ADA = Caller(name="ada", role="researcher")
OLD = new_run_id()


def job(rounds: int = 5, *, continues: str | None = OLD, **strategy: Any) -> Job:
    section = {"name": "a", "app": "a", "rounds": rounds}
    if continues is not None:
        section["continues"] = continues
    return parse_job({"job": section, "strategy": {"kind": "fedadam", **strategy}})


def add_run(store: Store, models: Path, *, status: str = "finished", rounds: int = 3, job_: Job | None = None) -> None:
    """Run OLD of ada's, with its versions on disk."""
    row = RunRow(
        run=OLD, name="a", job=(job_ or job(3, continues=None)).canonical(), app_hash="0" * 64, submitted_by="ada", crc32=7,
        status=status, reason=None, submitted_at=datetime.now(UTC),  # type: ignore[arg-type]
    )  # fmt: skip
    store.create_run(row, manifest=MODEL.encode(), request="old")
    files = RunModels(models, OLD, MODEL)
    files.prepare()
    for number in range(rounds + 1):
        with files.create(number, {}) as data:
            data[:] = bytes([number]) * len(data)
        if number:
            files.optimizer_path(number).write_bytes(bytes([number]))
            store.commit_round(
                OLD, [], RoundRow(round=number, version=number, record=b"", model_crc32=90 + number, num_bytes=16)
            )


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store.open(f"sqlite:///{tmp_path}/state.sqlite")
    yield opened
    opened.close()


def test_a_run_goes_on_from_the_last_version(store: Store, tmp_path: Path) -> None:
    add_run(store, tmp_path)
    source = source_of(store, ADA, job(), MODEL)
    assert source.event == Continued(run=OLD, round=3, version=3)
    assert source.crc32 == 93
    models = RunModels(tmp_path, new_run_id(), MODEL)
    for _ in range(2):  # a server that was killed in between does it again
        take_over(tmp_path, source.event, models)
    with models.open(3) as model:
        assert bytes(model.map) == bytes([3]) * 16
    assert models.optimizer_path(3).read_bytes() == bytes([3])
    models.prune({3})
    assert RunModels(tmp_path, OLD, MODEL).has(2), "the old run's files are its own"


def test_a_run_that_never_committed_begins_where_it_began(store: Store, tmp_path: Path) -> None:
    add_run(store, tmp_path, rounds=0, status="failed")
    source = source_of(store, ADA, job(), MODEL)
    assert (source.event, source.crc32) == (Continued(run=OLD, round=0, version=0), 7)
    models = RunModels(tmp_path, new_run_id(), MODEL)
    take_over(tmp_path, source.event, models)
    assert models.has(0)


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"job": job(3)}, ConfigError, ["job.rounds = 3", "has done 3 rounds"]),
        ({"job": job(optimizer={"kind": "sgd"})}, ConfigError, ["strategy.optimizer is sgd in float64", "it is adam in float32"]),
        ({"job": job(buffers="first")}, ConfigError, ["strategy.buffers is first", "it is mean"]),
        ({"job": job(local=["w"])}, ConfigError, ["strategy.local is w", "it is empty"]),
        ({"job": job(rule={"kind": "fedprox", "mu": 0.1})}, ConfigError, ["strategy.rule"]),
        ({"job": job(schedule={"kind": "hierarchical", "label": "l", "groups": ["a", "b"], "rounds": 1})}, ConfigError,
         ["strategy.schedule: Hierarchical cannot begin after rounds"]),
        ({"job": job(schedule={"kind": "every_steps", "steps": 4, "fragments": 2})}, ConfigError,
         ["strategy.schedule.fragments is 2", "it is 1"]),
        ({"model": Manifest.build([("w", "float32", (5,), "parameter")])}, BadManifest, ['tensor "w"', "[5]", "[4]"]),
        ({"caller": Caller(name="eve", role="researcher")}, NotAllowed, ["ada's"]),
        ({"status": "running"}, Stale, ["atoll stop"]),
        ({"job": job(continues=new_run_id())}, Unknown, ["there is no run"]),
    ],
    ids=["rounds", "optimizer", "buffers", "local", "rule", "groups", "fragments", "model", "another's", "open", "unknown"],
)  # fmt: skip
def test_what_cannot_go_on_is_refused_with_both_values(
    store: Store, tmp_path: Path, changes: dict[str, Any], kind: type[AtollError], words: list[str]
) -> None:
    add_run(store, tmp_path, status=changes.get("status", "finished"))
    with pytest.raises(kind) as caught:
        source_of(store, changes.get("caller", ADA), changes.get("job", job()), changes.get("model", MODEL))
    for word in words:
        assert word in str(caught.value)


def test_a_run_in_groups_goes_on_from_a_version_of_all_alone(store: Store, tmp_path: Path) -> None:
    groups = {"kind": "hierarchical", "label": "l", "groups": ["a", "b"], "rounds": 2}
    add_run(store, tmp_path, rounds=3, job_=job(4, continues=None, schedule=groups))
    with pytest.raises(ConfigError, match=r"ended at version 3, and its groups are combined every 2 rounds"):
        source_of(store, ADA, job(), MODEL)


@pytest.mark.parametrize(
    ("section", "named"),
    [
        ({"kind": "scaffold"}, "strategy.rule = scaffold"),
        ({"kind": "feddyn"}, "strategy.rule = feddyn"),
        ({"kind": "ef21", "schedule": {"kind": "rounds", "min": 2}}, "strategy.codec = top_k with difference"),
    ],
)
def test_what_sites_keep_in_step_with_the_old_server_does_not_go_on(
    store: Store, section: dict[str, Any], named: str
) -> None:
    before = parse_job({"job": {"name": "a", "app": "a", "rounds": 3, "sites": ["a", "b"]}, "strategy": section})
    row = RunRow(
        run=OLD, name="a", job=before.canonical(), app_hash="0" * 64, submitted_by="ada", crc32=7,
        status="finished", reason=None, submitted_at=datetime.now(UTC),
    )  # fmt: skip
    manifest = run_manifest(MODEL, resolve(before).lanes)
    store.create_run(row, manifest=manifest.encode(), request="old")
    now = parse_job(
        {"job": {"name": "a", "app": "a", "rounds": 5, "sites": ["a", "b"], "continues": OLD}, "strategy": section}
    )
    with pytest.raises(ConfigError, match=f"{named}.*begin anew"):
        source_of(store, ADA, now, manifest)


@pytest.mark.parametrize("files", [True, False], ids=["whole", "the old files are gone"])
async def test_a_server_killed_before_the_run_is_queued_takes_over_when_it_starts(tmp_path: Path, files: bool) -> None:
    folder = whole_server.make(tmp_path)
    place = ServerFolder(root=folder)
    store = Store.open(f"sqlite:///{place.database_path}")
    add_run(store, place.models)
    if not files:
        RunModels(place.models, OLD, MODEL).remove()
    row = RunRow(
        run=new_run_id(), name="a", job=job().canonical(), app_hash="0" * 64, submitted_by="ada", crc32=93,
        status="uploading", reason=None, submitted_at=datetime.now(UTC),
    )  # fmt: skip
    begun = [encode_event(Continued(run=OLD, round=3, version=3))]
    store.create_run(row, manifest=MODEL.encode(), request="new", events=begun)
    store.close()

    async with whole_server.server_in(folder) as server:
        snapshot = await anext(aiter(server.coordinator.runs.watch(row.run)))
        assert (snapshot.round, snapshot.version, snapshot.continues) == (3, 3, OLD)
        if not files:
            assert snapshot.status == "failed"
            assert "not on the server's disk any more" in snapshot.reason.message
            return
        assert snapshot.status == "queued"
        driver = server.coordinator.runs.get(row.run)
        assert driver is not None
        assert (driver.plan.done_rounds, begin(driver.plan).version) == (3, 3)
        assert driver.models.has(3)
        reply = await server.coordinator.runs.submit(ADA, _request(row, "new"))
        assert (reply.run, reply.HasField("upload")) == (row.run, False), "the same request again"
        other = await server.coordinator.runs.submit(ADA, _request(row, "another"))
        assert other.run != row.run
        assert RunModels(place.models, other.run, MODEL).has(3)


def _request(row: RunRow, name: str) -> runs_pb2.SubmitRequest:
    return runs_pb2.SubmitRequest(job=row.job, manifest=MODEL.encode(), app_hash=row.app_hash, request=name)
