"""A worker's part of a session: an update of a run, written once more as masked levels."""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from samples.bench import MASK_KEYS, Bench, MakeBench

from atoll.cluster.masking import discount_of, mask_update
from atoll.cluster.messages import decode, encode
from atoll.cluster.open_session import open_session
from atoll.cluster.worker_process import WorkerDied, WorkerProcess
from atoll.privacy.secagg.fixed_point import total
from atoll.privacy.secagg.keys import Mask as KeyedMask
from atoll.privacy.secagg.masks import add_masks
from atoll.wire.errors import BadUpdate, LocalError, NotAllowed, Stale

SCALE = 1e6  # of the bench's order to mask


def ignore(done: int, total: int) -> None:
    pass


def unmasked(bench: Bench, out: str = "masked") -> tuple[list[int], np.ndarray[Any, np.dtype[np.int64]]]:
    data = bench.update(out)
    lanes = [np.frombuffer(data, "<u8", count=4).copy(), np.frombuffer(data, "<u4", offset=32).copy()]
    for lane, keys in zip(lanes, (MASK_KEYS[:2], MASK_KEYS), strict=True):
        add_masks(lane, 0, [KeyedMask(key=bytes.fromhex(one.key_hex), negative=not one.negative) for one in keys])
    return lanes[0].tolist(), total(lanes[1])


def test_the_levels_are_those_of_the_update_that_stays(make_bench: MakeBench) -> None:
    bench = make_bench()
    session = open_session(bench.prepare("north"))
    trained = session.train(bench.train("update"), ignore)
    assert trained.num_values == session.layout.num_values
    masked = session.mask(bench.mask(), ignore)
    assert masked.sha256_hex == hashlib.sha256(bench.update("masked")).hexdigest()
    assert (masked.num_bytes, masked.num_clipped) == (32 + 4 * trained.num_values, 0)
    exact, levels = unmasked(bench)
    assert exact == [40, 0, 2**64 - 7, 80]
    region = torch.frombuffer(bytearray(bench.update("update")), dtype=torch.uint8)
    for segment in session.layout.segments:
        value_P = torch.empty(segment.num_values, dtype=torch.float64)
        segment.encoding.decode(region[segment.offset : segment.offset + segment.num_bytes], 0, value_P)
        found = levels[segment.index : segment.index + segment.num_values]
        assert np.abs(found - value_P.numpy() * SCALE).max() < 1.001
    assert np.abs(levels).max() > 1000


def test_both_lanes_of_scaffold_are_masked(make_bench: MakeBench) -> None:
    bench = make_bench(kind="scaffold")
    session = open_session(bench.prepare("north"))
    trained = session.train(bench.train("update"), ignore)
    session.mask(bench.mask(), ignore)
    controls = [entry for entry in session.layout.means if entry.spec.role == "control"]
    assert controls
    assert trained.num_values == sum(entry.num_values for entry in session.layout.means)
    levels = unmasked(bench)[1]
    assert all(np.any(levels[entry.index : entry.index + entry.num_values]) for entry in controls)


def test_a_retry_sends_the_same_levels_under_other_masks(make_bench: MakeBench) -> None:
    bench = make_bench()
    session = open_session(bench.prepare("north"))
    session.train(bench.train("update"), ignore)
    session.mask(bench.mask(), ignore)
    session.mask(bench.mask("bare", exact_masks=[], masks=[]), ignore)
    bare = total(np.frombuffer(bench.update("bare"), "<u4", offset=32))
    assert np.array_equal(unmasked(bench)[1], bare)
    assert bench.update("bare") != bench.update("masked")
    other = open_session(bench.prepare("north", rounding_seed_hex="08" * 32))
    other.mask(bench.mask("other", exact_masks=[], masks=[]), ignore)
    differ = total(np.frombuffer(bench.update("other"), "<u4", offset=32)) - bare
    assert 0 < np.abs(differ).max() <= 1


def test_clipped_values_are_counted_where_they_may_be(make_bench: MakeBench) -> None:
    bench = make_bench()
    session = open_session(bench.prepare("north"))
    session.train(bench.train("update"), ignore)
    bound = 1e-3
    with pytest.raises(BadUpdate, match=r'tensor ".*" moved by .*, secure aggregation takes at most 0.001'):
        session.mask(bench.mask(bound=bound), ignore)
    assert not (bench.folder / "masked").exists()
    masked = session.mask(bench.mask(bound=bound, max_clipped=10_000), ignore)
    exact, levels = unmasked(bench)
    assert exact[1] == masked.num_clipped == int((np.abs(levels) >= int(bound * SCALE)).sum()) > 0
    with pytest.raises(BadUpdate, match=r"values are beyond 0\.001, at most 1 may be clipped"):
        session.mask(bench.mask(bound=bound, max_clipped=1), ignore)


def test_what_is_not_this_runs_update_or_cannot_be_summed(make_bench: MakeBench) -> None:
    bench = make_bench()
    session = open_session(bench.prepare("north"))
    session.train(bench.train("update"), ignore)
    (bench.folder / "short").write_bytes(bench.update("update")[:-4])
    with pytest.raises(LocalError, match="is not an update of this run"):
        session.mask(bench.mask(private_path=str(bench.folder / "short")), ignore)
    coded = replace(session.layout, means=(), raws=(), num_bytes=session.layout.num_bytes)
    with pytest.raises(LocalError, match="is not an update of this run"):
        mask_update(coded, bench.mask(), bytes(32), discount=1.0, on_slice=lambda: None)
    with pytest.raises(NotAllowed, match="counts this site's update as stale"):
        session.mask(bench.mask(staleness=1), ignore)


def test_a_stale_update_is_discounted_as_its_schedule_says(make_bench: MakeBench) -> None:
    bench = make_bench(kind="fedbuff", schedule={"kind": "buffered", "k": 2, "exponent": 0.5})
    session = open_session(bench.prepare("north"))
    assert session.prepared().sums_stale
    session.train(bench.train("update"), ignore)
    session.mask(bench.mask(), ignore)
    session.mask(bench.mask("stale", staleness=3), ignore)
    fresh, stale = unmasked(bench)[1], unmasked(bench, "stale")[1]
    assert discount_of(session.strategy.schedule, 3) == 0.5
    assert np.abs(stale - fresh * 0.5).max() <= 1.5


def test_a_cancelled_session_ends_before_the_next_slice(make_bench: MakeBench) -> None:
    bench = make_bench()
    session = open_session(bench.prepare("north"))
    session.train(bench.train("update"), ignore)

    def cancelled(done: int, total: int) -> None:
        raise Stale("task was cancelled")

    with pytest.raises(Stale):
        session.mask(bench.mask(), cancelled)
    assert not (bench.folder / "masked").exists()


def test_keys_and_counters_are_not_shown(make_bench: MakeBench) -> None:
    bench = make_bench()
    request = bench.mask(exact=[41_234, 0, 0, 0])
    assert decode(encode(request)) == request
    assert MASK_KEYS[0].key_hex not in repr(request)
    assert "41234" not in repr(request)


async def test_a_worker_that_is_killed_while_it_masks_leaves_the_bytes_to_the_next(
    make_bench: MakeBench, installed: Path, tmp_path: Path
) -> None:
    bench = make_bench()
    path = os.pathsep.join([str(installed), *(p for p in sys.path if p)])

    async def ready() -> WorkerProcess:
        found = WorkerProcess(tmp_path / "worker", env={"PYTHONPATH": path})
        await found.start()
        await found.prepare(bench.prepare("north"))
        return found

    worker = await ready()
    await worker.train(bench.train("update"))
    await worker.mask(bench.mask())
    whole = bench.update("masked")
    os.mkfifo(bench.folder / "pipe")  # it waits for what nobody writes
    asked = asyncio.ensure_future(worker.mask(bench.mask(private_path=str(bench.folder / "pipe"))))
    await asyncio.sleep(0.1)
    worker.kill()
    with pytest.raises(WorkerDied):
        await asked
    (bench.folder / "masked").write_bytes(b"\xff" * (len(whole) // 2))  # what it may have left
    worker = await ready()
    masked = await worker.mask(bench.mask())
    await worker.close()
    assert bench.update("masked") == whole
    assert masked.sha256_hex == hashlib.sha256(whole).hexdigest()
