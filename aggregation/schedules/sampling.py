"""Whom a round asks: lots that follow from seed, round and name, so that a replay draws the same sites.

Hashes need no generator whose state would have to be kept, and no lot depends on who else is there or came first.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

from atoll.aggregation.schedules.members import Members

Chance = Callable[[str, int], float]  # of a site and its largest weight: above 0; twice as much is drawn twice as often


def lot(seed: int, round_: int, site: str) -> bytes:
    """A site's lot in a round: 32 bytes."""
    return hashlib.sha256(f"atoll/cohort/1\n{seed}\n{round_}\n{site}".encode()).digest()


def draw(members: Members, count: int, *, seed: int, round_: int, chance: Chance | None = None) -> Members:
    """`count` of the members without replacement, sorted; all alike where no chance is given.

    With chances, the first drawn is a site with the probability of its chance among all, the second with that of its
    chance among the rest, and so on: the smallest of -ln(u) / chance (Efraimidis and Spirakis 2006, algorithm A).
    """

    def key(member: tuple[str, int]) -> tuple[float, bytes]:
        own = lot(seed, round_, member[0])
        return (_wait(own) / chance(*member) if chance else 0.0, own)

    return tuple(sorted(sorted(members, key=key)[:count]))


def _wait(lot_: bytes) -> float:
    """-ln(u) of a lot as a number u between 0 and 1."""
    return -math.log((int.from_bytes(lot_[:8], "big") + 0.5) / 2.0**64)
