"""What a run says to its sites, as control messages."""

from __future__ import annotations

from atoll.aggregation.schedules.gossip import GossipState
from atoll.server.exchange import start_of
from atoll.server.records import RunRow
from atoll.server.run_state import RunState, Task
from atoll.wire import control_pb2 as pb
from atoll.wire.errors import RemoteError, to_detail
from atoll.wire.gossip_pb2 import Mixing, Share
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
    """A task of a site; of a training with the terms of its open round, which a region folds with."""
    round_ = state.rounds.get(task.round)
    message = pb.Task(
        key=task_key(run, task),
        kind=_kind(task, state, asks),
        round=task.given_in,
        base_version=task.base_version,
    )
    if message.kind in (pb.TRAIN, pb.COLLECT) and round_ is not None:
        message.sum.CopyFrom(pb.SumTerms(num_sites=round_.num_sites, max_weight=round_.max_weight))
        message.counted_round = state.counted.get(task.site, 0)
    if (start := start_of(state, task)) is not None:
        shares = [Share(site=site, weight=weight) for site, weight in start.shares]
        message.mixing.CopyFrom(Mixing(round=start.round, attempt=1, shares=shares))
    return message


def _kind(task: Task, state: RunState, asks: Asks) -> pb.TaskKind:
    if task.kind == "train":
        return pb.COLLECT if isinstance(state.schedule, GossipState) else _KINDS[asks]
    return pb.EXCHANGE if task.kind == "exchange" else pb.EVALUATE


def committed_message(run: str, state: RunState, site: str) -> pb.Committed:
    """How far the run is, and up to which round nothing that the site keeps is needed any more."""
    return pb.Committed(run=run, round=state.settled_upto(site), version=state.version)


def cancel_message(run: str, task: Task, reason: RemoteError) -> pb.CancelTask:
    return pb.CancelTask(key=task_key(run, task), reason=to_detail(reason))


def task_key(run: str, task: Task) -> pb.TaskKey:
    return pb.TaskKey(run=run, task=task.task, attempt=task.attempt)
