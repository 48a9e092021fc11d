"""Options that are pairs, such as `KEY=VALUE`."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

from atoll.wire.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

K = TypeVar("K", bound="DataclassInstance")


def table(pairs: list[str] | None, option: str) -> dict[str, Any] | None:
    """`KEY=VALUE` pairs as a table; a value that is TOML, such as 3 or true, is read as such."""
    if pairs is None:
        return None
    made: dict[str, Any] = {}
    for pair in pairs:
        key, found, value = pair.partition("=")
        if not found or not key:
            raise ConfigError(f"{option} {pair!r}: wanted KEY=VALUE", key=option, value=pair, bound="KEY=VALUE")
        try:
            made[key] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            made[key] = value
    return made


def labels(pairs: list[str] | None, sites: Sequence[str]) -> dict[str, dict[str, str]]:
    """Labels by site, of `NAME=VALUE,VALUE` pairs."""
    made: dict[str, dict[str, str]] = {site: {} for site in sites}
    for pair in pairs or ():
        name, _, values = pair.partition("=")
        dealt = values.split(",")
        if not name or not all(dealt):
            wanted = "NAME=VALUE,VALUE"
            raise ConfigError(f"--label {pair!r}: wanted {wanted}", key="--label", value=pair, bound=wanted)
        for place, site in enumerate(sites):
            made[site][name] = dealt[place % len(dealt)]
    return made


def options(kind: type[K], pairs: list[str] | None, option: str, *, seed: int) -> K:
    """A table of numbers, such as `--network up_mbit_s=10`, as the dataclass that it is of.

    Raises:
        ConfigError: a key is unknown, or a value is no number or out of bounds.
    """
    found = table(pairs, option) or {}
    known = [entry.name for entry in fields(kind)]
    for key, value in found.items():
        if key not in known:
            raise ConfigError(f"{option} {key}: unknown; known: {', '.join(known)}", key=option, value=key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{option} {key}={value}: wanted a number", key=option, value=str(value))
    return kind(**{"seed": seed, **found})
