"""Waits spread out, double up to a ceiling, and begin anew after a good connection."""

from __future__ import annotations

import random

from atoll.transport.reconnect import Backoff


class Highest(random.Random):
    """Draws the ceiling of each wait."""

    def uniform(self, a: float, b: float) -> float:
        return b


def test_ceilings_double_up_to_the_most_and_begin_anew() -> None:
    backoff = Backoff(first_s=0.5, most_s=3.0, rng=Highest())
    assert [backoff.next_s() for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    backoff.reset()
    assert backoff.next_s() == 0.5


def test_waits_lie_anywhere_below_the_ceiling() -> None:
    backoff = Backoff(first_s=1.0, most_s=1.0, rng=random.Random(7))
    waits = [backoff.next_s() for _ in range(1000)]
    assert 0 <= min(waits) < 0.05
    assert 0.95 < max(waits) <= 1


def test_a_server_that_goes_down_is_left_alone_for_as_long_as_it_asked() -> None:
    backoff = Backoff(first_s=1.0, most_s=60.0, rng=random.Random(7))
    waits = [backoff.next_s(at_least_s=30.0) for _ in range(100)]
    assert all(30 <= wait <= 90 for wait in waits)
    assert len(set(waits)) == len(waits)


def test_a_few_tries_fit_into_the_lease_of_the_server_of_the_day() -> None:
    backoff = Backoff(first_s=0.5, most_s=15.0, rng=Highest())
    backoff.within(lease_s=6.0)
    assert [backoff.next_s() for _ in range(4)] == [0.5, 1.0, 2.0, 2.0]
    backoff.within(lease_s=45.0)
    assert [backoff.next_s() for _ in range(4)][-1] == 15.0
    backoff.within(lease_s=6.0)
    assert backoff.next_s() == 2.0
