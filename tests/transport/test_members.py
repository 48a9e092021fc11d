"""The signed member list: what is taken, what is refused, and what the offline key will not sign."""

from __future__ import annotations

import stat
from datetime import UTC, datetime
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from atoll.transport.identity import write_private
from atoll.transport.members import FederationKey, MemberBook, sign_members, sign_pending, verify_members
from atoll.wire.errors import ConfigError, IdentityError, LocalError, Malformed, RemoteError, Stale
from atoll.wire.members_pb2 import ACTIVE, REVOKED, Member, MemberList, SignedMemberList

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PUBLIC = KEY.public_key().public_bytes_raw()
NOW = datetime(2026, 3, 1, tzinfo=UTC)


def member(site: str, *, key: int = 1, status: int = ACTIVE) -> Member:
    return Member(site=site, organisation="St Mary", signing_key=bytes([key]) * 32, status=status)  # type: ignore[arg-type]


def members(version: int = 1, *sites: str, federation: str = "isles") -> MemberList:
    listed = [member(site) for site in sites or ("alpha", "beta")]
    return MemberList(federation=federation, version=version, members=listed, signed_at_unix_s=1_772_323_200)


def test_golden_bytes() -> None:
    """Every version of Atoll must sign and read this list alike: sites keep what they have pinned for years."""
    signed = sign_members(KEY, members())
    key = "1a20" + "01" * 32
    assert signed.member_list.hex() == (
        f"0a0569736c65731001"  # federation, version
        f"1a340a05616c70686112075374204d617279{key}2001"
        f"1a330a046265746112075374204d617279{key}2001"
        f"2080838ecd06"  # signed at
    )
    assert signed.signature.hex() == (
        "8b32835f247e8a75ae2406e4d01a4e881585a92bf7794b09b4e9e1a4145d18ab"
        "639b1f6bee79640ddf6d0c4560cfa3c696ed0577962b4b57fdc2226c067b390b"
    )


def test_what_is_signed_is_read() -> None:
    assert verify_members(PUBLIC, sign_members(KEY, members(7)), newer_than=6) == members(7)


def test_any_changed_byte_is_refused() -> None:
    signed = sign_members(KEY, members())
    for at in range(len(signed.member_list)):
        changed = bytearray(signed.member_list)
        changed[at] ^= 1
        with pytest.raises(Malformed, match="not signed by the federation's key"):
            verify_members(
                PUBLIC, SignedMemberList(member_list=bytes(changed), signature=signed.signature), newer_than=0
            )
    for at in range(64):
        bad = bytearray(signed.signature)
        bad[at] ^= 1
        with pytest.raises(Malformed, match="not signed by the federation's key"):
            verify_members(PUBLIC, SignedMemberList(member_list=signed.member_list, signature=bytes(bad)), newer_than=0)


@pytest.mark.parametrize("signature", [b"", b"\0" * 64, b"\0" * 63])
def test_no_signature(signature: bytes) -> None:
    signed = SignedMemberList(member_list=members().SerializeToString(), signature=signature)
    with pytest.raises(Malformed):
        verify_members(PUBLIC, signed, newer_than=0)


def test_another_key() -> None:
    with pytest.raises(Malformed, match="ask the keeper"):
        verify_members(PUBLIC, sign_members(Ed25519PrivateKey.generate(), members()), newer_than=0)


def test_a_signature_for_another_purpose_counts_for_nothing() -> None:
    """The bytes are signed with their purpose before them."""
    data = members().SerializeToString(deterministic=True)
    with pytest.raises(Malformed):
        verify_members(PUBLIC, SignedMemberList(member_list=data, signature=KEY.sign(data)), newer_than=0)


@pytest.mark.parametrize("held", [7, 8])
def test_an_older_version(held: int) -> None:
    with pytest.raises(Stale, match=f"member list 7 of isles is not newer than {held}"):
        verify_members(PUBLIC, sign_members(KEY, members(7)), newer_than=held)


@pytest.mark.parametrize(
    "broken",
    [
        members(1, "beta", "alpha"),
        members(1, "alpha", "alpha"),
        members(1, "../alpha"),
        members(1, federation="I S L E S"),
        MemberList(federation="isles", version=1, members=[Member(site="alpha", organisation="x", status=ACTIVE)]),
        MemberList(federation="isles", version=1, members=[member("alpha", status=0)]),
    ],
)
def test_a_list_that_breaks_its_rules_is_refused_though_signed(broken: MemberList) -> None:
    with pytest.raises(Malformed):
        verify_members(PUBLIC, sign_members(KEY, broken), newer_than=0)


class TestBook:
    @pytest.fixture
    def book(self, tmp_path: Path) -> MemberBook:
        return MemberBook(tmp_path, PUBLIC, federation="isles")

    def test_empty(self, book: MemberBook) -> None:
        assert book.version == 0
        assert book.current is None
        assert book.signing_key("alpha") is None

    def test_rises_and_survives(self, book: MemberBook, tmp_path: Path) -> None:
        assert book.accept(sign_members(KEY, members(3)))
        assert not book.accept(sign_members(KEY, members(3)))  # pushed again after a reconnect
        again = MemberBook(tmp_path, PUBLIC, federation="isles")
        assert again.version == 3
        assert again.signing_key("alpha") == bytes([1]) * 32
        with pytest.raises(Stale):
            again.accept(sign_members(KEY, members(2)))
        assert again.accept(sign_members(KEY, members(9)))

    def test_refusals_change_nothing(self, book: MemberBook, tmp_path: Path) -> None:
        book.accept(sign_members(KEY, members(3)))
        for refused in (
            sign_members(KEY, members(2)),
            sign_members(KEY, members(3, "alpha", "ghost")),
            sign_members(KEY, members(4, federation="others")),
            sign_members(Ed25519PrivateKey.generate(), members(4)),
        ):
            with pytest.raises(RemoteError):
                book.accept(refused)
        assert book.current == members(3)
        assert MemberBook(tmp_path, PUBLIC, federation="isles").current == members(3)

    def test_two_lists_of_one_version_are_named(self, book: MemberBook) -> None:
        book.accept(sign_members(KEY, members(3)))
        with pytest.raises(Malformed, match="two different member lists of version 3"):
            book.accept(sign_members(KEY, members(3, "alpha", "ghost")))

    def test_a_revoked_site_has_no_key(self, book: MemberBook) -> None:
        listed = members(1)
        listed.members[0].status = REVOKED
        book.accept(sign_members(KEY, listed))
        assert book.signing_key("alpha") is None
        assert book.signing_key("beta") is not None

    def test_a_damaged_file_is_not_an_empty_book(self, book: MemberBook, tmp_path: Path) -> None:
        """Else a site could be brought back to an old list by a broken disk."""
        book.accept(sign_members(KEY, members(3)))
        write_private(tmp_path / "member_list.bin", b"\xff" * 10)
        with pytest.raises(IdentityError, match="damaged"):
            MemberBook(tmp_path, PUBLIC, federation="isles")

    def test_a_list_that_cannot_be_kept_is_not_taken(self, book: MemberBook, tmp_path: Path) -> None:
        (tmp_path / ".member_list.bin.new").mkdir()  # in the way of the write, for root too
        with pytest.raises(LocalError):
            book.accept(sign_members(KEY, members(3)))
        assert book.version == 0


class TestFederationKey:
    @pytest.fixture
    def key(self, tmp_path: Path) -> FederationKey:
        return FederationKey.create(tmp_path / "offline", "isles")

    def test_what_is_made_is_loaded_and_its_owners_alone(self, key: FederationKey) -> None:
        loaded = FederationKey.load(key.folder)
        assert (loaded.public_key, loaded.federation) == (key.public_key, "isles")
        assert {stat.S_IMODE(path.stat().st_mode) for path in key.folder.iterdir()} == {0o600}
        assert "key" not in repr(loaded).replace("federation_key", "")

    def test_it_is_never_overwritten(self, key: FederationKey) -> None:
        with pytest.raises(ConfigError, match="already holds"):
            FederationKey.create(key.folder, "isles")

    @pytest.mark.parametrize("name", ["federation_key.pem", "federation.json"])
    def test_damaged_missing_open(self, key: FederationKey, name: str) -> None:
        path = key.folder / name
        path.chmod(0o644)
        with pytest.raises(IdentityError, match="chmod 600"):
            FederationKey.load(key.folder)
        write_private(path, b"\xff")
        with pytest.raises(IdentityError, match="does not hold a federation's key"):
            FederationKey.load(key.folder)
        path.unlink()
        with pytest.raises(IdentityError, match="missing"):
            FederationKey.load(key.folder)

    def test_pending_sites_come_on_the_list_and_revoked_ones_stay_marked(self, key: FederationKey) -> None:
        first = sign_pending(None, [member("beta"), member("alpha", status=0)], [], key, now=NOW)
        listed = verify_members(key.public_key, first, newer_than=0)
        assert [(m.site, m.status) for m in listed.members] == [("alpha", ACTIVE), ("beta", ACTIVE)]
        assert (listed.version, listed.federation, listed.signed_at_unix_s) == (1, "isles", int(NOW.timestamp()))
        second = sign_pending(first, [member("gamma")], ["beta"], FederationKey.load(key.folder))
        listed = verify_members(key.public_key, second, newer_than=1)
        assert [(m.site, m.status) for m in listed.members] == [
            ("alpha", ACTIVE),
            ("beta", REVOKED),
            ("gamma", ACTIVE),
        ]

    def test_a_new_key_of_a_site_replaces_the_old_one(self, key: FederationKey) -> None:
        first = sign_pending(None, [member("alpha")], [], key)
        second = sign_pending(first, [member("alpha", key=2)], [], FederationKey.load(key.folder))
        assert verify_members(key.public_key, second, newer_than=1).members[0].signing_key == bytes([2]) * 32

    def test_a_forged_list_is_no_base(self, key: FederationKey) -> None:
        forged = sign_members(KEY, members(5, "alpha", "ghost"))
        with pytest.raises(Malformed):
            sign_pending(forged, [member("beta")], [], key)

    def test_an_old_list_is_no_base(self, key: FederationKey) -> None:
        """A server that shows version 1 once more does not get a second version 2, nor a revoked site back."""
        first = sign_pending(None, [member("alpha"), member("beta")], [], key)
        sign_pending(first, [], ["beta"], FederationKey.load(key.folder))
        for shown in (first, None, SignedMemberList()):
            following = sign_pending(shown, [member("gamma")], [], FederationKey.load(key.folder))
            listed = verify_members(key.public_key, following, newer_than=2)
            assert [m.site for m in listed.members if m.status == ACTIVE] == ["alpha", "gamma"]

    def test_who_is_not_listed_cannot_be_revoked(self, key: FederationKey) -> None:
        with pytest.raises(ConfigError, match="gamma is not on member list 0"):
            sign_pending(None, [], ["gamma"], key)
        assert FederationKey.load(key.folder).last_signed is None
