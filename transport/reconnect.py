"""How long to wait before the next try, so that a thousand sites never come back in the same moment."""

from __future__ import annotations

import random

TRIES_IN_A_LEASE = 3


class Backoff:
    """Waits with full jitter: each uniform between nothing and a ceiling that doubles with every failure.

    "Exponential Backoff And Jitter", M. Brooker, AWS Architecture Blog, 2015: full jitter needs the fewest calls of
    the variants compared there. The randomness protects a server, no secret.
    """

    def __init__(self, first_s: float = 0.5, most_s: float = 15.0, rng: random.Random | None = None) -> None:
        self._first_s, self._most_s, self._longest_s = first_s, most_s, most_s
        self._rng = rng or random.Random()
        self._ceiling_s = first_s

    def next_s(self, at_least_s: float = 0.0) -> float:
        """Seconds to wait now; `at_least_s` is what a server that goes down asked for, spread on top of it."""
        wait_s = at_least_s + self._rng.uniform(0.0, self._ceiling_s)
        self._ceiling_s = min(self._most_s, self._ceiling_s * 2)
        return wait_s

    def within(self, lease_s: float) -> None:
        """Wait so shortly that a few tries fit into a lease: who comes back to a restarted server keeps its place."""
        self._most_s = min(self._longest_s, lease_s / TRIES_IN_A_LEASE)
        self._ceiling_s = min(self._ceiling_s, self._most_s)

    def reset(self) -> None:
        """Begins anew; call it when a connection has proved good, not when it was only opened."""
        self._ceiling_s = self._first_s
