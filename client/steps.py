"""The named moments of a site's work: for the log, for `atoll site status`, and for tests that stop the agent there."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum


class Step(StrEnum):
    """Each is over when it is named; what it made is durable where the word says so."""

    ATTACHED = "attached"  # the server has said Welcome
    OFFERED = "offered"  # a run is offered, nothing is looked at yet
    JOINED = "joined"  # its worker is ready and the run is durable here; the server does not know yet
    ACCEPTED = "accepted"  # a task is durable in the task log
    FETCHED = "fetched"  # its base version is on this disk
    WORKED = "worked"  # the worker has answered; an update is whole, but still a draft
    KEPT = "kept"  # the result is durable in the outbox, the task is still open
    FINISHED = "finished"  # the task is closed, its result is about to be sent
    GRANTED = "granted"  # the server asks for a payload
    UPLOADED = "uploaded"  # all bytes of a payload have left
    JUDGED = "judged"  # the server has accepted, refused or released a result; nothing is done about it yet
    RELEASED = "released"  # a result has left the outbox


Observer = Callable[[Step, str], None]  # the step, and the task or run that it is about


def unobserved(step: Step, subject: str) -> None:
    """Nobody looks on."""
