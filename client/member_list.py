"""What the keeper of the offline key is asked to decide: the differences between the signed list and what is wanted."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from atoll.transport.members import FederationKey, verify_members
from atoll.wire import admin_pb2, members_pb2


class ChangeKind(StrEnum):
    """What becomes of a site."""

    ADMIT = "admit"
    NEW_KEY = "new key"  # it is on the list with another key or organisation: keys were lost, or the name is claimed
    REVOKE = "revoke"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One difference between the signed list and the next one."""

    kind: ChangeKind
    member: members_pb2.Member  # the newcomer as it asks to be listed, or the one who leaves as listed


def wanted_changes(pending: admin_pb2.PendingReply, key: FederationKey | None) -> list[Change]:
    """Newcomers by name, then those to be revoked.

    Args:
        pending: what the server says.
        key: checks the signature of the server's list; None where the key is elsewhere, for a look only.

    Raises:
        Malformed: the server's list was not signed by `key`.
    """
    listed = {member.site: member for member in _listed(pending.current, key)}
    found = []
    for member in sorted(pending.pending, key=lambda member: member.site):
        kind = ChangeKind.NEW_KEY if member.site in listed else ChangeKind.ADMIT
        found.append(Change(kind=kind, member=member))
    for site in sorted(pending.revoked):
        if site in listed and listed[site].status != members_pb2.REVOKED:
            found.append(Change(kind=ChangeKind.REVOKE, member=listed[site]))
    return found


def _listed(current: members_pb2.SignedMemberList, key: FederationKey | None) -> list[members_pb2.Member]:
    if not current.member_list:
        return []
    if key is None:
        return list(members_pb2.MemberList.FromString(current.member_list).members)
    return list(verify_members(key.public_key, current, newer_than=0).members)
