"""Where a site stands by the member lists that the server pushes."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from atoll.client.board import Board
from atoll.client.membership import Membership
from atoll.transport.identity import Identity
from atoll.transport.members import sign_members
from atoll.wire.errors import Malformed, Stale
from atoll.wire.members_pb2 import ACTIVE, REVOKED, Member, MemberList, MemberStatus, SignedMemberList

FEDERATION_KEY = Ed25519PrivateKey.generate()
SITE_KEY = Ed25519PrivateKey.generate()


def identity_in(folder: Path) -> Identity:
    return Identity(
        name="north",
        role="site",
        federation="trial",
        organisation="North",
        address="127.0.0.1:1",
        folder=folder,
        certificate_pem=b"",
        private_key_pem=b"",
        ca_pem=b"",
        federation_public_key=FEDERATION_KEY.public_key().public_bytes_raw(),
        signing_key=SITE_KEY,
        expires_at=datetime.now(UTC) + timedelta(days=1),
    )


def signed(version: int, *, status: MemberStatus = ACTIVE, key: Ed25519PrivateKey = SITE_KEY) -> SignedMemberList:
    member = Member(site="north", organisation="North", signing_key=key.public_key().public_bytes_raw(), status=status)
    return sign_members(FEDERATION_KEY, MemberList(federation="trial", version=version, members=[member]))


@pytest.fixture
async def board(tmp_path: Path) -> Board:
    return Board(tmp_path / "status.json", site="north", server="127.0.0.1:1", count_held=lambda: 0)


async def test_a_site_is_pending_then_active_then_revoked(tmp_path: Path, board: Board) -> None:
    membership = Membership(tmp_path / "members", identity_in(tmp_path), board)
    assert (membership.state, membership.version) == ("pending", 0)
    await membership.take(signed(1, key=Ed25519PrivateKey.generate()))  # its place, with an older key
    assert (membership.state, membership.version) == ("pending", 1)
    await membership.take(signed(2))
    assert (board.picture.membership, board.picture.member_list_version) == ("active", 2)
    await membership.take(signed(3, status=REVOKED))
    assert membership.state == "revoked"
    again = Membership(tmp_path / "members", identity_in(tmp_path), board)
    assert (again.state, again.version) == ("revoked", 3)


async def test_a_list_that_was_changed_or_is_older_does_not_count(tmp_path: Path, board: Board) -> None:
    membership = Membership(tmp_path / "members", identity_in(tmp_path), board)
    await membership.take(signed(2))
    changed = signed(3)
    changed.member_list = changed.member_list[:-1] + bytes([changed.member_list[-1] ^ 1])
    with pytest.raises(Malformed):
        await membership.take(changed)
    with pytest.raises(Stale):
        await membership.take(signed(1))
    assert membership.version == 2


async def test_in_plain_text_nothing_is_checked(tmp_path: Path, board: Board) -> None:
    membership = Membership(tmp_path / "members", None, board)
    await membership.take(signed(1))
    assert (membership.state, membership.version) == ("unknown", 0)


async def test_a_pending_site_is_told_what_to_do(
    tmp_path: Path, board: Board, caplog: pytest.LogCaptureFixture
) -> None:
    Membership(tmp_path / "members", identity_in(tmp_path), board).tell()
    assert "atoll federation sign" in caplog.text
