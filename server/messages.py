"""What a run says to its sites, as control messages."""

from __future__ import annotations

from atoll.server.records import RunRow
from atoll.server.run_state import RunState, Task
from atoll.wire import control_pb2 as pb
from atoll.wire.errors import RemoteError, to_detail
from atoll.wire.job import Asks
from atoll.wire.manifest import Manifest


def offer_message(row: RunRow, manifest: Manifest, fewest_sites: int) -> pb.RunOffer:
    """What a site is asked; an aggregate of the run combines `fewest_sites` at least."""
    return pb.RunOffer(
        run=row.run,
        job=row.job,
        manifest=manifest.encode(),
        app_hash=row.app_hash,
        submitted_by=row.submitted_by,
        fewest_sites=fewest_sites,
    )


_KINDS: dict[Asks, pb.TaskKind] = {"train": pb.TRAIN, "evaluate": pb.EVALUATE, "statistics": pb.STATISTICS}


def task_message(run: str, task: Task, state: RunState, asks: Asks = "train") -> pb.Task:
    """A task of a site; of a training also the terms of its open round, which a region folds with."""
    round_ = state.rounds.get(task.round)
    message = pb.Task(
        key=task_key(run, task),
        kind=_KINDS[asks if task.kind == "train" else "evaluate"],
        round=task.given_in,
        base_version=task.base_version,
    )
    if message.kind == pb.TRAIN and round_ is not None:
        message.sum.CopyFrom(pb.SumTerms(num_sites=round_.num_sites, max_weight=round_.max_weight))
        message.counted_round = state.counted.get(task.site, 0)
    return message


def committed_message(run: str, state: RunState, site: str) -> pb.Committed:
    """How far the run is, and up to which round nothing that the site keeps is needed any more."""
    return pb.Committed(run=run, round=state.settled_upto(site), version=state.version)


def cancel_message(run: str, task: Task, reason: RemoteError) -> pb.CancelTask:
    return pb.CancelTask(key=task_key(run, task), reason=to_detail(reason))


def task_key(run: str, task: Task) -> pb.TaskKey:
    return pb.TaskKey(run=run, task=task.task, attempt=task.attempt)
