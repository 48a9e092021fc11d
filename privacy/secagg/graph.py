"""Who masks with whom: everybody with everybody, or the nearest on a random ring (a Harary graph).

The ring's order follows from nonces that all sites commit to before any is opened, so nobody chooses neighbours.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

from atoll.privacy.secagg.parameters import Parameters


def ring_seed(session: bytes, nonces: dict[int, bytes]) -> bytes:
    """The seed of the ring, from the opened nonces of all sites that sent keys."""
    opened = b"".join(site.to_bytes(2, "big") + nonces[site] for site in sorted(nonces))
    return hashlib.sha256(b"fl/sa1/ring" + session + opened).digest()


def neighbours(parameters: Parameters, site: int, seed: bytes) -> frozenset[int]:
    """Sites that `site` shares masks with, itself not among them. Symmetric."""
    n, k = parameters.num_sites, parameters.degree
    if parameters.complete:
        return frozenset(range(n)) - {site}
    order = _ring(n, seed)
    place = order.index(site)
    return frozenset(order[(place + step) % n] for near in range(1, k // 2 + 1) for step in (near, -near))


@lru_cache(maxsize=16)
def _ring(num_sites: int, seed: bytes) -> tuple[int, ...]:
    """Sites in the order of a hash of seed and index: a random permutation to whoever does not know the seed."""
    if len(seed) != 32:
        raise ValueError(f"the seed of a ring has {len(seed)} bytes, wanted 32")
    return tuple(sorted(range(num_sites), key=lambda site: hashlib.sha256(seed + site.to_bytes(2, "big")).digest()))
