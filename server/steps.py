"""The named moments of a run at the server, in their order: for tests that stop the server there.

Each is over when it is named; what it made is durable where the word says so.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum


class Step(StrEnum):
    SUBMITTED = "submitted"  # the run is in the database, its model is awaited
    STORED = "stored"  # version 0 is durable, the run is not queued yet
    QUEUED = "queued"  # the run is queued in the database, no site was asked
    OFFERED = "offered"  # a site was asked to join
    JOURNALLED = "journalled"  # an event is durable, nothing is done about it yet
    DISPATCHED = "dispatched"  # a task was sent
    GRANTED = "granted"  # a transfer may begin
    RECEIVING = "receiving"  # some of an update's frames are in
    RECEIVED = "received"  # all of them are
    CHECKED = "checked"  # the update is valid, the journal does not know it yet
    FOLDED = "folded"  # it is journalled and in the sum
    CLOSING = "closing"  # the round has all that it waits for
    MADE = "made"  # the next version's files are durable, the database does not know them
    COMMITTED = "committed"  # it does; nobody was told
    ANNOUNCED = "announced"  # the sites were told
    EVALUATED = "evaluated"  # metrics of a version are journalled
    ENDED = "ended"  # the end of the run is journalled, its status is not set yet


Observer = Callable[[Step, str], None]  # the step, and the run


def unobserved(step: Step, run: str) -> None:
    """Nobody looks on."""
