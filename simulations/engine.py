"""What a simulated run asks of the engine that trains and judges for its sites."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from atoll.cluster.messages import Evaluate, Train, Trained

Metrics = Mapping[str, tuple[float, float]]
Kind = Literal["auto", "sequential", "processes"]
KINDS: tuple[Kind, ...] = ("auto", "sequential", "processes")


class Engine(Protocol):
    """Does tasks of sites. Which engine did them shows in no byte of an update, and in nothing that a site keeps."""

    @property
    def name(self) -> str:
        """What people call it, with what it has found out to be best."""
        ...

    @property
    def fragments(self) -> Sequence[tuple[int, int]]:
        """Bytes of a version's data that rounds exchange in turns; none where all moves."""
        ...

    def max_weight(self, site: str) -> int:
        """What a site promises of its updates. Raises AppFailed where it cannot take part."""
        ...

    def num_steps(self, site: str) -> int:
        """Optimizer steps of a site's round."""
        ...

    def expect(self, site: str | None, request: Train | Evaluate, at_s: float) -> None:
        """Says what will be asked for, and when in simulated time, so that it may be begun; no site: the server.

        A task that comes earlier is begun earlier. Nothing has to come of it.
        """
        ...

    def withdraw(self, key: str) -> None:
        """What was expected under this key is asked for no more; it leaves nothing at its site."""
        ...

    def train(self, site: str, request: Train) -> tuple[Trained, memoryview]:
        """One round of a site: what it came to, and its update, which the next call may overwrite.

        Raises:
            RemoteError: the update cannot be made or sent; a deployment would lose the task.
            LocalError: this machine cannot do it.
        """
        ...

    def evaluate(self, site: str | None, request: Evaluate) -> Metrics:
        """Metric sums of a version on a site's test data, or on the server's; empty where it has none. Raises as `train`."""
        ...

    def close(self) -> None:
        """Ends all that belongs to the engine."""
        ...
