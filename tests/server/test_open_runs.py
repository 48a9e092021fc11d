"""Runs on record that nobody drives: what those see who look at the very moment of a run's beginning or end."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from datetime import UTC, datetime
from pathlib import Path

import pytest
from samples import whole_server

from atoll.server.records import RunRow
from atoll.server.security import Caller
from atoll.server.settings import ServerFolder
from atoll.server.store import Store
from atoll.wire.errors import Stale, Unavailable
from atoll.wire.job import parse_job
from atoll.wire.manifest import Manifest
from atoll.wire.names import new_run_id

ADA = Caller(name="ada", role="researcher")


async def test_a_run_that_ends_while_its_record_is_read_is_seen_to_end(tmp_path: Path) -> None:
    """The record was read as running, and when it was there the driver was gone: nobody else wakes who watches."""
    folder = whole_server.make(tmp_path)
    job = parse_job({"job": {"name": "a", "app": "a", "rounds": 2}, "strategy": {"kind": "fedavg"}})
    row = RunRow(
        run=new_run_id(), name="a", job=job.canonical(), app_hash="0" * 64, submitted_by="ada", crc32=7,
        status="running", reason=None, submitted_at=datetime.now(UTC),
    )  # fmt: skip
    manifest = Manifest.build([("w", "float32", (4,), "parameter")])
    async with whole_server.server_in(folder) as server:
        runs = server.coordinator.runs
        store = Store.open(f"sqlite:///{ServerFolder(root=folder).database_path}")
        try:
            store.create_run(row, manifest=manifest.encode(), request="one")
            async with asyncio.timeout(30), aclosing(runs.watch(row.run)) as snapshots:
                assert (await anext(snapshots)).status == "running"
                with pytest.raises(Unavailable, match="ask again"):
                    await runs.stop(ADA, row.run)
                store.set_status(row.run, "finished", None)
                later = [snapshot.status async for snapshot in snapshots]
            assert later[-1] == "finished"
            with pytest.raises(Stale, match="over already: finished"):
                await runs.stop(ADA, row.run)
        finally:
            store.close()
