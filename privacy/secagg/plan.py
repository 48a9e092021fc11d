"""The plan of a session: all that its sites must agree on, and the hash that binds them to it.

Every site works the hash out itself from what it was told and what it has (its own model, app, job). The hash is part
of every message's envelope and, by the session's name, of every key: sites with different plans share no mask.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Literal

from atoll.privacy.secagg.graph import neighbours
from atoll.privacy.secagg.keys import session_id
from atoll.privacy.secagg.parameters import Parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A site of the roster, as the signed member list has it."""

    site: str
    organisation: str
    signing_key: bytes  # Ed25519, 32 bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """Values of one ring that are masked with keys of their own."""

    bits: Literal[16, 32, 64]
    num_values: int

    @property
    def num_bytes(self) -> int:
        return self.bits // 8 * self.num_values


@dataclass(frozen=True, kw_only=True)  # not slotted: hash and session are worked out once and kept
class SessionPlan:
    """One session. A site is called by its index in the roster, which is sorted by name."""

    run_id: bytes  # 16 bytes
    round: int
    attempt: int
    parameters: Parameters
    fewest_survivors: int  # U2_min, sites without whose inputs no sum is released
    roster: tuple[Member, ...]
    member_list_version: int
    lanes: tuple[Lane, ...]
    bound_to: Mapping[str, str] = field(default_factory=dict)  # digests of base versions, app, job, by name

    def __post_init__(self) -> None:
        names = [member.site for member in self.roster]
        if names != sorted(set(names)) or len(names) != self.parameters.num_sites:
            raise ValueError(f"a roster of {len(names)} sites, unsorted or not of {self.parameters.num_sites}")

    @cached_property
    def hash(self) -> bytes:
        """SHA-256 of the plan's canonical form: JSON, sorted keys, no blanks."""
        table = {
            "attempt": self.attempt,
            "bound_to": dict(self.bound_to),
            "fewest_survivors": self.fewest_survivors,
            "lanes": [[lane.bits, lane.num_values] for lane in self.lanes],
            "member_list_version": self.member_list_version,
            "parameters": asdict(self.parameters),
            "protocol": "fl/sa1",
            "roster": [[member.site, member.organisation, member.signing_key.hex()] for member in self.roster],
            "round": self.round,
            "run_id": self.run_id.hex(),
        }
        return hashlib.sha256(json.dumps(table, sort_keys=True, separators=(",", ":")).encode()).digest()

    @cached_property
    def session(self) -> bytes:
        """The session's name, 32 bytes: salt of all its keys."""
        return session_id(self.run_id, self.round, self.attempt, self.hash)

    @property
    def num_bytes(self) -> int:
        """Of a masked input: its lanes one after the other, the widest values first so that all are aligned."""
        return sum(lane.num_bytes for lane in self.lanes)

    def organisations(self, sites: frozenset[int]) -> int:
        """How many different ones stand behind these sites."""
        return len({self.roster[index].organisation for index in sites})

    def neighbours(self, site: int, ring: bytes = b"") -> frozenset[int]:
        """Those that a site shares masks with; `ring` is the seed of a Harary graph, from all sites' nonces."""
        return neighbours(self.parameters, site, ring)
