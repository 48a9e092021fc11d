"""Parts that other distributions bring, found by entry point. One that fails to import is named, and stops nothing else.

Only what an administrator of this machine has installed can be named by a job; nothing imports a path from outside.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Final

from atoll.wire.errors import ConfigError

GROUPS: Final[Mapping[str, str]] = {
    "strategy": "atoll.strategies",
    "schedule": "atoll.schedules",
    "rule": "atoll.rules",
    "codec": "atoll.codecs",
    "reducer": "atoll.reducers",
    "optimizer": "atoll.optimizers",
    "metric": "atoll.metrics",
    "callback": "atoll.callbacks",
    "personal": "atoll.personal",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plugin:
    """One entry point: what it gave, or why it gave nothing."""

    kind: str
    source: str  # distribution and version
    value: object = None
    failure: str = ""


def installed(part: str) -> list[EntryPoint]:
    """Entry points for one part of a strategy, by name; nothing is imported."""
    return sorted(entry_points(group=GROUPS[part]), key=lambda point: (point.name, _source(point)))


def load(point: EntryPoint) -> Plugin:
    """Import a plugin; an exception while doing so, or an exit, becomes its `failure`."""
    try:
        return Plugin(kind=point.name, source=_source(point), value=point.load())
    except (Exception, SystemExit) as error:  # noqa: BLE001  somebody else's code must not stop the others
        return Plugin(kind=point.name, source=_source(point), failure=f"{type(error).__name__}: {error}")


def find(part: str, kind: str, key: str) -> Plugin | None:
    """The plugin that brings `kind`, imported; None where none does. `key` is the setting that asks for it.

    Raises:
        ConfigError: it fails to import, or two distributions bring the same kind.
    """
    points = [point for point in installed(part) if point.name == kind]
    if not points:
        return None
    if len(points) > 1:
        sources = " and ".join(_source(point) for point in points)
        raise ConfigError(
            f"{key} = {kind!r}: brought by {sources}; remove one", key=key, value=kind, bound="one plugin"
        )
    plugin = load(points[0])
    if plugin.failure:
        raise ConfigError(
            f"{key} = {kind!r}: the plugin of {plugin.source} cannot be imported: {plugin.failure}",
            key=key,
            value=kind,
            bound="a plugin that can be imported",
        )
    return plugin


def _source(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else "unknown distribution"
