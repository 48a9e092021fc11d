"""The table of grants: limits, fairness, and a clock that takes back what moves too slowly."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.transport.grants import MIN_BYTES_PER_S, WINDOW_S, Ask, Direction, Grant, GrantTable, Subject
from atoll.wire import control_pb2
from atoll.wire.errors import NotAllowed, Stale

WHOLE = 1 << 30


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def table(clock: Clock, max_up: int = 2, max_down: int = 2, max_per_site: int = 1) -> GrantTable:
    numbers = itertools.count(1)
    return GrantTable(max_up, max_down, clock, max_per_site=max_per_site, new_id=lambda: f"grant-{next(numbers)}")


def ask(site: str, version: int = 1, direction: Direction = "down", **more: int) -> Ask:
    return Ask(
        site=site, subject=Subject(direction=direction, run="run", version=version), **{"num_bytes": WHOLE, **more}
    )


def sites(grants: list[Grant]) -> list[str]:
    return [grant.ask.site for grant in grants]


def test_directions_have_places_of_their_own(clock: Clock) -> None:
    grants = table(clock, max_up=1, max_down=2)
    for site in "abc":
        grants.ask(ask(site))
        grants.ask(ask(site, direction="up"))
    assert sorted(sites(grants.admit())) == ["a", "a", "b"]
    assert (grants.num_active("up"), grants.num_active("down")) == (1, 2)
    assert (grants.num_waiting("up"), grants.num_waiting("down")) == (2, 1)
    assert grants.admit() == []


def test_a_freed_place_goes_to_the_next_in_line(clock: Clock) -> None:
    grants = table(clock, max_down=1)
    for site in "abc":
        grants.ask(ask(site))
    order = []
    for _ in range(3):
        (grant,) = grants.admit()
        order.append(grant.ask.site)
        assert grants.finish(grant.id)
        assert not grants.finish(grant.id)
    assert order == ["a", "b", "c"]


def test_a_site_with_many_wishes_does_not_keep_others_waiting(clock: Clock) -> None:
    grants = table(clock, max_down=1)
    for version in range(5):
        grants.ask(ask("greedy", version))
    for site in ("b", "c"):
        grants.ask(ask(site))
    order = []
    while granted := grants.admit():
        order += sites(granted)
        grants.finish(granted[0].id)
    assert order == ["greedy", "b", "c", *["greedy"] * 4]


def test_a_site_has_at_most_its_share_of_the_places(clock: Clock) -> None:
    grants = table(clock, max_down=4, max_per_site=2)
    for version in range(4):
        grants.ask(ask("a", version))
    grants.ask(ask("b"))
    assert sites(grants.admit()) == ["a", "b", "a"]


def test_uploads_are_admitted_by_free_staging_slots_too(clock: Clock) -> None:
    grants = table(clock)
    grants.ask(ask("a", direction="up"))
    grants.ask(ask("b", direction="up"))
    assert grants.admit(up_places=0) == []
    assert sites(grants.admit(up_places=1)) == ["a"]


def test_asking_again_ends_the_grant_that_was_lost_and_keeps_no_double(clock: Clock) -> None:
    grants = table(clock)
    grants.ask(ask("a"))
    (lost,) = grants.admit()
    grants.ask(ask("a", offset=77))
    grants.ask(ask("a", offset=78))
    (grant,) = grants.admit()
    assert grant.ask.offset == 78
    with pytest.raises(Stale):
        grants.find(lost.id, "a", "down")
    assert grants.num_waiting("down") == 0


def test_a_grant_is_good_for_its_site_and_direction_only(clock: Clock) -> None:
    grants = table(clock)
    grants.ask(ask("a"))
    (grant,) = grants.admit()
    assert grants.find(grant.id, "a", "down") is grant
    with pytest.raises(NotAllowed):
        grants.find(grant.id, "b", "down")
    with pytest.raises(NotAllowed):
        grants.find(grant.id, "a", "up")
    with pytest.raises(Stale, match="ask again"):
        grants.find("made up", "a", "down")


def test_a_slow_transfer_loses_its_grant_and_a_steady_one_keeps_it(clock: Clock) -> None:
    grants = table(clock)
    grants.ask(ask("slow"))
    grants.ask(ask("steady"))
    slow, steady = grants.admit()
    for second in range(1, int(3 * WINDOW_S) + 1):
        clock.now_s += 1
        grants.progress(slow.id, second * (MIN_BYTES_PER_S - 1))
        grants.progress(steady.id, second * MIN_BYTES_PER_S)
        if second == WINDOW_S:
            assert grants.overdue() == [slow]
        else:
            assert grants.overdue() == []
    assert grants.active() == [steady]


def test_a_transfer_that_stalls_after_a_fast_start_loses_its_grant(clock: Clock) -> None:
    grants = table(clock)
    grants.ask(ask("a"))
    (grant,) = grants.admit()
    grants.progress(grant.id, WHOLE // 2)
    clock.now_s += WINDOW_S
    assert grants.overdue() == []
    clock.now_s += WINDOW_S
    assert grants.overdue() == [grant]


@pytest.mark.parametrize("position_bytes", [0, 100])
def test_a_grant_that_nobody_uses_or_ends_is_overdue(clock: Clock, position_bytes: int) -> None:
    grants = table(clock)
    grants.ask(ask("a", num_bytes=100, offset=position_bytes))
    (grant,) = grants.admit()
    clock.now_s += WINDOW_S - 1
    assert grants.overdue() == []
    clock.now_s += 1
    assert grants.overdue() == [grant]


def test_a_site_that_is_gone_leaves_nothing_behind(clock: Clock) -> None:
    grants = table(clock)
    grants.ask(ask("a", 1))
    (grant,) = grants.admit()
    grants.ask(ask("a", 2))
    grants.ask(ask("b", 1))
    assert grants.withdraw_where(lambda ask: ask.site == "a") == [grant]
    assert sites(grants.admit()) == ["b"]
    grants.progress(grant.id, 5)
    assert grants.overdue() == []


def test_the_message_names_object_and_rate() -> None:
    subject = Subject(direction="up", run="run", task="train-3", attempt=2, payload="update")
    grant = Grant(id="g", ask=Ask(site="a", subject=subject, num_bytes=10, offset=4), min_bytes_per_s=5)
    key = control_pb2.TaskKey(run="run", task="train-3", attempt=2)
    assert grant.to_message() == control_pb2.Grant(
        grant="g", direction=control_pb2.UP, key=key, payload="update", offset=4, num_bytes=10, min_bytes_per_s=5
    )


def test_names_of_grants_cannot_be_guessed(clock: Clock) -> None:
    grants = GrantTable(1000, 0, clock, max_per_site=1000)
    for version in range(1000):
        grants.ask(ask("a", version, "up"))
    ids = {grant.id for grant in grants.admit()}
    assert len(ids) == 1000
    assert min(map(len, ids)) >= 24  # 18 bytes and more in base64: 144 bits


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 3), st.booleans()), max_size=40))
def test_limits_hold_and_every_wish_is_granted_in_the_end(wishes: list[tuple[str, int, bool]]) -> None:
    grants = table(Clock(), max_down=3, max_per_site=2)
    wanted = {(site, version) for site, version, _ in wishes}
    granted: set[tuple[str, int]] = set()
    for site, version, finish_one in wishes:
        grants.ask(ask(site, version))
        granted |= {(grant.ask.site, grant.ask.subject.version) for grant in grants.admit()}
        busy = sites(grants.active())
        assert len(busy) <= 3
        assert all(busy.count(one) <= 2 for one in busy)
        if finish_one:
            grants.finish(grants.active()[0].id)
    while active := grants.active():
        grants.finish(active[0].id)
        granted |= {(grant.ask.site, grant.ask.subject.version) for grant in grants.admit()}
    assert granted == wanted
