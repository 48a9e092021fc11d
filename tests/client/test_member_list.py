"""What the keeper of the offline key is shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.client.member_list import ChangeKind, wanted_changes
from atoll.transport.members import FederationKey, sign_pending
from atoll.wire.admin_pb2 import PendingReply
from atoll.wire.errors import Malformed
from atoll.wire.members_pb2 import Member, SignedMemberList


def _member(site: str, key: int = 1) -> Member:
    return Member(site=site, organisation=f"Org of {site}", signing_key=bytes([key]) * 32)


def test_newcomers_and_leavers_are_told_apart(tmp_path: Path) -> None:
    key = FederationKey.create(tmp_path / "key", "demo")
    current = sign_pending(None, [_member("a"), _member("b"), _member("c")], [], key)
    pending = PendingReply(current=current, pending=[_member("d"), _member("b", key=2)], revoked=["c"])
    for keeper in (key, None):
        found = wanted_changes(pending, keeper)
        assert [(change.kind, change.member.site) for change in found] == [
            (ChangeKind.NEW_KEY, "b"),
            (ChangeKind.ADMIT, "d"),
            (ChangeKind.REVOKE, "c"),
        ]
        assert found[0].member.signing_key == bytes([2]) * 32


def test_before_the_first_list_everybody_is_new(tmp_path: Path) -> None:
    pending = PendingReply(pending=[_member("a")], revoked=["never-there"])
    found = wanted_changes(pending, FederationKey.create(tmp_path / "key", "demo"))
    assert [(change.kind, change.member.site) for change in found] == [(ChangeKind.ADMIT, "a")]


def test_a_list_that_the_key_did_not_sign_is_refused(tmp_path: Path) -> None:
    other = FederationKey.create(tmp_path / "other", "demo")
    forged = sign_pending(None, [_member("ghost")], [], other)
    pending = PendingReply(current=SignedMemberList.FromString(forged.SerializeToString()), pending=[_member("a")])
    with pytest.raises(Malformed):
        wanted_changes(pending, FederationKey.create(tmp_path / "key", "demo"))
