"""`[control]` of a job: when a run ends early, which version is kept, and what changes on the way."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from atoll.wire.overrides import refuse_fixed
from atoll.wire.strict import Strict


class BestSection(Strict):
    """`control.best`: by what the best version is told, which is kept beyond all others."""

    metric: str = Field(min_length=1, max_length=256)
    mode: Literal["max", "min"]
    at: Literal["sites", "server"] = "sites"


class EarlyStopSection(Strict):
    """`control.early_stop`: a run ends where `control.best` has not improved for a while."""

    patience: int = Field(ge=1, le=1_000_000)  # evaluations in a row without an improvement
    min_delta: float = Field(default=0.0, ge=0, allow_inf_nan=False)  # by how much a better one is better


class OverrideSection(Strict):
    """`[[control.override]]`: other values of the job from a round on; tables are merged, the later entry wins."""

    from_round: int = Field(ge=2, le=1_000_000)
    app: dict[str, Any] = Field(default={})
    strategy: dict[str, Any] = Field(default={})
    evaluation: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _changes_what_may_change(cls, table: Any) -> Any:
        refuse_fixed(table)
        return table


class ControlSection(Strict):
    """`[control]`: when a run ends early, which version is kept, what changes on the way."""

    best: BestSection | None = None
    early_stop: EarlyStopSection | None = None
    override: tuple[OverrideSection, ...] = Field(default=(), max_length=1000)

    @model_validator(mode="after")
    def _fits_together(self) -> ControlSection:
        if self.early_stop is not None and self.best is None:
            raise ValueError("control.early_stop needs control.best, which says by which metric")
        rounds = [override.from_round for override in self.override]
        if rounds != sorted(set(rounds)):
            raise ValueError(f"from_round of control.override must rise from entry to entry, and is {rounds}")
        return self
