"""What the journal keeps of sessions of secure aggregation.

`part` is the cohort of the round that a session is of: a group, a bucket, or 0 where all sites are one cohort.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from atoll.server.round import Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOpened:
    """A session is about to begin: from here on its number, and the keys that hang on it, are used."""

    round: int
    session: int
    opening: str  # canonical JSON of an Opening
    part: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SurvivorsFixed:
    """It is decided whose sum it is; `said` is what `SecureSession.pack` makes of all that was said so far."""

    round: int
    session: int
    said: str
    part: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionFailed:
    """A session came to nothing, and nothing of it was published."""

    round: int
    session: int
    reason: str
    part: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Unmasked:
    """The sum over `sites` is known, and all that is known of them: the sum of their weights, and of their metrics."""

    round: int
    session: int
    sites: tuple[str, ...]
    weight: int
    metrics: Metrics
    liars: dict[str, str] = field(default_factory=dict)
    part: int = 0
    num_parts: int = 1  # of the round
    dropped: tuple[str, ...] = ()  # sites of the cohort whose updates were to be in the sum


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenUp:
    """No session of a cohort came to its end: the run is over, or in a region the round."""

    round: int
    reason: str


SecureEvent = SessionOpened | SurvivorsFixed | SessionFailed | Unmasked
