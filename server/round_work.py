"""What becomes of the updates of a run's rounds, by the kind of the run: training, payloads, or questions alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from atoll.aggregation.reducers.reduction import NO_METRICS, Metrics
from atoll.server.round import Round
from atoll.wire import runs_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class NewVersion:
    """A model version whose files are durable, not yet committed."""

    version: int
    crc32: int  # of the model's data
    num_bytes: int


class RoundWork(Protocol):
    """Between a whole update and the next version. All but the properties and `lacks` may block."""

    def update_bytes(self, round_: int) -> int:
        """Length of an update of a round; at most, where `grows`."""
        ...

    def partial_bytes(self, round_: int) -> int:
        """Length of a region's sum of a round; 0 where no region may be in it."""
        ...

    @property
    def grows(self) -> bool:
        """Whether updates have a length of their own, up to `update_bytes`."""
        ...

    def mixed(self, num_updates: int) -> int:
        """Updates, at least, in every value that anybody sees of so many."""
        ...

    def open_round(self, round_: Round) -> None:
        """Get ready for the updates of a round, or of its larger cohort."""
        ...

    def lacks(self, round_: Round) -> tuple[str, ...]:
        """Sites whose update is accepted and not here, as after a restart: they still keep it."""
        ...

    def check(self, round_: Round, site: str, weight: int, update: memoryview, metrics: Metrics = NO_METRICS) -> None:
        """Nothing where the update can be folded. Raises RemoteError."""
        ...

    def fold(self, round_: Round, site: str, weight: int, update: memoryview) -> None:
        """Take in a checked and journalled update; once, however often it comes. Raises DiskFull."""
        ...

    def write_partial(self, round_: Round, path: Path) -> tuple[int, int]:
        """Writes the sum of a closing round as a region sends it up; length and crc32."""
        ...

    def drop(self, number: int) -> None:
        """Forget a round that is committed or given up."""
        ...

    def make_version(self, round_: Round, current: int) -> NewVersion:
        """What a closing round makes of version `current`, durable on disk. Raises DiskFull; BadUpdate ends the run."""
        ...

    def complete(self, record: runs_pb2.RoundRecord, round_: Round) -> None:
        """Add to the record of a closing round what people see of it beside sums and sizes."""
        ...
