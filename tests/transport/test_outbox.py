"""A result is held whole or not at all, whenever the process dies and however full the disk is."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from atoll.transport.outbox import Outbox, OutboxStep
from atoll.wire.control_pb2 import MetricSum, Payload, Result, TaskKey
from atoll.wire.errors import LocalError, Malformed
from atoll.wire.names import new_run_id

RUN = "0" * 26
OTHER_RUN = new_run_id()
DATA = bytes(range(256)) * 40


def result(task: str = "train-3", *, run: str = RUN, attempt: int = 1, round: int = 3) -> Result:
    return Result(
        key=TaskKey(run=run, task=task, attempt=attempt),
        round=round,
        weight=17,
        metrics={"loss": MetricSum(sum=3.5, count=17)},
        payloads=[Payload(name="update", num_bytes=len(DATA), crc32=5)],
    )


def commit(outbox: Outbox, done: Result) -> None:
    for payload in done.payloads:
        outbox.draft(done.key, payload.name).write_bytes(DATA)
    outbox.ready(done)
    assert outbox.commit(done.key)


def files_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def files_of_results(folder: Path) -> list[str]:
    return [name for name in files_below(folder) if name != "spare"]


@pytest.fixture
def outbox(tmp_path: Path) -> Outbox:
    return Outbox(tmp_path)


def test_a_committed_result_is_there_after_a_restart(tmp_path: Path, outbox: Outbox) -> None:
    commit(outbox, result())
    reopened = Outbox(tmp_path)
    assert reopened.results() == [result()]
    assert reopened.result(result().key) == result()
    assert reopened.payload_path(result().key, "update").read_bytes() == DATA


def test_a_result_without_payloads_is_held_too(tmp_path: Path, outbox: Outbox) -> None:
    evaluation = Result(key=TaskKey(run=RUN, task="evaluate-3", attempt=1), metrics={"accuracy": MetricSum(count=1)})
    outbox.ready(evaluation)
    outbox.commit(evaluation.key)
    assert Outbox(tmp_path).results() == [evaluation]


def test_a_result_is_ready_before_it_is_held_and_gone_with_the_process_until_then(
    tmp_path: Path, outbox: Outbox
) -> None:
    outbox.draft(result().key, "update").write_bytes(DATA)
    outbox.ready(result())
    path = outbox.payload_path(result().key, "update")
    assert (outbox.results(), outbox.is_held(result().key), path.read_bytes()) == ([result()], False, DATA)
    outbox.commit(result().key)
    assert (outbox.is_held(result().key), outbox.payload_path(result().key, "update")) == (True, path)
    outbox.draft(result("train-4").key, "update").write_bytes(DATA)
    outbox.ready(result("train-4"))
    assert Outbox(tmp_path).results() == [result()]


def test_a_result_that_is_released_before_the_disk_has_it_stays_released(tmp_path: Path, outbox: Outbox) -> None:
    outbox.draft(result().key, "update").write_bytes(DATA)
    evaluation = Result(key=TaskKey(run=RUN, task="evaluate-3", attempt=1))
    for done in (result(), evaluation):
        outbox.ready(done)
        assert outbox.release(done.key)
        assert not outbox.commit(done.key)
    assert outbox.results() == Outbox(tmp_path).results() == []


def test_nobody_who_reads_waits_for_the_disk(tmp_path: Path) -> None:
    syncing, go_on = threading.Event(), threading.Event()

    def stop_at(step: OutboxStep) -> None:
        if step is OutboxStep.PAYLOADS_SYNCED:
            syncing.set()
            assert go_on.wait(60)

    outbox = Outbox(tmp_path, on_step=stop_at)
    with ThreadPoolExecutor(1) as pool:
        committing = pool.submit(commit, outbox, result())
        assert syncing.wait(60)
        assert (outbox.results(), outbox.is_held(result().key)) == ([result()], False)
        go_on.set()
        committing.result(60)
    assert outbox.is_held(result().key)


def test_drafts_are_dropped_when_the_outbox_opens(tmp_path: Path, outbox: Outbox) -> None:
    draft = outbox.draft(result().key, "update")
    draft.write_bytes(b"half")
    Outbox(tmp_path)
    assert not draft.exists()


def test_the_file_of_a_released_payload_is_written_over_by_the_next(outbox: Outbox, tmp_path: Path) -> None:
    commit(outbox, result())
    inode = outbox.payload_path(result().key, "update").stat().st_ino
    commit(outbox, result("train-4"))
    outbox.release(result().key)
    outbox.release(result("train-4").key)
    assert files_below(tmp_path) == ["spare"]
    assert outbox.draft(result("train-5").key, "update").stat().st_ino == inode
    commit(outbox, result("train-5"))
    outbox.release_run(RUN)
    assert files_below(tmp_path) == []


def test_the_first_of_two_results_for_a_key_counts(outbox: Outbox) -> None:
    commit(outbox, result())
    second = result()
    second.weight = 99
    with pytest.raises(LocalError, match="has its result"):
        outbox.draft(second.key, "update")
    outbox.ready(second)
    outbox.commit(second.key)
    assert outbox.results() == [result()]
    assert outbox.payload_path(second.key, "update").read_bytes() == DATA


def test_a_newer_attempt_replaces_the_older(outbox: Outbox, tmp_path: Path) -> None:
    commit(outbox, result(attempt=1))
    commit(outbox, result("train-4"))
    commit(outbox, result(attempt=2))
    assert outbox.results() == Outbox(tmp_path).results() == [result(attempt=2), result("train-4")]


def test_results_are_released_by_key_round_and_run(outbox: Outbox, tmp_path: Path) -> None:
    for round in (1, 2, 3):
        commit(outbox, result(f"train-{round}", round=round))
    commit(outbox, result("train-1", run=OTHER_RUN, round=1))
    assert outbox.release(result("train-3").key)
    assert not outbox.release(result("train-3").key)
    assert outbox.release_upto(RUN, 1) == 1
    assert [done.key.task for done in outbox.results()] == ["train-1", "train-2"]
    assert outbox.release_run(OTHER_RUN) == 1
    assert outbox.results() == Outbox(tmp_path).results() == [result("train-2", round=2)]
    assert len(files_of_results(tmp_path)) == 2


def test_release_drops_the_draft_of_a_cancelled_task(outbox: Outbox) -> None:
    draft = outbox.draft(result().key, "update")
    draft.write_bytes(b"half")
    assert not outbox.release(result().key)
    assert not draft.exists()


def test_a_payload_of_another_size_is_not_held(outbox: Outbox) -> None:
    outbox.draft(result().key, "update").write_bytes(DATA[:-1])
    with pytest.raises(LocalError, match="has 10239 bytes, its result says 10240"):
        outbox.ready(result())
    assert outbox.results() == []


def test_a_payload_that_was_not_written_is_named(outbox: Outbox) -> None:
    with pytest.raises(LocalError, match="was not written"):
        outbox.ready(result())


@pytest.mark.parametrize(
    "bad",
    [
        Result(key=TaskKey(run="../../etc", task="t", attempt=1)),
        Result(key=TaskKey(run=RUN, task="../t", attempt=1)),
        Result(key=TaskKey(run=RUN, task="t", attempt=0)),
        Result(key=TaskKey(run=RUN, task="t", attempt=1), payloads=[Payload(name="../update")]),
        Result(key=TaskKey(run=RUN, task="t", attempt=1), payloads=[Payload(name=f"p{n}") for n in range(17)]),
    ],
)
def test_names_that_would_leave_the_folder_and_long_lists_are_refused(outbox: Outbox, bad: Result) -> None:
    with pytest.raises(Malformed):
        outbox.ready(bad)
    assert outbox.results() == []


def test_unknown_payloads_are_refused(outbox: Outbox) -> None:
    commit(outbox, result())
    with pytest.raises(LocalError, match="not in the outbox"):
        outbox.payload_path(result().key, "control")


def test_a_damaged_result_is_dropped_and_the_others_stay(tmp_path: Path, outbox: Outbox) -> None:
    commit(outbox, result())
    commit(outbox, result("train-4"))
    outbox.payload_path(result().key, "update").write_bytes(b"cut short")
    assert Outbox(tmp_path).results() == [result("train-4")]


# --- killed at each step -------------------------------------------------------------------------------------------

_WORK = """
import os, signal, sys
from pathlib import Path
from atoll.transport.outbox import Outbox, OutboxStep
from atoll.wire.control_pb2 import Result

folder, work, kill_at, data = Path(sys.argv[1]), sys.argv[2], OutboxStep(sys.argv[3]), bytes.fromhex(sys.argv[5])
done = Result.FromString(bytes.fromhex(sys.argv[4]))
armed = False

def on_step(step):
    if armed and step is kill_at:
        os.kill(os.getpid(), signal.SIGKILL)

outbox = Outbox(folder, on_step=on_step)
armed = True
if work == "commit":
    for payload in done.payloads:
        outbox.draft(done.key, payload.name).write_bytes(data)
    outbox.ready(done)
    outbox.commit(done.key)
else:
    outbox.release(done.key)
"""


def killed_at(step: OutboxStep, work: str, folder: Path, done: Result) -> None:
    """Does the work in a process that is killed when it has done the step."""
    arguments = [str(folder), work, step.value, done.SerializeToString().hex(), DATA.hex()]
    process = subprocess.run([sys.executable, "-c", _WORK, *arguments], capture_output=True, check=False)
    assert process.returncode == -signal.SIGKILL, process.stderr


NOT_YET_HELD = (OutboxStep.PAYLOADS_SYNCED, OutboxStep.META_WRITTEN)
HELD = (OutboxStep.RENAMED, OutboxStep.HELD, OutboxStep.OLDER_DROPPED)


@pytest.mark.parametrize("step", [*NOT_YET_HELD, *HELD])
def test_killed_while_committing_holds_the_result_once_or_not_at_all(tmp_path: Path, step: OutboxStep) -> None:
    commit(Outbox(tmp_path), result("earlier"))
    killed_at(step, "commit", tmp_path, result(attempt=2))
    outbox = Outbox(tmp_path)
    expected = [result("earlier")] if step in NOT_YET_HELD else [result("earlier"), result(attempt=2)]
    assert outbox.results() == expected
    if step in NOT_YET_HELD:
        commit(outbox, result(attempt=2))  # the site does again what it does not find
    assert Outbox(tmp_path).results() == [result("earlier"), result(attempt=2)]
    assert len(files_of_results(tmp_path)) == 4


@pytest.mark.parametrize("step", HELD)
def test_killed_while_a_newer_attempt_replaces_an_older_leaves_the_newer(tmp_path: Path, step: OutboxStep) -> None:
    commit(Outbox(tmp_path), result(attempt=1))
    killed_at(step, "commit", tmp_path, result(attempt=2))
    assert Outbox(tmp_path).results() == [result(attempt=2)]
    assert len(files_of_results(tmp_path)) == 2


@pytest.mark.parametrize("step", [OutboxStep.UNHELD, OutboxStep.REMOVED])
def test_killed_while_releasing_leaves_nothing_of_it(tmp_path: Path, step: OutboxStep) -> None:
    commit(Outbox(tmp_path), result("kept"))
    commit(Outbox(tmp_path), result())
    killed_at(step, "release", tmp_path, result())
    assert Outbox(tmp_path).results() == [result("kept")]
    assert len(files_of_results(tmp_path)) == 2


_FULL_DISK = """
import resource, sys
from pathlib import Path
from atoll.transport.outbox import Outbox
from atoll.wire.control_pb2 import Result
from atoll.wire.errors import DiskFull

folder, done, data = Path(sys.argv[1]), Result.FromString(bytes.fromhex(sys.argv[2])), bytes.fromhex(sys.argv[3])
outbox = Outbox(folder)
outbox.draft(done.key, "update").write_bytes(data)
outbox.ready(done)
resource.setrlimit(resource.RLIMIT_FSIZE, (10, resource.RLIM_INFINITY))
try:
    outbox.commit(done.key)
except DiskFull as error:
    print(error)
assert not outbox.is_held(done.key)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
outbox.commit(done.key)
assert outbox.is_held(done.key)
"""


def test_a_full_disk_holds_nothing_and_the_draft_can_be_committed_later(tmp_path: Path) -> None:
    arguments = [str(tmp_path), result().SerializeToString().hex(), DATA.hex()]
    process = subprocess.run([sys.executable, "-c", _FULL_DISK, *arguments], capture_output=True, text=True, check=True)
    assert "no room on the disk" in process.stdout
    assert process.stdout.endswith("; free some, then start again\n")
    assert Outbox(tmp_path).results() == [result()]
