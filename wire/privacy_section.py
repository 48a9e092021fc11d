"""`[privacy]` of a job: what the server may learn of an update (docs/secure-aggregation.md)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from atoll.wire.duration import Seconds
from atoll.wire.strict import Strict

MAX_METRICS = 64


class SecureAggregationSection(Strict):
    """`privacy.secure_aggregation`: the terms of every round's session."""

    threat: Literal["active", "semi-honest"] = "active"  # of the server: it may lie, or it only looks
    corrupt: float = Field(default=0.1, ge=0, lt=1)  # share of the sites that may work with it
    dropped: float | None = Field(default=None, ge=0, lt=1)  # share that may drop out; as many as can, where absent
    fewest_survivors: int = Field(default=5, ge=3, le=65_535)  # sites without which no sum is published
    bits: Literal[16, 32] = 32  # of each value on its way
    bound: float = Field(default=8.0, ge=1e-30, le=1e30)  # largest magnitude in a difference
    clipped: float = Field(
        default=0.0, ge=0, lt=1
    )  # share of a site's values that may be cut to the bound; else an error
    metrics: tuple[Annotated[str, Field(min_length=1, max_length=64)], ...] = Field(
        default=("loss",), max_length=MAX_METRICS
    )  # of the training, whose sums are masked too; others stay at their site
    deadline: Seconds = 120.0  # of each phase, without any progress; who is silent for longer has dropped out
    attempts: int = Field(default=3, ge=1, le=16)  # sessions of a round, after which the run fails

    @field_validator("metrics")
    @classmethod
    def _each_once(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(names)) != len(names) or not all(name.isprintable() for name in names):
            raise ValueError("wanted printable names, each once")
        return tuple(sorted(names))


class PrivacySection(Strict):
    """`[privacy]`."""

    secure_aggregation: SecureAggregationSection
