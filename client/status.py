"""What `atoll site status` tells: the agent's own picture, and what can be read on this machine without it."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from atoll.client.home import SiteHome, agent_runs
from atoll.client.policy import load_policy
from atoll.client.settings import SiteSettings, load_settings
from atoll.cluster.registry import hash_distribution, hash_script
from atoll.transport.identity import Identity, holds_identity, load_identity
from atoll.wire.errors import AtollError, ConfigError


def site_status(home: Path) -> dict[str, Any]:
    """A site's state as JSON takes it: agent, connection, membership, runs, apps and scripts with their hashes, and the
    policy.

    Raises:
        ConfigError: `home` is no site's home, or its site.toml cannot be understood.
    """
    site = SiteHome(root=home)
    settings = load_settings(site.settings)
    identity = load_identity(site.identity, allow_expired=True) if holds_identity(site.identity) else None
    runs = agent_runs(site)
    picture = picture_of(site)
    if not runs:
        picture.update(connection="stopped", pid=0, runs={}, bulk="")
    return {
        "site": settings.site.name,
        "home": str(home),
        "organisation": identity.organisation if identity else "",
        "federation": picture.get("federation") or (identity.federation if identity else ""),
        "server": settings.site.server or (identity.address if identity else ""),
        "agent": {"running": runs, "pid": picture.get("pid", 0)},
        "connection": {
            "state": picture.get("connection", "stopped"),
            "since_unix_s": picture.get("connection_since_unix_s", 0.0),
            "trouble": picture.get("trouble", ""),
            "transfers": picture.get("bulk", ""),
        },
        "membership": {
            "state": picture.get("membership", "unknown"),
            "list_version": picture.get("member_list_version", 0),
        },
        "certificate": _certificate(identity),
        "held_results": picture.get("num_held", 0),
        "runs": list(picture.get("runs", {}).values()),
        "apps": [_app(name, settings) for name in sorted(settings.apps)],
        "scripts": [_script(name, settings) for name in sorted(settings.scripts)],
        "data": sorted(settings.data),
        "policy": _policy(site.policy),
    }


def picture_of(home: SiteHome) -> dict[str, Any]:
    """What the agent last showed of itself (client/board.py); nothing where it never ran."""
    try:
        picture = json.loads(home.status.read_text())
    except (OSError, ValueError):
        return {}
    return picture if isinstance(picture, dict) else {}


def _certificate(identity: Identity | None) -> dict[str, Any] | None:
    if identity is None:
        return None
    return {
        "expires_unix_s": identity.expires_at.timestamp(),
        "expired": identity.expires_at <= datetime.now(UTC),
    }


def _app(name: str, settings: SiteSettings) -> dict[str, Any]:
    app = settings.apps[name]
    found: dict[str, Any] = {"name": name, "distribution": app.distribution, "entry_point": app.entry_point}
    try:
        return {**found, "hash": hash_distribution(app.distribution), "error": ""}
    except AtollError as error:
        return {**found, "hash": "", "error": str(error)}


def _script(name: str, settings: SiteSettings) -> dict[str, Any]:
    path = settings.scripts[name].path
    found: dict[str, Any] = {"name": name, "path": str(path)}
    try:
        return {**found, "hash": hash_script(path), "error": ""}
    except AtollError as error:
        return {**found, "hash": "", "error": str(error)}


def _policy(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"path": str(path), "present": path.exists(), "error": ""}
    try:
        policy = load_policy(path)
    except ConfigError as error:
        return {**found, "error": str(error)}
    return {**found, **policy.model_dump(mode="json")}
