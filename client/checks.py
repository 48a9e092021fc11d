"""What `atoll doctor` looks at: identity, server, clock, disk, device, apps, scripts, data and policy of one home.

A check never raises: what it meets becomes its verdict, with advice, so that one fault does not hide the next.
"""

from __future__ import annotations

import asyncio
import platform
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import Any

from atoll import __version__
from atoll.client.home import SiteHome
from atoll.client.operator import list_sites
from atoll.client.people import Person, PersonSettings, identity_folder
from atoll.client.people import load_settings as load_person_settings
from atoll.client.policy import Policy, load_policy
from atoll.client.settings import SiteSettings
from atoll.client.settings import load_settings as load_site_settings
from atoll.client.status import picture_of
from atoll.cluster.registry import hash_distribution, hash_script
from atoll.transport.bulk_carrier import BLOCKED
from atoll.transport.identity import Identity, load_identity, utc_now
from atoll.wire.errors import AtollError

SKEW_WARNED_S = 5.0  # leases and deadlines still work
SKEW_FAILED_S = 60.0  # a fresh certificate may look not valid yet
EXPIRY_WARNED = timedelta(hours=24)  # an agent that runs renews at half-life, so this one has not run for long
FREE_WARNED_BYTES = 5 << 30
FREE_FAILED_BYTES = 256 << 20


class Verdict(StrEnum):
    """How a check came out."""

    OK = "ok"
    WARNED = "warning"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that was looked at."""

    name: str
    verdict: Verdict
    found: str
    advice: str = ""


def check_home(home: Path, *, now: datetime | None = None) -> list[Check]:
    """All checks of a person's or a site's home, in an order in which the first failure explains the later ones."""
    found = [_check_software()]
    site = SiteHome(root=home)
    settings: SiteSettings | PersonSettings | None = None
    try:
        settings = load_site_settings(site.settings) if site.settings.exists() else load_person_settings(home)
    except AtollError as error:
        found.append(Check(name="settings", verdict=Verdict.FAILED, found=str(error)))
    identity = _identity(home, found, now or utc_now())
    if identity is not None:
        found += asyncio.run(_check_server(home, identity, settings))
        found += check_transfers(str(picture_of(site).get("bulk", "")))
    found.append(_check_disk(home))
    found.append(_check_device(settings.devices.device if isinstance(settings, SiteSettings) else "auto"))
    if settings is not None:
        found += _check_apps(settings, _policy(site, found) if isinstance(settings, SiteSettings) else None)
        if isinstance(settings, SiteSettings):
            found += _check_scripts(settings)
        found += _check_data(settings.data)
    return found


def _check_software() -> Check:
    versions = f"atoll {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    return Check(name="software", verdict=Verdict.OK, found=versions)


def _identity(home: Path, found: list[Check], now: datetime) -> Identity | None:
    try:
        identity = load_identity(identity_folder(home), allow_expired=True)
    except AtollError as error:
        found.append(Check(name="identity", verdict=Verdict.FAILED, found=str(error)))
        return None
    who = f"{identity.role} {identity.name} of federation {identity.federation}"
    found.append(Check(name="identity", verdict=Verdict.OK, found=who))
    left = identity.expires_at - now
    until = f"valid until {identity.expires_at:%Y-%m-%d %H:%M} UTC"
    if left <= timedelta():
        advice = f"ask the operator for a new token, then: atoll {'site' if identity.role == 'site' else 'user'} join TOKEN --home {home}"
        found.append(Check(name="certificate", verdict=Verdict.FAILED, found=f"expired, {until}", advice=advice))
        return None
    verdict = Verdict.WARNED if left < EXPIRY_WARNED else Verdict.OK
    advice = "it renews by itself when the agent or a command connects" if verdict is Verdict.WARNED else ""
    found.append(Check(name="certificate", verdict=verdict, found=until, advice=advice))
    return identity


async def _check_server(home: Path, identity: Identity, settings: SiteSettings | PersonSettings | None) -> list[Check]:
    plaintext = settings.site.plaintext if isinstance(settings, SiteSettings) else bool(settings and settings.plaintext)
    person = Person(home=home, identity=identity, settings=PersonSettings(plaintext=plaintext))
    began_s, began_unix_s = time.monotonic(), time.time()
    try:
        reply = await list_sites(person)
    except AtollError as error:
        return [Check(name="server", verdict=Verdict.FAILED, found=str(error))]
    took_s = time.monotonic() - began_s
    reachable = f"{identity.address} answered in {took_s * 1000:.0f} ms"
    found = [
        Check(name="server", verdict=Verdict.OK, found=reachable),
        check_clock(reply.server_unix_s - (began_unix_s + took_s / 2)),
    ]
    if identity.role == "site":
        found += [check_membership(site.state) for site in reply.sites if site.site == identity.name]
    return found


def check_membership(state: str) -> Check:
    """The verdict on a site's state as the server's list of sites has it."""
    if state == "active":
        return Check(name="membership", verdict=Verdict.OK, found="on the member list")
    if state == "pending":
        advice = "read your key's fingerprint to the keeper of the federation's key, who runs `atoll federation sign`"
    else:
        advice = "ask the operator why; to come back, the site joins anew with a token of `atoll site add`"
    return Check(name="membership", verdict=Verdict.WARNED, found=state, advice=advice)


def check_transfers(way: str) -> list[Check]:
    """The verdict on how models and updates travel, as the agent last showed it; none before it was attached."""
    if not way:
        return []
    if BLOCKED not in way:
        return [Check(name="transfers", verdict=Verdict.OK, found=way)]
    advice = 'all works, at about twice the CPU time; let this machine connect to that port, or ask for `bulk = "off"`'
    return [Check(name="transfers", verdict=Verdict.WARNED, found=way, advice=advice)]


def check_clock(ahead_s: float) -> Check:
    """The verdict on a server's clock that is `ahead_s` seconds ahead of this machine's."""
    skew_s = abs(ahead_s)
    found = f"{skew_s:.1f} s {'behind' if ahead_s > 0 else 'ahead of'} the server's"
    if skew_s < SKEW_WARNED_S:
        return Check(name="clock", verdict=Verdict.OK, found=found)
    verdict = Verdict.FAILED if skew_s >= SKEW_FAILED_S else Verdict.WARNED
    return Check(name="clock", verdict=verdict, found=found, advice="set this machine's clock, or the server's, by NTP")


def _check_disk(home: Path) -> Check:
    there = next((folder for folder in (home, *home.parents) if folder.exists()), Path("/"))
    free_bytes = shutil.disk_usage(there).free
    found = f"{free_bytes / 2**30:.1f} GiB free at {there}"
    if free_bytes >= FREE_WARNED_BYTES:
        return Check(name="disk", verdict=Verdict.OK, found=found)
    verdict = Verdict.FAILED if free_bytes < FREE_FAILED_BYTES else Verdict.WARNED
    advice = (
        f"free some, at least {FREE_WARNED_BYTES / 2**30:.0f} GiB: updates and models are kept here until they are "
        "committed, which takes two to three times the model's size"
    )
    return Check(name="disk", verdict=verdict, found=found, advice=advice)


def _check_device(wish: str) -> Check:
    try:
        import torch

        from atoll.cluster.device import choose_device

        device = choose_device("auto", wish)
    except AtollError as error:
        return Check(name="device", verdict=Verdict.FAILED, found=str(error))
    except ImportError as error:
        advice = "install torch for this machine, see https://pytorch.org"
        return Check(name="device", verdict=Verdict.FAILED, found=f"torch does not import: {error}", advice=advice)
    return Check(name="device", verdict=Verdict.OK, found=f"{device}, torch {torch.__version__}")


def _policy(site: SiteHome, found: list[Check]) -> Policy:
    try:
        policy = load_policy(site.policy)
    except AtollError as error:
        found.append(
            Check(
                name="policy",
                verdict=Verdict.FAILED,
                found=str(error),
                advice="until that is mended, every run is refused",
            )
        )
        return Policy()
    allowed = ", ".join(app.name for app in policy.allowed_apps)
    if allowed and policy.researchers:
        text = f"allows {allowed} to {', '.join(policy.researchers)}"
        found.append(Check(name="policy", verdict=Verdict.OK, found=text))
    else:
        advice = f"name apps and researchers in {site.policy}"
        found.append(Check(name="policy", verdict=Verdict.WARNED, found="allows nothing", advice=advice))
    return policy


def _check_apps(settings: SiteSettings | PersonSettings, policy: Policy | None) -> Iterator[Check]:
    distributions = {name: app.distribution for name, app in settings.apps.items()}
    for name, distribution in sorted(distributions.items()):
        title = f"app {name}"
        try:
            digest = hash_distribution(distribution)
        except AtollError as error:
            yield Check(name=title, verdict=Verdict.FAILED, found=str(error))
            continue
        hashes = {allowed.hash for allowed in policy.allowed_apps if allowed.name == name} if policy else {digest}
        if hashes & {digest, "any-installed"}:
            yield Check(name=title, verdict=Verdict.OK, found=f"{distribution}, hash {digest}")
        else:
            why = "the policy allows another hash" if hashes else "the policy does not allow it"
            advice = "look at this version, then put name and hash into allowed_apps of policy.toml"
            yield Check(
                name=title, verdict=Verdict.WARNED, found=f"{distribution}, hash {digest}: {why}", advice=advice
            )


def _check_scripts(settings: SiteSettings) -> Iterator[Check]:
    for name, script in sorted(settings.scripts.items()):
        try:
            found = f"{script.path}, hash {hash_script(script.path)}"
        except AtollError as error:
            yield Check(name=f"script {name}", verdict=Verdict.FAILED, found=str(error))
        else:
            yield Check(name=f"script {name}", verdict=Verdict.OK, found=found)


def _check_data(tables: Mapping[str, Mapping[str, Any]]) -> Iterator[Check]:
    for name, table in sorted(tables.items()):
        paths = [Path(value) for value in table.values() if isinstance(value, str) and value.startswith("/")]
        absent = [str(path) for path in paths if not path.exists()]
        title = f"data {name}"
        advice = f"put it there, or correct the path under [data.{name}]"
        if absent:
            yield Check(name=title, verdict=Verdict.FAILED, found=f"{', '.join(absent)} is not there", advice=advice)
        else:
            yield Check(name=title, verdict=Verdict.OK, found=", ".join(map(str, paths)) or "no paths")
