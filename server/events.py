"""What happens to a run, as values, and their form in the journal.

Every event is written down before anything is done about it, so the journal alone rebuilds the state of a run.
New kinds may be added; the meaning of one that was ever written never changes.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from atoll.aggregation.schedule import Asked, Committed, Joined, Left, Ready, TimerFired, Withdrawn
from atoll.server.round import Metrics
from atoll.server.secure_events import GivenUp, SessionFailed, SessionOpened, SurvivorsFixed, Unmasked


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateAccepted:
    """The update of a round's task is whole and valid; of a run that trains nothing, all of it is in here."""

    task: str
    attempt: int
    site: str
    round: int
    weight: int
    metrics: Metrics
    statistics: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskLost:
    """A task came to nothing, or the bytes of an accepted update are gone."""

    task: str
    attempt: int
    site: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelKept:
    """Of gossip: a site holds the model that it has trained, durably; nothing of it has come here."""

    task: str
    attempt: int
    site: str
    round: int
    crc32: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerMet:
    """Of gossip: a site holds its neighbour's model, or cannot come by it the way that it was told."""

    site: str
    peer: str
    round: int
    received: bool
    reason: str = ""
    tried: int = 0  # ways that had failed when it was told this one


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteEvaluated:
    """A site's metric sums of a model version."""

    task: str
    attempt: int
    site: str
    metrics: Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerEvaluated:
    """Metric sums of a model version on the server's own data; `error` where the evaluation failed."""

    version: int
    metrics: Metrics
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationEnded:
    """Nobody waits for the remaining evaluations of this version any more."""

    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitEnded:
    """The bounded wait for enough sites is over; `reason` says who is missing and why."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StopAsked:
    """A person stopped the run."""

    by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """The run cannot go on: by a fault of the server (`ours`), or since no version can be made of its updates."""

    reason: str
    ours: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Continued:
    """The first event of a run that goes on from another one, after its `round` and from its `version`."""

    run: str
    round: int
    version: int


# --- of a region: what the upper server wants (docs/trees.md) --------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Delegated:
    """The first event of a run that an upper server offered to this region; its `Committed` come from there."""

    min_sites: int
    quorum: int | None
    deadline_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationAsked:
    """The upper server wants the region's metric sums of a version."""

    version: int
    round: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedAbove:
    """The run is over at the upper server, or this region takes part in it no more."""

    outcome: str  # "finished", "failed" or "stopped"
    reason: str


RunEvent = (
    Joined
    | Left
    | Ready
    | TimerFired
    | Committed
    | UpdateAccepted
    | TaskLost
    | SiteEvaluated
    | ServerEvaluated
    | EvaluationEnded
    | WaitEnded
    | StopAsked
    | Broken
    | Continued
    | Delegated
    | Asked
    | Withdrawn
    | EvaluationAsked
    | EndedAbove
    | ModelKept
    | PeerMet
    | SessionOpened
    | SurvivorsFixed
    | SessionFailed
    | Unmasked
    | GivenUp
)

_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in RunEvent.__args__}


def encode_event(event: RunEvent) -> bytes:
    """The event as one JSON object, as the journal keeps it."""
    return json.dumps({"event": type(event).__name__, **dataclasses.asdict(event)}, sort_keys=True).encode()


def decode_event(data: bytes) -> RunEvent:
    """The event in a journal entry.

    Raises:
        ValueError: the entry is not one of ours: the database was written by a newer version, or is damaged.
    """
    fields = json.loads(data)
    name = fields.pop("event", None)
    if name not in _KINDS:
        raise ValueError(f"journal entry of unknown kind {name!r}: was it written by a newer version?")
    if "metrics" in fields:
        fields["metrics"] = {key: (float(pair[0]), float(pair[1])) for key, pair in fields["metrics"].items()}
    event: RunEvent = _KINDS[name](**fields)
    return event
