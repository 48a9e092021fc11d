"""Tasks of gossip as the worker is asked to do them: which files are mixed, and what is to be written."""

from __future__ import annotations

from typing import Final, Literal

from atoll.client.meeting import MODEL, task_of
from atoll.client.neighbours import Neighbours
from atoll.cluster.messages import Part
from atoll.transport.outbox import Outbox
from atoll.transport.tasks import Key
from atoll.wire import control_pb2 as pb
from atoll.wire.errors import Malformed
from atoll.wire.names import check_site_name

GIVES: Final[dict[int, Literal["update", "model", "mixed"]]] = {
    pb.TRAIN: "update",
    pb.EXCHANGE: "model",
    pb.COLLECT: "mixed",
}
MAX_SHARES = 100_000  # as wire/gossip.proto bounds them
SUM_WITHIN = 1e-9  # each weight is rounded once


def parts_of(task: pb.Task, *, site: str, outbox: Outbox, neighbours: Neighbours) -> list[Part]:
    """The models that make up the site's own, by name; none where it has none yet.

    Raises:
        Malformed: weights that are none.
        LocalError: its own model of that round is not here any more.
    """
    mixing, run = task.mixing, task.key.run
    total = sum(share.weight for share in mixing.shares)
    if mixing.shares and (abs(total - 1) > SUM_WITHIN or len(mixing.shares) > MAX_SHARES):
        raise Malformed(f"the weights of {len(mixing.shares)} models sum to {total}, not to 1", run=run, field="mixing")
    found = []
    for share in mixing.shares:
        if share.site == site:
            path = outbox.payload_path(_own(task, site), MODEL)
        else:
            path = neighbours.path(run, mixing.round, check_site_name(share.site))
        found.append(Part(site=share.site, weight=share.weight, path=str(path)))
    return found


def metrics_of(task: pb.Task, *, site: str, outbox: Outbox) -> dict[str, pb.MetricSum]:
    """Those of the training that a collected model has come from."""
    result = outbox.result(_own(task, site)) if task.kind == pb.COLLECT else None
    return dict(result.metrics) if result is not None else {}


def _own(task: pb.Task, site: str) -> Key:
    return Key(run=task.key.run, task=task_of(task.mixing.round, site), attempt=task.mixing.attempt)
