from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

from hypothesis import given
from hypothesis import strategies as st

from atoll.server.membership import Leases, changes_to, states_of
from atoll.server.records import MemberRow
from atoll.wire.members_pb2 import ACTIVE, REVOKED, Member, MemberList

NOW = datetime(2030, 1, 1, tzinfo=UTC)


def site(name: str, **changes: object) -> MemberRow:
    row = MemberRow(
        name=name,
        role="site",
        organisation="Clinic",
        state="enrolled",
        signing_key=b"k" * 32,
        token_expires=NOW,
        certificate_expires=NOW,
    )
    return replace(row, **changes)  # type: ignore[arg-type]


def listed(*members: tuple[str, bytes, int]) -> MemberList:
    return MemberList(
        version=1,
        members=[Member(site=name, signing_key=key, status=status) for name, key, status in members],  # type: ignore[arg-type]
    )


class TestLeases:
    def test_a_message_renews(self) -> None:
        leases = Leases(lease_s=45)
        leases.heard("a", 0)
        leases.heard("b", 0)
        leases.heard("a", 30)
        assert leases.expired(44.9) == []
        assert leases.expired(45) == ["b"]
        assert leases.expired(74.9) == []
        assert leases.expired(75) == ["a"]

    def test_an_expiry_is_told_once(self) -> None:
        leases = Leases(lease_s=45)
        leases.heard("a", 0)
        assert leases.holds("a")
        assert leases.expired(100) == ["a"]
        assert leases.expired(200) == []
        assert not leases.holds("a")
        assert leases.last_heard("a") == 0

    def test_time_in_which_the_server_did_not_listen_is_nobodys_silence(self) -> None:
        leases = Leases(lease_s=45)
        leases.heard("a", 0)
        leases.heard("b", 99)  # heard after the stop, before anybody looked at the leases
        leases.pass_over(80, now_s=100)
        assert leases.expired(124.9) == []
        assert leases.expired(125) == ["a"]
        assert leases.expired(145) == ["b"]

    def test_who_leaves_does_not_expire(self) -> None:
        leases = Leases(lease_s=45)
        leases.heard("a", 0)
        leases.forget("a")
        leases.forget("a")
        assert leases.expired(100) == []
        assert leases.last_heard("a") == 0
        assert leases.last_heard("b") is None

    @given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 100))))
    def test_nobody_expires_early_and_nobody_is_forgotten(self, messages: list[tuple[str, float]]) -> None:
        leases = Leases(lease_s=10)
        last: dict[str, float] = {}
        for name, now_s in messages:
            leases.heard(name, now_s)
            last[name] = now_s
        assert leases.expired(50) == sorted(name for name, heard in last.items() if 50 - heard >= 10)


class TestStates:
    def test_each_state(self) -> None:
        sites = [
            site("active"),
            site("invited", state="invited", signing_key=None),
            site("new"),
            site("out", state="revoked"),
            site("rejoined", signing_key=b"n" * 32),
            site("restored"),
        ]
        members = listed(
            ("active", b"k" * 32, ACTIVE),
            ("out", b"k" * 32, ACTIVE),
            ("rejoined", b"k" * 32, ACTIVE),
            ("restored", b"k" * 32, REVOKED),
        )
        assert states_of(sites, members) == {
            "active": "active",
            "invited": "invited",
            "new": "pending",
            "out": "revoked",
            "rejoined": "pending",
            "restored": "pending",
        }

    def test_before_the_first_list_all_are_pending(self) -> None:
        assert states_of([site("a")], None) == {"a": "pending"}


class TestChanges:
    def test_additions_and_removals(self) -> None:
        sites = [site("active"), site("invited", state="invited"), site("new"), site("out", state="revoked")]
        changes = changes_to(listed(("active", b"k" * 32, ACTIVE), ("out", b"k" * 32, ACTIVE)), sites)
        assert changes.pending == (Member(site="new", organisation="Clinic", signing_key=b"k" * 32, status=ACTIVE),)
        assert changes.revoked == ("out",)

    def test_nothing_to_sign(self) -> None:
        sites = [site("active"), site("out", state="revoked")]
        changes = changes_to(listed(("active", b"k" * 32, ACTIVE), ("out", b"k" * 32, REVOKED)), sites)
        assert (changes.pending, changes.revoked) == ((), ())

    def test_a_revoked_site_that_is_invited_again_stays_off_until_it_joins(self) -> None:
        sites = [site("back", state="invited", signing_key=None)]
        assert changes_to(listed(("back", b"k" * 32, ACTIVE)), sites).revoked == ("back",)
