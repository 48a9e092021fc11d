"""What a site knows of who belongs: the signed member lists that the server pushes, and its own place on them."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from atoll.client.board import Board
from atoll.transport.identity import Identity, fingerprint, format_fingerprint
from atoll.transport.members import MemberBook
from atoll.wire.members_pb2 import ACTIVE, MemberList, SignedMemberList

_log = logging.getLogger(__name__)


class Membership:
    """The newest member list, and where this site stands. In plain text there are none, and nothing is checked."""

    def __init__(self, folder: Path, identity: Identity | None, board: Board) -> None:
        """Raises IdentityError where the held list is damaged."""
        self._identity = identity
        self._board = board
        self._book = (
            MemberBook(folder, identity.federation_public_key, federation=identity.federation)
            if identity is not None
            else None
        )

    @property
    def version(self) -> int:
        """Of the list that is held; 0 where there is none."""
        return self._book.version if self._book is not None else 0

    @property
    def state(self) -> str:
        """ "active", "pending", "revoked"; "unknown" in plain text."""
        if self._identity is None or self._book is None:
            return "unknown"
        members = self._book.current.members if self._book.current is not None else ()
        own = next((member for member in members if member.site == self._identity.name), None)
        if own is None or own.signing_key != self._own_key():
            return "pending"
        return "active" if own.status == ACTIVE else "revoked"

    def signing_key(self, site: str) -> bytes | None:
        """The Ed25519 public key of an active member; None of anybody else, and of all in plain text."""
        return self._book.signing_key(site) if self._book is not None else None

    def members(self) -> MemberList | None:
        """The list that is held, signed by the federation's key; None before the first one, and in plain text."""
        return self._book.current if self._book is not None else None

    async def take(self, signed: SignedMemberList) -> None:
        """Hold a list that the server pushed.

        Raises:
            Malformed, Stale, TooLarge: it does not count; the one that is held stays.
            LocalError: it cannot be stored.
        """
        if self._book is not None and await asyncio.to_thread(self._book.accept, signed):
            _log.info("member list %d of federation %s", self._book.version, self._identity_name())
            self.tell()

    def tell(self) -> None:
        """Show where this site stands, and say what to do where it takes no part."""
        state = self.state
        self._board.show(membership=state, member_list_version=self.version)
        if state == "pending":
            _log.warning(
                "this site is pending: it takes part once the keeper of the federation's key has put it on the member "
                "list (atoll federation sign); the fingerprint of its key is %s",
                format_fingerprint(fingerprint(self._own_key())),
            )
        elif state == "revoked":
            _log.error("this site is revoked on member list %d: ask the federation's operator", self.version)

    def _own_key(self) -> bytes:
        key = self._identity.signing_key if self._identity is not None else None
        return key.public_key().public_bytes_raw() if key is not None else b""

    def _identity_name(self) -> str:
        return self._identity.federation if self._identity is not None else ""
