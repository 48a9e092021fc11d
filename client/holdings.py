"""What a site holds on its disk over connections: what it tells of it in Hello, and what a commit makes useless."""

from __future__ import annotations

import asyncio
import logging

from atoll.client.deliveries import Deliveries
from atoll.client.neighbours import Neighbours
from atoll.transport.hello import Abilities, make_hello
from atoll.transport.outbox import Outbox
from atoll.transport.tasks import Key, TaskLog
from atoll.wire import control_pb2 as pb
from atoll.wire.errors import AtollError

_log = logging.getLogger(__name__)


async def hello_of(
    task_log: TaskLog, outbox: Outbox, *, capacity: pb.Capacity, neighbours: Neighbours, lists: int, ours: Abilities
) -> pb.Hello:
    """What this site has under way; `lists` is the version of its member list."""
    open_tasks = await asyncio.to_thread(task_log.open_tasks)
    joined = await asyncio.to_thread(task_log.joined)
    held = outbox.results()  # read last: a task that is closed meanwhile has its result here
    held_keys = {Key.of(result.key) for result in held}
    return make_hello(
        capacity,
        held_updates=[result.key for result in held],
        open_tasks=[task.key for task in open_tasks if Key.of(task.key) not in held_keys],
        joined_runs=sorted(joined),
        member_list_version=lists,
        card=neighbours.card(),
        ours=ours,
    )


async def tidy_up(
    committed: pb.Committed, *, deliveries: Deliveries, neighbours: Neighbours, task_log: TaskLog
) -> None:
    """Drop what a commit has made useless, beside the next round: removing files of this size takes a while."""
    try:
        await deliveries.committed(committed.run, committed.round)
        await neighbours.drop_upto(committed.run, committed.round)
        await asyncio.to_thread(task_log.forget_upto, committed.run, committed.round)
    except AtollError as error:
        _log.error("run %s, after round %d: %s", committed.run, committed.round, error)
