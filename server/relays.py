"""Models that go through the server, since two neighbours cannot reach each other: files until all have taken them.

Bounds. Each model comes in once a round, however many want it, through the same few staging slots as every upload, and
lies on the disk until the next round begins. Memory does not grow; the disk holds at most a model for each site of a run
that cannot be reached.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from atoll.server.models import Outgoing
from atoll.server.transfers import Transfers
from atoll.transport.durable import disk_errors, private_folder, remove_tree
from atoll.transport.grants import Subject
from atoll.wire import control_pb2 as pb
from atoll.wire.errors import DiskFull, LocalError

log = logging.getLogger(__name__)

DISK_PATIENCE_S = 5.0  # between tries while the disk is full; the round's deadline ends them


@dataclass(slots=True, kw_only=True)
class _Relayed:
    """One site's model of one round."""

    run: str
    round: int
    path: Path
    num_bytes: int
    here: bool = False
    waiting: dict[str, int] = field(default_factory=dict)  # who wants it, and from which byte


class Relays:
    """The models of all runs that are relayed now, in `folder`, which begins empty."""

    def __init__(self, folder: Path, transfers: Transfers) -> None:
        remove_tree(folder)
        self._folder, self._transfers = folder, transfers
        self._models: dict[tuple[str, str, int], _Relayed] = {}  # by run, task and attempt

    def expects(self, key: pb.TaskKey) -> bool:
        """Whether the model of a task is wanted and not here yet."""
        relayed = self._models.get(_of(key))
        return relayed is not None and not relayed.here

    async def want(self, site: str, key: pb.TaskKey, *, round_: int, num_bytes: int, offset: int) -> bool:
        """Send `site` the model of a task as soon as it is here; whether it has to be uploaded first."""
        relayed = self._models.get(_of(key))
        if relayed is None:
            path = self._folder / key.run / f"{key.task}.{key.attempt}"
            relayed = _Relayed(run=key.run, round=round_, path=path, num_bytes=num_bytes)
            self._models[_of(key)] = relayed
        if relayed.here:
            await self._send(site, key, relayed, offset)
        else:
            relayed.waiting[site] = offset
        return not relayed.here

    def taker(self, key: pb.TaskKey) -> Callable[[memoryview], Awaitable[None]]:
        """Takes the whole bytes of a model, and sends them on."""

        async def take(model: memoryview) -> None:
            relayed = self._models.get(_of(key))
            while relayed is not None and not relayed.here:
                try:
                    await asyncio.to_thread(_write, relayed.path, model)
                    relayed.here = True
                except DiskFull as error:
                    log.error("run %s: a model to be relayed waits for disk space: %s", key.run, error)
                    await asyncio.sleep(DISK_PATIENCE_S)
                    relayed = self._models.get(_of(key))  # the round may be over
            if relayed is not None:
                waiting, relayed.waiting = relayed.waiting, {}
                for site, offset in waiting.items():
                    await self._send(site, key, relayed, offset)

        return take

    def drop(self, run: str, before: int | None = None) -> None:
        """Forget the models of a run: of rounds before one, or all."""
        for key, relayed in list(self._models.items()):
            if relayed.run == run and (before is None or relayed.round < before):
                del self._models[key]
                relayed.path.unlink(missing_ok=True)

    async def _send(self, site: str, key: pb.TaskKey, relayed: _Relayed, offset: int) -> None:
        subject = Subject(direction="down", run=key.run, task=key.task, attempt=key.attempt, payload="model")
        source = Outgoing(path=relayed.path, data_offset=0, num_bytes=relayed.num_bytes)
        try:
            await self._transfers.ask_down_of(site, subject, source, min(offset, relayed.num_bytes))
        except LocalError as error:  # the round is over
            log.info("run %s: %s is not relayed to %s any more: %s", key.run, key.task, site, error)


def _of(key: pb.TaskKey) -> tuple[str, str, int]:
    return key.run, key.task, key.attempt


def _write(path: Path, model: memoryview) -> None:
    draft = path.with_name(f"{path.name}.draft")
    private_folder(path.parent)
    try:
        with disk_errors(path):
            draft.write_bytes(model)
            os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
