"""Who this site is in sessions of secure aggregation, and what it has of a run by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from atoll.client.private_update import Facts
from atoll.client.revealed import RevealedBook
from atoll.client.sealed import Sealer
from atoll.privacy.secagg.agreement import Opening, Own, Terms
from atoll.wire.errors import NotAllowed
from atoll.wire.job import Job
from atoll.wire.members_pb2 import MemberList


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """What this site has agreed to of a run, and has of it by itself."""

    job: Job
    app_hash: str
    schema_hash: str

    def own(self, update: Facts, members: MemberList) -> Own:
        """What this site's plan of a session is made of."""
        return Own(
            job=self.job,
            app_hash=self.app_hash,
            schema_hash=self.schema_hash,
            num_values=update.num_values,
            num_factors=update.num_factors,
            members=members,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Party:
    """Who this site is in sessions, and what it consents to."""

    name: str
    signing: Ed25519PrivateKey | None  # None in plain text
    members: Callable[[], MemberList | None]  # the newest list that the federation's key has signed
    sealer: Sealer
    book: RevealedBook
    consent: Callable[[str, Terms], bool]
    """Raises PolicyRefused where the site's policy says no to a session; whether sums of other runs count too."""

    @property
    def signing_key(self) -> Ed25519PrivateKey:
        """Raises NotAllowed in plain text."""
        if self.signing is None:
            raise NotAllowed("this site has no signing key; join with TLS")
        return self.signing

    def members_of(self, opening: Opening) -> MemberList:
        """The member list that this site holds, of the roster alone. Raises NotAllowed where it holds none."""
        held = self.members()
        if held is None:
            raise NotAllowed("this site holds no signed member list, so it cannot tell who takes part; join with TLS")
        own = set(opening.sites)
        members = [member for member in held.members if member.site in own]
        return MemberList(federation=held.federation, version=held.version, members=members)

    def require_own_key(self, terms: Terms) -> None:
        """Returns where the member list has this site's own key. Raises NotAllowed."""
        own = self.signing_key.public_key().public_bytes_raw()
        if terms.plan.roster[terms.index(self.name)].signing_key != own:
            raise NotAllowed(f"the member list has another key for {self.name} than this site's", field="sites")
