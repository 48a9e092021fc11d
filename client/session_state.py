"""A session as it lies on the disk of a site: where the site stands, and what it has answered, as plain bytes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from atoll.privacy.secagg.messages import PublicKeys
from atoll.privacy.secagg.site import Secrets, SiteState
from atoll.wire import control_pb2 as pb


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionState:
    """One session of one update."""

    session: int
    opening: bytes
    members: bytes  # MemberList of the roster alone, of the version of the list that the site held
    site: SiteState
    answered: Mapping[str, tuple[str, bytes]] = field(default_factory=dict)
    """By step: SHA-256 (hex) of what the server said, and the SecureAnswer."""
    left: bytes = b""  # the SecureAnswer with which the site left the session; it has no other from then on

    def encode(self) -> bytes:
        table = {
            "session": self.session,
            "opening": self.opening.hex(),
            "members": self.members.hex(),
            "site": _site_to_table(self.site),
            "answered": {step: [digest, answer.hex()] for step, (digest, answer) in self.answered.items()},
            "left": self.left.hex(),
        }
        return json.dumps(table).encode()

    @classmethod
    def decode(cls, data: bytes) -> Self:
        table = json.loads(data)
        return cls(
            session=int(table["session"]),
            opening=bytes.fromhex(table["opening"]),
            members=bytes.fromhex(table["members"]),
            site=_site_from_table(table["site"]),
            answered={step: (digest, bytes.fromhex(answer)) for step, (digest, answer) in table["answered"].items()},
            left=bytes.fromhex(table["left"]),
        )


_PLAIN = ("advertised", "ring", "input", "input_root", "survivors", "consistency", "unmasked")
_SECRETS = ("sealing_key", "masking_key", "seed", "ring_nonce")


def _site_to_table(state: SiteState) -> dict[str, Any]:
    return {
        "site": state.site,
        "secrets": {name: getattr(state.secrets, name).hex() for name in _SECRETS},
        "public": {site: keys.encode().hex() for site, keys in state.public.items()},
        "shared": [item.hex() for item in state.shared],
        "held": {site: pair.hex() for site, pair in state.held.items()},
        "sharing": sorted(state.sharing),
        **{name: getattr(state, name).hex() for name in _PLAIN},
    }


def _site_from_table(table: dict[str, Any]) -> SiteState:
    return SiteState(
        site=int(table["site"]),
        secrets=Secrets(**{name: bytes.fromhex(table["secrets"][name]) for name in _SECRETS}),
        public={int(site): PublicKeys.decode(bytes.fromhex(keys)) for site, keys in table["public"].items()},
        shared=tuple(bytes.fromhex(item) for item in table["shared"]),
        held={int(site): bytes.fromhex(pair) for site, pair in table["held"].items()},
        sharing=frozenset(table["sharing"]),
        **{name: bytes.fromhex(table[name]) for name in _PLAIN},
    )


def digest_of(step: pb.SecureStep) -> str:
    """What the server says in a step, whatever the order in which it names sites."""
    said = pb.SecureStep()
    said.CopyFrom(step)
    if step.WhichOneof("step") == "keys":
        said.keys.advertised[:] = sorted(step.keys.advertised)
    elif step.WhichOneof("step") == "shares":
        said.shares.items[:] = sorted(step.shares.items)
    return hashlib.sha256(said.SerializeToString(deterministic=True)).hexdigest()
