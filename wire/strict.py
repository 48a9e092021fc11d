"""The base of all tables of settings."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    """A frozen table of settings in which an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)
