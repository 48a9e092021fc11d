"""Which site is asked to join which run."""

from __future__ import annotations

from atoll.server.offers import Offers, Wanted


def wanted(run: str, *members: str, only: tuple[str, ...] = ()) -> Wanted:
    return Wanted(run=run, only=frozenset(only), members=frozenset(members))


def test_each_site_is_asked_once() -> None:
    offers = Offers()
    assert offers.next({"a": 1, "b": 1}, [wanted("run-1")]) == [("run-1", "a"), ("run-1", "b")]
    assert offers.next({"a": 1, "b": 1}, [wanted("run-1")]) == []
    assert offers.is_pending("run-1")


def test_the_oldest_run_gets_the_free_places() -> None:
    offers = Offers()
    assert offers.next({"a": 1}, [wanted("run-1"), wanted("run-2")]) == [("run-1", "a")]
    assert not offers.is_pending("run-2")


def test_two_places_hold_two_runs() -> None:
    offers = Offers()
    runs = [wanted("run-1"), wanted("run-2"), wanted("run-3")]
    assert offers.next({"a": 2}, runs) == [("run-1", "a"), ("run-2", "a")]


def test_a_member_holds_its_place_until_the_run_ends() -> None:
    offers = Offers()
    assert offers.next({"a": 1}, [wanted("run-1", "a"), wanted("run-2")]) == []
    assert offers.next({"a": 1}, [wanted("run-2")]) == [("run-2", "a")]


def test_a_job_names_its_sites() -> None:
    offers = Offers()
    assert offers.next({"a": 1, "b": 1}, [wanted("run-1", only=("b",))]) == [("run-1", "b")]


def test_who_declined_is_not_asked_again_before_it_comes_back() -> None:
    offers = Offers()
    offers.next({"a": 1}, [wanted("run-1")])
    assert offers.is_asked("run-1", "a")
    offers.declined("run-1", "a", "app is not allowed")
    assert offers.next({"a": 1}, [wanted("run-1")]) == []
    offers.forget_site("a")
    assert offers.next({"a": 1}, [wanted("run-1")]) == [("run-1", "a")]


def test_an_answer_to_nothing_is_known_as_such() -> None:
    assert not Offers().is_asked("run-1", "a")


def test_a_place_is_held_until_the_site_is_a_member() -> None:
    offers = Offers()
    offers.next({"a": 1}, [wanted("run-1")])
    assert offers.next({"a": 1}, [wanted("run-1"), wanted("run-2")]) == []
    offers.settled("run-1", "a")
    assert offers.next({"a": 1}, [wanted("run-1", "a"), wanted("run-2")]) == []


def test_the_shortfall_names_everyone_who_is_missing_and_why() -> None:
    offers = Offers()
    offers.next({"a": 1, "b": 1, "c": 1}, [wanted("run-1")])
    offers.settled("run-1", "a")
    offers.declined("run-1", "b", "policy: app digits is not allowed")
    text = offers.shortfall(wanted("run-1", "a"), least=3, connected=["a", "b", "c"], known=["a", "b", "c", "d"])
    assert "1 of at least 3 joined (a)" in text
    assert "b declined (policy: app digits is not allowed)" in text
    assert "c has not answered" in text
    assert "d is not connected" in text
    assert text.endswith("Start the missing sites, or lower strategy.schedule.min")
