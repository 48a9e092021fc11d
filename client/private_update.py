"""An update that stays at this site: what its worker has written, and what else would have gone with it.

Both lie in the folder of the task's result in the outbox, and go with it. Nobody is granted them, since no result names
them. Invariant: the facts are there only once the update itself is durable.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final, Self

from atoll.client.sealed import Sealer, erase
from atoll.cluster.messages import Trained
from atoll.transport.durable import sync_file
from atoll.wire import control_pb2 as pb
from atoll.wire.errors import Unknown
from atoll.wire.model_file import open_model

PRIVATE: Final = "private"  # name of the payload that is none
_FACTS: Final = "private.sealed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What sessions need to know of an update. None of it leaves but in a sum."""

    round: int  # of its training
    base_version: int
    base_digest: str  # SHA-256, hex, of the data of the version that it is the difference to
    weight: int
    metrics: Mapping[str, tuple[float, float]]  # sum and count
    num_values: int
    num_factors: int = 0
    sums_stale: bool = False  # the run sums updates to several base versions

    def encode(self) -> bytes:
        return json.dumps({name: getattr(self, name) for name in (field.name for field in fields(self))}).encode()

    @classmethod
    def decode(cls, data: bytes) -> Self:
        table = json.loads(data)
        metrics = {name: (float(total), float(count)) for name, (total, count) in table.pop("metrics").items()}
        return cls(metrics=metrics, **table)


def stays_here(folder: Path) -> bool:
    """Whether the update of the task whose result has `folder` stays at this site."""
    return (folder / _FACTS).exists()


def keep_private(
    folder: Path, sealer: Sealer, task: pb.Task, base: Path, trained: Trained, *, sums_stale: bool
) -> pb.Result:
    """Makes an update durable that a worker has written, and gives the result that says no more than that it is there.

    Args:
        base: model file of the version that it is the difference to.

    Raises:
        DiskFull, LocalError: it cannot be kept.
    """
    with open_model(base) as model:
        digest = hashlib.sha256(model.map).hexdigest()
    facts = Facts(
        round=task.round,
        base_version=task.base_version,
        base_digest=digest,
        weight=trained.weight,
        metrics=trained.metrics,
        num_values=trained.num_values,
        num_factors=trained.num_factors,
        sums_stale=sums_stale,
    )
    PrivateUpdate(folder, sealer).keep(facts)
    return pb.Result(key=task.key, round=task.round)


class PrivateUpdate:
    """The update of the task whose result has `folder`. Blocks."""

    def __init__(self, folder: Path, sealer: Sealer) -> None:
        self._folder, self._sealer = folder, sealer

    @property
    def path(self) -> Path:
        """Where the worker writes it."""
        return self._folder / f"{PRIVATE}.payload"

    def keep(self, facts: Facts) -> None:
        """Makes the update durable that lies at `path`, and what goes with it. Raises DiskFull, LocalError."""
        sync_file(self.path)
        self._sealer.write(self._folder / _FACTS, facts.encode())

    def facts(self) -> Facts:
        """Raises Unknown where there is no update, LocalError where it is damaged."""
        data = self._sealer.read(self._folder / _FACTS)
        if data is None or not self.path.exists():
            raise Unknown("this site holds no update of the task any more", field="key")
        return Facts.decode(data)

    def erase(self) -> None:
        erase(self._folder / _FACTS)
        erase(self.path)
