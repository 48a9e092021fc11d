"""What a run needs of the server around it, as a protocol: so that a driver can be run without sites."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from atoll.server.round import Metrics
from atoll.wire.errors import RemoteError


class Surroundings(Protocol):
    """What a run needs of the server around it."""

    def send(self, site: str, **body: object) -> None:
        """Queue a control message for a site, if it is attached."""
        ...

    def withdraw_transfers(self, run: str, site: str | None, reason: RemoteError) -> None:
        """Take back the grants of a site in a run, or of all sites."""
        ...

    def regions(self, sites: Collection[str]) -> tuple[str, ...]:
        """Those of these sites that are attached and are regions; of all sites where none is named. Sorted."""
        ...

    def shortfall(self, run: str) -> str:
        """Who is missing for this run to start, and why, in words."""
        ...

    async def evaluate(self, run: str, version: int) -> Metrics:
        """Metric sums of a version on the server's own data."""
        ...

    def transferred(self, run: str) -> tuple[int, int]:
        """Bytes received and sent for this run since the server started."""
        ...

    def introduce(self, run: str) -> None:
        """Of gossip: tell neighbours that are not settled of each other, as the run's state says."""
        ...

    def run_ended(self, run: str) -> None:
        """The run holds no places at its sites any more."""
        ...
