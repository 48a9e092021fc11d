"""A task is taken on once, whatever is sent again and whenever the process dies."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.transport.tasks import Key, TaskLog, TaskStep
from atoll.wire.control_pb2 import TRAIN, RunOffer, Task, TaskKey
from atoll.wire.errors import LocalError, Malformed
from atoll.wire.names import new_run_id

RUN = "0" * 26
OTHER_RUN = new_run_id()


def task(name: str = "train-3", *, run: str = RUN, attempt: int = 1, round: int = 3) -> Task:
    return Task(key=TaskKey(run=run, task=name, attempt=attempt), kind=TRAIN, round=round, base_version=2, config=b"{}")


@pytest.fixture
def log(tmp_path: Path) -> TaskLog:
    return TaskLog(tmp_path)


def reopened(folder: Path, log: TaskLog) -> TaskLog:
    log.close()
    return TaskLog(folder)


def test_accepted_tasks_are_there_after_a_restart(tmp_path: Path, log: TaskLog) -> None:
    assert log.accept(task())
    assert log.accept(task("train-2", round=2))
    assert reopened(tmp_path, log).open_tasks() == [task("train-2", round=2), task()]


@pytest.mark.parametrize("end", [TaskLog.finish, TaskLog.cancel])
def test_a_task_that_ended_is_never_taken_on_again(tmp_path: Path, log: TaskLog, end: object) -> None:
    log.accept(task())
    assert callable(end)
    assert end(log, task().key)
    assert not end(log, task().key)
    log = reopened(tmp_path, log)
    assert log.open_tasks() == []
    assert not log.accept(task())


def test_only_the_newest_attempt_counts(log: TaskLog) -> None:
    assert log.accept(task(attempt=2))
    assert not log.accept(task(attempt=2))
    assert not log.accept(task(attempt=1))
    assert log.accept(task(attempt=3))
    assert log.open_tasks() == [task(attempt=3)]
    assert not log.finish(task(attempt=2).key)
    assert log.finish(task(attempt=3).key)


def test_committed_rounds_are_forgotten_but_for_open_tasks(log: TaskLog) -> None:
    for round in (1, 2, 3):
        log.accept(task(f"train-{round}", round=round))
    log.accept(task("train-1", run=OTHER_RUN, round=1))
    log.finish(task("train-1").key)
    log.finish(task("train-3").key)
    log.forget_upto(RUN, 2)
    assert log.accept(task("train-1", round=1))
    assert not log.accept(task("train-2", round=2))
    assert not log.accept(task("train-3", round=3))
    assert not log.accept(task("train-1", run=OTHER_RUN, round=1))


def test_a_run_is_joined_until_it_is_left_with_all_its_tasks(tmp_path: Path, log: TaskLog) -> None:
    log.join(RUN, RunOffer(run=RUN, job=b"first"))
    log.join(RUN, RunOffer(run=RUN, job=b"again"))
    log.join(OTHER_RUN, RunOffer(run=OTHER_RUN))
    log.accept(task())
    log = reopened(tmp_path, log)
    assert log.joined() == {RUN: RunOffer(run=RUN, job=b"again"), OTHER_RUN: RunOffer(run=OTHER_RUN)}
    log.leave(RUN)
    assert list(log.joined()) == [OTHER_RUN]
    assert log.open_tasks() == []


@pytest.mark.parametrize(
    "key",
    [
        TaskKey(run="", task="t", attempt=1),
        TaskKey(run="../" * 8 + "ab", task="t", attempt=1),
        TaskKey(run=RUN, task="", attempt=1),
        TaskKey(run=RUN, task="a/b", attempt=1),
        TaskKey(run=RUN, task="t" * 300, attempt=1),
        TaskKey(run=RUN, task="t", attempt=0),
    ],
)
def test_a_key_that_is_none_is_refused(log: TaskLog, key: TaskKey) -> None:
    with pytest.raises(Malformed):
        log.accept(Task(key=key))


def test_keys_go_to_messages_and_back() -> None:
    key = Key(run=RUN, task="train-3", attempt=2)
    assert Key.of(key.to_message()) == key
    assert str(key) == f"{RUN}/train-3#2"


def test_a_second_agent_in_the_folder_is_refused(tmp_path: Path, log: TaskLog) -> None:
    with pytest.raises(LocalError, match="another agent works in this folder"):
        TaskLog(tmp_path)


def test_a_damaged_file_says_what_to_do(tmp_path: Path, log: TaskLog) -> None:
    log.close()
    for path in tmp_path.iterdir():
        path.write_bytes(b"no database at all " * 100)
    with pytest.raises(LocalError, match="move the file away"):
        TaskLog(tmp_path)


# --- killed at each step -------------------------------------------------------------------------------------------

_WORK = """
import os, signal, sys
from pathlib import Path
from atoll.transport.tasks import TaskLog, TaskStep
from atoll.wire.control_pb2 import RunOffer, Task

folder, work, kill_at, task = Path(sys.argv[1]), sys.argv[2], sys.argv[3], Task.FromString(bytes.fromhex(sys.argv[4]))
armed = False

def on_step(step):
    if armed and step is TaskStep(kill_at):
        os.kill(os.getpid(), signal.SIGKILL)

log = TaskLog(folder, on_step=on_step)
armed = True
{
    "accept": lambda: log.accept(task),
    "finish": lambda: log.finish(task.key),
    "cancel": lambda: log.cancel(task.key),
    "join": lambda: log.join(task.key.run, RunOffer(run=task.key.run)),
    "leave": lambda: log.leave(task.key.run),
}[work]()
"""


def killed_at(step: TaskStep, work: str, folder: Path, subject: Task) -> None:
    arguments = [str(folder), work, step.value, subject.SerializeToString().hex()]
    process = subprocess.run([sys.executable, "-c", _WORK, *arguments], capture_output=True, check=False)
    assert process.returncode == -signal.SIGKILL, process.stderr


@pytest.mark.parametrize("step", TaskStep)
def test_killed_while_accepting_takes_the_task_on_once_or_not_at_all(tmp_path: Path, step: TaskStep) -> None:
    killed_at(step, "accept", tmp_path, task())
    with TaskLog(tmp_path) as log:
        durable = step is TaskStep.DURABLE
        assert log.open_tasks() == ([task()] if durable else [])
        assert log.accept(task()) is not durable  # the server sends it again
        assert log.open_tasks() == [task()]


@pytest.mark.parametrize("step", TaskStep)
@pytest.mark.parametrize("work", ["finish", "cancel"])
def test_killed_while_ending_a_task(tmp_path: Path, step: TaskStep, work: str) -> None:
    with TaskLog(tmp_path) as log:
        log.accept(task())
    killed_at(step, work, tmp_path, task())
    with TaskLog(tmp_path) as log:
        assert log.open_tasks() == ([] if step is TaskStep.DURABLE else [task()])
        assert not log.accept(task())


@pytest.mark.parametrize("step", TaskStep)
def test_killed_while_joining_or_leaving_a_run(tmp_path: Path, step: TaskStep) -> None:
    durable = step is TaskStep.DURABLE
    killed_at(step, "join", tmp_path, task())
    with TaskLog(tmp_path) as log:
        assert list(log.joined()) == ([RUN] if durable else [])
        log.join(RUN, RunOffer(run=RUN))
        log.accept(task())
    killed_at(step, "leave", tmp_path, task())
    with TaskLog(tmp_path) as log:
        assert (list(log.joined()), log.open_tasks()) == (([], []) if durable else ([RUN], [task()]))


_FULL_DISK = """
import resource, sys
from pathlib import Path
from atoll.transport.tasks import TaskLog
from atoll.wire.control_pb2 import Task, TaskKey
from atoll.wire.errors import DiskFull

log = TaskLog(Path(sys.argv[1]))
log.accept(Task(key=TaskKey(run="0" * 26, task="first", attempt=1)))
large = Task(key=TaskKey(run="0" * 26, task="second", attempt=1), config=bytes(60_000))
resource.setrlimit(resource.RLIMIT_FSIZE, (32_768, resource.RLIM_INFINITY))
try:
    log.accept(large)
except DiskFull as error:
    print(error)
assert [task.key.task for task in log.open_tasks()] == ["first"]
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert log.accept(large)
"""


def test_a_full_disk_takes_nothing_on_and_the_log_stays_usable(tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-c", _FULL_DISK, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert (process.returncode, process.stderr) == (0, "")
    assert "no room on the disk" in process.stdout
    with TaskLog(tmp_path) as log:
        assert len(log.open_tasks()) == 2
