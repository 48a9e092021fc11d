"""How many sites must be left, and who masks with whom: numbers from the size of a cohort and from what is assumed.

Of n sites up to A = floor(delta n) work for the adversary, and up to D = floor(gamma n) drop out. On the complete
graph every pair shares a mask and all n sites hold a share of every secret. Above `LARGEST_COMPLETE` sites a random
Harary graph is enough: a random ring on which each site masks with the `degree` sites nearest to it (Bell et al.
2020, section 3), with failures of probability below 2^-40 for privacy and 2^-30 for the result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Final, Literal

from atoll.wire.errors import ConfigError

Threat = Literal["semi-honest", "active"]

LARGEST_COMPLETE: Final = 128  # a server could choose whom it leaves out to shape a small random graph
SMALLEST_COHORT: Final = 3
HONEST_INPUTS: Final = 3  # least number of honest sites in a sum that is released
MAX_SITES: Final = 65_535  # shares carry their index in 16 bits
_PRIVACY_BITS, _CORRECTNESS_BITS = 40, 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """The terms of a session. Made by `parameters`."""

    num_sites: int  # n
    num_corrupt: int  # A, sites that may work for the adversary
    num_dropped: int  # D, sites that may drop out with the sum still coming out
    threshold: int  # t, shares that rebuild a secret
    degree: int  # k, sites that each one masks with; n - 1 on the complete graph
    threat: Threat

    @property
    def complete(self) -> bool:
        return self.degree == self.num_sites - 1

    @property
    def fewest_survivors(self) -> int:
        """Updates without which no sum is released."""
        return self.num_sites - self.num_dropped


def parameters(
    num_sites: int, *, corrupt: float = 0.1, dropped: float | None = None, threat: Threat = "active"
) -> Parameters:
    """The terms for a cohort.

    Args:
        corrupt: delta, the share of sites that may work for the adversary.
        dropped: gamma, the share that may drop out; None takes as many as the threshold leaves room for, and 0.1 on
            a Harary graph.

    Raises:
        ConfigError: no threshold exists; names the size, both shares and what would help.
    """
    if not SMALLEST_COHORT <= num_sites <= MAX_SITES:
        raise _refused(num_sites, f"wanted {SMALLEST_COHORT} to {MAX_SITES} sites")
    for key, share in (("corrupt", corrupt), ("dropped", dropped)):
        if share is not None and not 0 <= share < 1:
            raise ConfigError(
                f"privacy.secure_aggregation.{key} = {share}: wanted 0 to below 1",
                key=f"privacy.secure_aggregation.{key}",
                value=str(share),
                bound="0 to below 1",
            )
    if num_sites <= LARGEST_COMPLETE:
        return _complete(num_sites, _part(corrupt, num_sites), dropped, threat)
    num_dropped = _part(0.1 if dropped is None else dropped, num_sites)
    num_corrupt = _part(corrupt, num_sites)
    degree, threshold = harary(num_sites, num_corrupt, num_dropped, threat)
    return Parameters(
        num_sites=num_sites,
        num_corrupt=num_corrupt,
        num_dropped=num_dropped,
        threshold=threshold,
        degree=degree,
        threat=threat,
    )


def _part(share: float, num_sites: int) -> int:
    return math.floor(Fraction(str(share)) * num_sites)


def _complete(num_sites: int, num_corrupt: int, dropped: float | None, threat: Threat) -> Parameters:
    # Active: 2 (t - A) > n - A, so no two quorums of honest sites differ, and nobody's two kinds of share come out.
    majority = (num_sites + (num_corrupt if threat == "active" else 0)) // 2 + 1
    threshold = max(majority, num_corrupt + HONEST_INPUTS)
    room = num_sites - threshold
    if room < 0:
        raise _refused(num_sites, f"against {num_corrupt} corrupt sites {threshold} shares are needed; take more sites")
    num_dropped = room if dropped is None else _part(dropped, num_sites)
    if num_dropped > room:
        raise _refused(
            num_sites,
            f"against {num_corrupt} corrupt sites {threshold} shares are needed, so {room} may drop out and not "
            f"{num_dropped}; lower corrupt or dropped, or take more sites",
        )
    return Parameters(
        num_sites=num_sites,
        num_corrupt=num_corrupt,
        num_dropped=num_dropped,
        threshold=threshold,
        degree=num_sites - 1,
        threat=threat,
    )


@lru_cache(maxsize=64)
def harary(
    num_sites: int,
    num_corrupt: int,
    num_dropped: int,
    threat: Threat,
    *,
    privacy_bits: int = _PRIVACY_BITS,
    correctness_bits: int = _CORRECTNESS_BITS,
) -> tuple[int, int]:
    """The smallest even degree, and a threshold for it, of a random Harary graph.

    The conditions are those of Bell et al. 2020, section 3.3: honest survivors stay connected, no site has so many
    corrupt neighbours that they reach the threshold (`active`: nor half of what is above it), and every site keeps
    enough neighbours for the result. All probabilities are exact fractions.

    Raises:
        ConfigError: no degree below the number of sites will do.
    """
    for degree in range(2, num_sites, 2):
        privacy = Fraction(1, 2 ** (privacy_bits + 1))
        if not _connected(num_sites, num_corrupt + num_dropped, degree, privacy):
            continue
        most_corrupt = _least_tail(num_sites, num_corrupt, degree, privacy / num_sites)
        if threat == "active":
            threshold = math.ceil(Fraction(most_corrupt + degree) / 2 - Fraction(5, 8)) + 1
        else:
            threshold = most_corrupt + 1
        if threshold > degree:
            continue
        short = _below(num_sites, num_sites - num_dropped, degree, threshold)
        if short < Fraction(1, 2**correctness_bits * num_sites):
            return degree, threshold
    raise _refused(
        num_sites,
        f"no graph holds against {num_corrupt} corrupt and {num_dropped} lost sites; lower corrupt or dropped",
    )


def _connected(num_sites: int, num_bad: int, degree: int, most: Fraction) -> bool:
    """Whether honest survivors are connected but with probability `most`: union bound over pairs of cuts."""
    if degree > num_bad:
        return True
    pairs = Fraction(num_sites * (num_sites - degree - 1), 2)
    return pairs * Fraction(math.perm(num_bad, degree), math.perm(num_sites, degree)) < most


def _least_tail(num_sites: int, num_marked: int, num_drawn: int, most: Fraction) -> int:
    """The least x with P[more than x of the drawn are marked] <= most (hypergeometric)."""
    total, tail = math.comb(num_sites, num_drawn), 0
    for x in range(min(num_drawn, num_marked), -1, -1):
        tail += math.comb(num_marked, x) * math.comb(num_sites - num_marked, num_drawn - x)
        if Fraction(tail, total) > most:
            return x
    return 0


def _below(num_sites: int, num_marked: int, num_drawn: int, least: int) -> Fraction:
    """P[fewer than `least` of the drawn are marked]."""
    cases = sum(math.comb(num_marked, x) * math.comb(num_sites - num_marked, num_drawn - x) for x in range(least))
    return Fraction(cases, math.comb(num_sites, num_drawn))


def _refused(num_sites: int, reason: str) -> ConfigError:
    return ConfigError(
        f"secure aggregation over {num_sites} sites: {reason}",
        key="privacy.secure_aggregation",
        value=str(num_sites),
        bound=f"{SMALLEST_COHORT} to {MAX_SITES}",
    )
