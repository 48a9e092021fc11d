"""Who belongs to a federation: the member list, signed with the offline federation key.

Invariant: a list counts only when the pinned key signed exactly its bytes, and versions only rise, on the disk too.
A key that signed two different lists of one version has been used in two places: the second one is refused and said
to be what it is. The server stores and pushes lists; it can hold one back, but make none.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from google.protobuf.message import DecodeError

from atoll.transport.identity import (
    make_private_folder,
    private_pem,
    read_private,
    utc_now,
    write_private,
)
from atoll.wire.errors import ConfigError, IdentityError, Malformed, Stale, TooLarge
from atoll.wire.members_pb2 import ACTIVE, REVOKED, Member, MemberList, SignedMemberList
from atoll.wire.names import check_organisation, check_site_name

MAX_MEMBERS = 100_000
MAX_LIST_BYTES = 31 << 20  # fits a message; 100,000 members of full length take 24 MB

_CONTEXT = b"atoll/member-list/1\0"
_KEY = "federation_key.pem"
_ABOUT = "federation.json"
_LAST_SIGNED = "last_signed.bin"  # the newest list that the key in this folder signed
_HELD = "member_list.bin"


def sign_members(key: Ed25519PrivateKey, members: MemberList) -> SignedMemberList:
    """The list with its signature. Checks nothing: `sign_pending` is for people."""
    data = members.SerializeToString(deterministic=True)
    return SignedMemberList(member_list=data, signature=key.sign(_CONTEXT + data))


def verify_members(public_key: bytes, signed: SignedMemberList, *, newer_than: int) -> MemberList:
    """The list inside, when the federation's key signed it and it is newer than version `newer_than`.

    Raises:
        Malformed: another key signed it, a byte was changed, or it breaks its own rules.
        TooLarge: over 31 MiB or 100,000 members.
        Stale: not newer.
    """
    members = _read_signed(public_key, signed)
    if members.version <= newer_than:
        raise Stale(
            f"member list {members.version} of {members.federation} is not newer than {newer_than}, which is held: "
            "the server was reset, or replays an old list",
            field="version",
            value=members.version,
            bound=f"> {newer_than}",
        )
    return members


def _read_signed(public_key: bytes, signed: SignedMemberList) -> MemberList:
    if len(signed.member_list) > MAX_LIST_BYTES:
        raise TooLarge("a member list is too large", value=len(signed.member_list), bound=MAX_LIST_BYTES)
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signed.signature, _CONTEXT + signed.member_list)
    except (ValueError, InvalidSignature):
        raise Malformed(
            "a member list is not signed by the federation's key that was pinned at joining: it was changed on its "
            "way, or the server is not to be trusted; ask the keeper of the federation's key",
            field="signature",
        ) from None
    try:
        members = MemberList.FromString(signed.member_list)
    except DecodeError:
        raise Malformed("a signed member list cannot be read: it is of a newer Atoll", field="member_list") from None
    _check_members(members)
    return members


def _check_members(members: MemberList) -> None:
    check_site_name(members.federation, "federation")
    if len(members.members) > MAX_MEMBERS:
        raise TooLarge("a member list is too long", value=len(members.members), bound=MAX_MEMBERS)
    before = ""
    for member in members.members:
        check_site_name(member.site, "member")
        check_organisation(member.organisation)
        if member.site <= before:
            raise Malformed(f"member {member.site} is out of order or twice on the list", site=member.site)
        if len(member.signing_key) != 32 or member.status not in (ACTIVE, REVOKED):
            raise Malformed(f"member {member.site} has no proper key or status", site=member.site)
        before = member.site


class MemberBook:
    """The newest member list that a site has seen, durable. Not for use from several threads."""

    def __init__(self, folder: Path, public_key: bytes, *, federation: str) -> None:
        """Reads what is held.

        Raises:
            IdentityError: the held list is damaged or of another federation.
        """
        self._path = folder / _HELD
        self._public_key, self._federation = public_key, federation
        self._signed = SignedMemberList()
        self._members = MemberList(federation=federation)
        make_private_folder(folder)
        if self._path.exists():
            try:
                self._signed = SignedMemberList.FromString(read_private(self._path))
                self._members = self._check(self._signed)
            except (DecodeError, Malformed, TooLarge):
                raise IdentityError(f"{self._path} is damaged: restore it from a backup or join anew") from None

    @property
    def version(self) -> int:
        """Of the held list; 0 where there is none."""
        return self._members.version

    @property
    def current(self) -> MemberList | None:
        """The held list; not to be changed."""
        return self._members if self._members.version else None

    def signing_key(self, site: str) -> bytes | None:
        """The Ed25519 public key of an active member; None for anybody else."""
        return next((m.signing_key for m in self._members.members if m.site == site and m.status == ACTIVE), None)

    def accept(self, signed: SignedMemberList) -> bool:
        """Takes a newer list, durably; False where it is the one that is held.

        Raises:
            Malformed: wrong signature or federation, or a second list of the held version.
            Stale: older than the held one.
            DiskFull, LocalError: it cannot be stored; the held one stays.
        """
        members = self._check(signed)
        if members.version == self.version and signed.member_list == self._signed.member_list:
            return False
        if members.version == self.version:
            raise Malformed(
                f"two different member lists of version {members.version} carry the federation's signature: its key "
                "was used in two places; tell its keeper",
                field="version",
                value=members.version,
            )
        members = verify_members(self._public_key, signed, newer_than=self.version)
        write_private(self._path, signed.SerializeToString())
        self._signed, self._members = signed, members
        return True

    def _check(self, signed: SignedMemberList) -> MemberList:
        members = _read_signed(self._public_key, signed)
        if members.federation != self._federation:
            raise Malformed(
                f"a member list is of federation {members.federation}, this site is in {self._federation}",
                field="federation",
                value=members.federation,
                bound=self._federation,
            )
        return members


@dataclass(frozen=True, slots=True, kw_only=True)
class FederationKey:
    """The offline key in its folder, with the newest list that it signed."""

    folder: Path
    federation: str
    key: Ed25519PrivateKey = field(repr=False)
    last_signed: SignedMemberList | None = field(repr=False)

    @property
    def public_key(self) -> bytes:
        """32 bytes."""
        return self.key.public_key().public_bytes_raw()

    @classmethod
    def create(cls, folder: Path, federation: str) -> FederationKey:
        """A new key, stored in `folder` with mode 0600.

        Raises:
            ConfigError: a key lies there already.
            DiskFull, LocalError: the folder cannot be written.
        """
        check_site_name(federation, "federation")
        if (folder / _KEY).exists():
            raise ConfigError(
                f"{folder} already holds a federation's key, which must never be overwritten: choose another folder",
                key="federation-key",
                value=str(folder),
            )
        key = Ed25519PrivateKey.generate()
        make_private_folder(folder)
        write_private(folder / _ABOUT, json.dumps({"federation": federation}).encode() + b"\n")
        write_private(folder / _KEY, private_pem(key))
        return cls(folder=folder, federation=federation, key=key, last_signed=None)

    @classmethod
    def load(cls, folder: Path) -> FederationKey:
        """The key in `folder`.

        Raises:
            IdentityError: it is missing, damaged, or readable by others.
        """
        last = folder / _LAST_SIGNED
        try:
            key = load_pem_private_key(read_private(folder / _KEY), password=None)
            federation = str(json.loads(read_private(folder / _ABOUT))["federation"])
            signed = SignedMemberList.FromString(read_private(last)) if last.exists() else None
        except (ValueError, TypeError, KeyError, UnsupportedAlgorithm, DecodeError):
            raise IdentityError(f"{folder} does not hold a federation's key: restore it from a backup") from None
        if not isinstance(key, Ed25519PrivateKey):
            raise IdentityError(f"{folder / _KEY} holds another kind of key than Ed25519: restore it from a backup")
        return cls(folder=folder, federation=federation, key=key, last_signed=signed)


def sign_pending(
    current: SignedMemberList | None,
    pending: Sequence[Member],
    revoked: Sequence[str],
    federation_key: FederationKey,
    *,
    now: datetime | None = None,
) -> SignedMemberList:
    """The next member list: the newest one, `pending` put on it as active, `revoked` marked.

    It is written beside the key before it is handed out, and the next one builds on it, so a server that shows an
    old or a forged list cannot make the key sign a version twice, bring a revoked site back or slip a ghost in.

    Args:
        current: the server's list; None or empty before the first.
        pending: sites that a person looked at (their key's fingerprint is theirs to compare).

    Raises:
        Malformed: `current` is not signed by this key, or the list would break its rules.
        ConfigError: a name in `revoked` is not on the list.
        DiskFull, LocalError: the list cannot be stored beside the key.
    """
    base = _newest(current, federation_key)
    members = {member.site: member for member in base.members}
    for site in revoked:
        if site not in members:
            raise ConfigError(f"{site} is not on member list {base.version}, so it cannot be revoked", value=site)
        members[site].status = REVOKED
    for member in pending:
        fresh = Member(site=member.site, organisation=member.organisation, signing_key=member.signing_key)
        fresh.status = ACTIVE
        members[member.site] = fresh
    following = MemberList(
        federation=federation_key.federation,
        version=base.version + 1,
        members=[members[site] for site in sorted(members)],
        signed_at_unix_s=int((now or utc_now()).timestamp()),
    )
    _check_members(following)
    signed = sign_members(federation_key.key, following)
    write_private(federation_key.folder / _LAST_SIGNED, signed.SerializeToString())
    return signed


def _newest(current: SignedMemberList | None, federation_key: FederationKey) -> MemberList:
    """The newer of the server's list and the last one signed here, both verified."""
    newest = MemberList(federation=federation_key.federation)
    for signed in (federation_key.last_signed, current):
        if signed is None or not signed.member_list:
            continue
        members = _read_signed(federation_key.public_key, signed)
        if members.federation != federation_key.federation:
            raise Malformed(f"the member list is of federation {members.federation}, not {federation_key.federation}")
        if members.version > newest.version:
            newest = members
    return newest
