"""Who belongs, and who is here: states of sites from their records, and leases as a table without clock or I/O.

Invariant: leases live in memory only. A heartbeat costs no write, and after a restart of the server every member of a
run has one full lease to come back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from atoll.server.records import MemberRow
from atoll.wire.members_pb2 import ACTIVE, Member, MemberList

SiteState = Literal["invited", "pending", "active", "revoked"]


class Leases:
    """When each site was last heard, and which of them have been silent for too long. Times are monotonic seconds."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._heard: dict[str, float] = {}
        self._held: set[str] = set()

    def heard(self, site: str, now_s: float) -> None:
        """Any message of the site renews its lease."""
        self._heard[site] = now_s
        self._held.add(site)

    def expired(self, now_s: float) -> list[str]:
        """Sites whose lease has run out by now, sorted; each is named once."""
        gone = sorted(site for site in self._held if now_s - self._heard[site] >= self._lease_s)
        self._held.difference_update(gone)
        return gone

    def holds(self, site: str) -> bool:
        """Whether the site has a lease that was not found expired."""
        return site in self._held

    def last_heard(self, site: str) -> float | None:
        """When the site was last heard, lease or not; None where it never was."""
        return self._heard.get(site)

    def pass_over(self, seconds: float, now_s: float) -> None:
        """The server itself did not listen for so long before now: that is no site's silence."""
        for site, heard_s in self._heard.items():
            self._heard[site] = min(now_s, heard_s + seconds)

    def forget(self, site: str) -> None:
        """The site left in order or was revoked: nobody waits for its lease."""
        self._held.discard(site)


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """How the newest member list must change: the next one adds `pending` and marks `revoked`."""

    pending: tuple[Member, ...]
    revoked: tuple[str, ...]


def site_state(site: MemberRow, listed: Member | None) -> SiteState:
    """Where a site stands; `listed` is its entry on the newest member list.

    A site that enrolled anew is pending until its new signing key is on a list.
    """
    if site.state != "enrolled":
        return site.state
    on_list = listed is not None and listed.status == ACTIVE and listed.signing_key == site.signing_key
    return "active" if on_list else "pending"


def states_of(sites: Iterable[MemberRow], members: MemberList | None) -> dict[str, SiteState]:
    """The state of each site by name, given the newest member list."""
    listed = _by_name(members)
    return {site.name: site_state(site, listed.get(site.name)) for site in sites}


def changes_to(members: MemberList | None, sites: Iterable[MemberRow]) -> Changes:
    """What the holder of the federation key is asked to sign next."""
    listed = _by_name(members)
    pending: list[Member] = []
    revoked: list[str] = []
    for site in sites:
        entry = listed.get(site.name)
        if site_state(site, entry) == "pending":
            key = site.signing_key or b""
            pending.append(Member(site=site.name, organisation=site.organisation, signing_key=key, status=ACTIVE))
        elif entry is not None and entry.status == ACTIVE and site.state != "enrolled":
            revoked.append(site.name)
    return Changes(pending=tuple(pending), revoked=tuple(revoked))


def _by_name(members: MemberList | None) -> dict[str, Member]:
    return {} if members is None else {member.site: member for member in members.members}
