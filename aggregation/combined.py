"""The parts of a job side by side, and what it is for some of them not to go together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from atoll.aggregation.codecs.encoding import Codec
from atoll.aggregation.reducers.reduction import Reducer
from atoll.aggregation.rules.personal import Personal
from atoll.aggregation.rules.rule import LocalRule
from atoll.aggregation.schedule import Schedule
from atoll.aggregation.server_optimizers import ServerOptimizer
from atoll.wire.privacy_section import SecureAggregationSection


@dataclass(frozen=True, slots=True, kw_only=True)
class Combined:
    """What a refusal may depend on."""

    schedule: Schedule[Any]
    codec: Codec
    reducer: Reducer
    buffers: str
    server_evaluation: bool
    regions: bool = False  # a member of the cohort is a region, which sends the sum of its sites' updates
    settled: bool = True  # False: whether there are regions is not known yet
    download: Codec | None = None
    local: tuple[str, ...] = ()
    rule: LocalRule | None = None
    optimizer: ServerOptimizer | None = None  # None: not looked at
    personal: Personal | None = None
    site_evaluation: bool = True
    num_named: int = 0  # sites that the job names; 0: whoever joins
    masked: SecureAggregationSection | None = None  # terms by which updates are masked; None where they are not


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Parts that do not go together: which keys of the job, when, and why."""

    keys: tuple[str, str]
    applies: Callable[[Combined], bool]
    reason: str
