"""What `atoll site status` prints for a person."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from atoll.cli.snapshots import timestamp


def lines(status: Mapping[str, Any]) -> Iterator[str]:
    """The state of a site, as `atoll.client.status.site_status` gives it, one fact a line."""
    agent, connection, membership = status["agent"], status["connection"], status["membership"]
    running = f"running, process {agent['pid']}" if agent["running"] else "not running; start it: atoll site run"
    yield f"site         {status['site']} of {status['organisation'] or '(not joined)'}, federation {status['federation']}"
    yield f"agent        {running}"
    yield f"server       {status['server']}, {connection['state']}{_why(connection['trouble'])}"
    if connection["transfers"]:
        yield f"transfers    {connection['transfers']}"
    yield f"membership   {membership['state']}, member list {membership['list_version'] or 'not seen yet'}"
    if certificate := status["certificate"]:
        until = timestamp(certificate["expires_unix_s"])
        yield f"certificate  {'EXPIRED' if certificate['expired'] else 'valid until'} {until}"
    for app in status["apps"]:
        yield f"app          {app['name']} from {app['distribution']}, {app['error'] or 'hash ' + app['hash']}"
    for script in status["scripts"]:
        yield f"script       {script['name']} at {script['path']}, {script['error'] or 'hash ' + script['hash']}"
    yield f"data         {', '.join(status['data']) or 'none'}"
    yield f"policy       {_policy(status['policy'])}"
    for run in status["runs"]:
        yield f"run          {_run(run)}"
    if status["held_results"]:
        yield f"outbox       {status['held_results']} results wait until the server has committed them"


def _why(trouble: str) -> str:
    return f": {trouble}" if trouble else ""


def _policy(policy: Mapping[str, Any]) -> str:
    if policy["error"]:
        return f"refuses everything: {policy['error']}"
    allowed = [app["name"] for app in policy.get("allowed_apps", ())]
    if not allowed or not policy.get("researchers"):
        return f"allows nothing; see {policy['path']}"
    return f"allows {', '.join(allowed)} to {', '.join(policy['researchers'])}"


def _run(run: Mapping[str, Any]) -> str:
    steps = f", step {run['done']} of {run['total']}" if run.get("total") else ""
    where = f"round {run.get('round', 0)} of {run.get('num_rounds', 0)}"
    return f"{run['run']} ({run.get('name', '')}) {run['state']}, {where}{steps}{_why(run.get('detail', ''))}"
