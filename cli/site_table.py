"""The federation's sites as rows and as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from atoll.cli.output import age, size
from atoll.cli.snapshots import timestamp

if TYPE_CHECKING:
    from atoll.wire import admin_pb2

COLUMNS = ("site", "organisation", "state", "last heard", "devices", "memory", "runs", "certificate until")


def row(site: admin_pb2.SiteState, *, now_unix_s: float) -> tuple[str, ...]:
    """One site in the order of COLUMNS; `now_unix_s` is the server's clock."""
    heard = site.last_heard_unix_s
    seen = "connected" if site.connected else f"{age(now_unix_s - heard)} ago" if heard else "never"
    known = site.HasField("capacity")
    devices = (str(site.capacity.num_devices) if site.capacity.num_devices else "cpu") if known else ""
    memory = size(site.capacity.memory_bytes) if known and site.capacity.memory_bytes else ""
    until = timestamp(site.certificate_expires_unix_s) or ""
    return (site.site, site.organisation, site.state, seen, devices, memory, str(len(site.runs)), until[:10])


def record(site: admin_pb2.SiteState) -> dict[str, Any]:
    """One site for programs; instants in ISO 8601, UTC, or null."""
    return {
        "site": site.site,
        "organisation": site.organisation,
        "state": site.state,
        "connected": site.connected,
        "last_heard": timestamp(site.last_heard_unix_s),
        "runs": list(site.runs),
        "runs_at_once": site.capacity.runs_at_once,
        "num_devices": site.capacity.num_devices,
        "memory_bytes": site.capacity.memory_bytes,
        "labels": dict(site.capacity.labels),
        "certificate_expires": timestamp(site.certificate_expires_unix_s),
        "software": site.software,
    }
