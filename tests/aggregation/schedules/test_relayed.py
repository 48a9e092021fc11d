"""The rounds of a region: only when asked, under the upper server's terms, and never the end of the run."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from samples.rounds import QUORUM_ADVICE

from atoll.aggregation.schedule import (
    Abandon,
    Accepted,
    Action,
    Asked,
    Cancel,
    Close,
    Committed,
    Dispatch,
    Event,
    Failed,
    Joined,
    Left,
    Ready,
    SetTimer,
    TimerFired,
    Withdrawn,
)
from atoll.aggregation.schedules.relayed import Relayed, RelayedState


class Region:
    def __init__(self, **options: object) -> None:
        self.schedule = Relayed(Relayed.Options.model_validate(options))
        self.state: RelayedState = self.schedule.init(num_rounds=3, seed=1)

    def tell(self, event: Event) -> Sequence[Action]:
        self.state, actions = self.schedule.on(self.state, event)
        return actions

    def join(self, *sites: str) -> None:
        for number, site in enumerate(sites, start=1):
            assert self.tell(Joined(site=site, max_weight=10 * number, labels={})) == ()
        assert self.tell(Ready()) == ()


def asked(round_: int = 1, version: int = 0) -> Asked:
    return Asked(round=round_, base_version=version, num_sites=7, max_weight=99)


def accepted(site: str, round_: int = 1) -> Accepted:
    return Accepted(site=site, round=round_, base_version=round_ - 1, weight=5)


def kinds(actions: Sequence[Action]) -> list[type]:
    return [type(action) for action in actions]


def test_what_is_declared_are_the_sites_at_ready_and_those_below_them() -> None:
    region = Region(min=2)
    region.tell(Joined(site="b", max_weight=20, labels={}))
    region.tell(Ready())
    assert not region.state.declared, "one is too few"
    region.tell(Joined(site="a", max_weight=30, labels={}, num_sites=3, sum_weights=70))
    region.tell(Ready())
    region.tell(Joined(site="c", max_weight=500, labels={}))
    region.tell(Ready())
    assert [member.site for member in region.state.declared] == ["a", "b"]
    assert (region.state.num_sites, region.state.max_weight, region.state.sum_weights) == (4, 30, 90)


def test_a_round_is_asked_for_closed_and_committed_by_the_upper_server() -> None:
    region = Region(min=2)
    region.join("b", "a")
    dispatch, timer = region.tell(asked())
    assert dispatch == Dispatch(round=1, base_version=0, sites=("a", "b"), max_weight=99, num_sites=7)
    assert isinstance(timer, SetTimer)
    assert region.tell(asked()) == (), "the same again changes nothing"
    assert region.tell(accepted("a")) == ()
    assert kinds(region.tell(accepted("b"))) == [SetTimer, Close]
    assert kinds(region.tell(Committed(round=1, version=1))) == [SetTimer]
    assert region.tell(Committed(round=1, version=1)) == ()
    dispatch, *_ = region.tell(asked(2, 1))
    assert isinstance(dispatch, Dispatch)
    assert (dispatch.round, dispatch.base_version) == (2, 1)


def test_an_update_that_is_lost_before_the_upper_commit_is_asked_for_again() -> None:
    region = Region(min=2)
    region.join("a", "b")
    region.tell(asked())
    region.tell(accepted("a"))
    region.tell(accepted("b"))
    dispatch, _ = region.tell(Failed(site="a", round=1, reason="disk replaced"))
    assert dispatch == Dispatch(round=1, base_version=0, sites=("a",), max_weight=99, num_sites=7)
    assert Close in kinds(region.tell(accepted("a")))


@pytest.mark.parametrize(
    "events",
    [
        [Failed(site="a", round=1, reason="out of memory"), Failed(site="b", round=1, reason="out of memory")],
        [accepted("b"), TimerFired(name="deadline/1")],
    ],
)
def test_a_round_without_its_quorum_is_abandoned_and_the_next_one_is_done(events: list[Event]) -> None:
    region = Region(min=2)
    region.join("a", "b")
    region.tell(asked())
    last = [region.tell(event) for event in events][-1][-1]
    assert isinstance(last, Abandon)
    assert "updates that it needs" in last.reason
    assert last.reason.endswith(QUORUM_ADVICE)
    assert isinstance(region.tell(asked(2, 1))[0], Dispatch)


def test_a_quorum_closes_at_the_deadline() -> None:
    region = Region(min=2, quorum=1)
    region.join("a", "b")
    region.tell(asked())
    region.tell(accepted("b"))
    actions = region.tell(TimerFired(name="deadline/1"))
    assert kinds(actions) == [SetTimer, Cancel, Close]
    assert actions[-1] == Close(round=1, sites=("b",))


def test_too_few_members_when_a_round_is_asked_for() -> None:
    region = Region(min=2)
    region.join("a", "b")
    region.tell(Left(site="a", reason="gone"))
    actions = region.tell(asked())
    assert isinstance(actions[-1], Abandon)
    assert "needs 2 sites, there are 1: b" in actions[-1].reason
    region.tell(Joined(site="a", max_weight=10, labels={}))
    assert isinstance(region.tell(asked(2, 1))[0], Dispatch)


def test_the_upper_server_may_withdraw_or_go_on_without_the_region() -> None:
    region = Region(min=2)
    region.join("a", "b")
    region.tell(asked())
    assert region.tell(Withdrawn(round=4, reason="another")) == ()
    assert region.tell(Withdrawn(round=1, reason="closed"))[-1] == Abandon(round=1, reason="closed")
    region.tell(asked())
    actions = region.tell(asked(2, 1))
    assert kinds(actions)[:4] == [SetTimer, Abandon, Dispatch, SetTimer]
