"""What all runs of a site share: its settings and home, its records, and the ways to its server and its workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from atoll.client.attachment import Mailbox
from atoll.client.base_models import BaseModels, Spawn
from atoll.client.board import Board
from atoll.client.deliveries import Deliveries
from atoll.client.home import SiteHome
from atoll.client.neighbours import Neighbours
from atoll.client.sealed import Sealer
from atoll.client.settings import SiteSettings
from atoll.client.steps import Observer
from atoll.client.workers import Witness, Worker
from atoll.transport.outbox import Outbox
from atoll.transport.tasks import TaskLog
from atoll.wire.errors import RemoteError


@dataclass(frozen=True, slots=True, kw_only=True)
class Workplace:
    """One for an agent."""

    settings: SiteSettings
    home: SiteHome
    secret: bytes  # 32 bytes that only this site has
    sealer: Sealer  # of what else only this site reads
    mailbox: Mailbox
    task_log: TaskLog
    outbox: Outbox
    base_models: BaseModels
    deliveries: Deliveries
    neighbours: Neighbours
    board: Board
    spawn: Spawn
    leave_run: Callable[[str, RemoteError], None]
    on_step: Observer
    new_worker: Callable[[Path, Path], Worker]  # folder of its socket, path of its log
    witness: Witness
    is_region: bool  # the worker is a server with sites of its own
