"""The schedule of gossip as a table: what it is told, what it wants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from atoll.aggregation.parts import build
from atoll.aggregation.schedule import (
    Accepted,
    Action,
    Cancel,
    Close,
    Committed,
    Dispatch,
    Event,
    Failed,
    GiveUp,
    GossipEvent,
    Introduce,
    Joined,
    Left,
    Met,
    ModelLost,
    Ready,
    SetTimer,
    Stop,
    TimerFired,
    Trained,
    TrainOwn,
)
from atoll.aggregation.schedules.gossip import Gossip, GossipState, Phase
from atoll.aggregation.schedules.links import Way
from atoll.wire.errors import ConfigError

SITES = ("a", "b", "c", "d")
THIRD = 1 / 3


def gossip(**options: Any) -> Gossip:
    made: Gossip = build("schedule", "gossip", {"zone": "reef", **options})
    return made


def joined(*sites: str, zone: str = "reef") -> list[Event | GossipEvent]:
    return [Joined(site=site, max_weight=10, labels={"zone": zone}) for site in sites]


def trained(*sites: str, round: int = 1) -> list[Event | GossipEvent]:
    return [Trained(site=site, round=round) for site in sites]


def met(*pairs: str, round: int = 1) -> list[Event | GossipEvent]:
    """Both ends of each pair, such as "ab", hold the other's model."""
    ends = [(pair[0], pair[1]) for pair in pairs] + [(pair[1], pair[0]) for pair in pairs]
    return [Met(site=site, peer=peer, round=round, received=True) for site, peer in ends]


def unreachable(site: str, peer: str, tried: int = 0) -> Met:
    return Met(site=site, peer=peer, round=1, received=False, reason="refused", tried=tried)


def fired(name: str) -> TimerFired:
    return TimerFired(name=name)


def accepted(*sites: str, round: int = 1) -> list[Event | GossipEvent]:
    return [Accepted(site=site, round=round, base_version=0, weight=1) for site in sites]


def play(
    schedule: Gossip, events: Sequence[Event | GossipEvent], *, num_rounds: int = 2
) -> tuple[GossipState, list[Action]]:
    """The last state, and what the last event led to."""
    state, actions = schedule.init(num_rounds=num_rounds, seed=0), []
    for event in events:
        state, wanted = schedule.on(state, event)
        actions = list(wanted)
    return state, actions


BEGUN = [*joined(*SITES), Ready()]
RING = ("ab", "bc", "cd", "ad")


def test_members_of_the_zone_train_from_version_0() -> None:
    state, actions = play(gossip(), [*joined(*SITES), *joined("e", zone="other"), Ready()])
    assert state.members == SITES
    assert actions == [
        TrainOwn(round=1, base_version=0, sites=SITES),
        SetTimer(name="training/1", after_s=600.0),
    ]


def test_when_all_have_trained_neighbours_are_introduced() -> None:
    state, actions = play(gossip(), [*BEGUN, *trained(*SITES)])
    assert actions == [
        SetTimer(name="training/1", after_s=0),
        SetTimer(name="exchanging/1", after_s=600.0),
        Introduce(round=1),
    ]
    assert [link.pair for link in state.links] == [("a", "b"), ("a", "d"), ("b", "c"), ("c", "d")]
    assert {link.caller for link in state.links} == {"a", "b", "c"}


def test_a_round_without_a_version_goes_over_into_the_next() -> None:
    state, actions = play(gossip(), [*BEGUN, *trained(*SITES), *met(*RING)])
    assert actions == [
        SetTimer(name="exchanging/1", after_s=0),
        TrainOwn(round=2, base_version=0, sites=SITES),
        SetTimer(name="training/2", after_s=600.0),
    ]
    start = state.start_of("b")
    assert start is not None
    assert (start.round, start.shares) == (1, (("a", THIRD), ("b", THIRD), ("c", THIRD)))


def test_the_last_round_gives_a_version_and_then_the_run_is_over() -> None:
    events = [*BEGUN, *trained(*SITES), *met(*RING)]
    state, actions = play(gossip(), events, num_rounds=1)
    assert actions[1] == Dispatch(round=1, base_version=0, sites=SITES, max_weight=1)
    state, actions = play(gossip(), [*events, *accepted(*SITES)], num_rounds=1)
    assert actions == [SetTimer(name="collecting/1", after_s=0), Close(round=1, sites=SITES)]
    state, actions = play(gossip(), [*events, *accepted(*SITES), Committed(round=1, version=1)], num_rounds=1)
    assert actions == [Stop()]
    assert state.phase is Phase.OVER


def test_every_says_after_which_rounds_there_is_a_version() -> None:
    state, _ = play(gossip(every=1), [*BEGUN, *trained(*SITES), *met(*RING)])
    assert state.phase is Phase.COLLECTING
    committed = [*accepted(*SITES), Committed(round=1, version=1)]
    state, actions = play(gossip(every=1), [*BEGUN, *trained(*SITES), *met(*RING), *committed])
    assert actions[0] == TrainOwn(round=2, base_version=1, sites=SITES)
    assert all(state.start_of(site) is not None for site in SITES), "sites go on from their own models"


def test_a_pair_that_does_not_meet_by_the_deadline_does_not_mix_at_either_end() -> None:
    half = Met(site="a", peer="b", round=1, received=True)
    state, _ = play(gossip(), [*BEGUN, *trained(*SITES), *met("bc", "cd", "ad"), half, fired("exchanging/1")])
    starts = {site: state.start_of(site) for site in SITES}
    assert {site: tuple(name for name, _ in start.shares) for site, start in starts.items() if start} == {
        "a": ("a", "d"),
        "b": ("b", "c"),
        "c": ("b", "c", "d"),
        "d": ("a", "c", "d"),
    }


def test_ways_are_tried_in_order_and_remembered() -> None:
    events = [*BEGUN, *trained(*SITES), unreachable("a", "b")]
    state, actions = play(gossip(), events)
    assert actions == [Introduce(round=1)]
    assert state.links[0].caller == "b"
    state, _ = play(gossip(), [*events, unreachable("a", "b")])
    assert state.links[0].caller == "b", "only the caller knows"
    state, actions = play(gossip(), [*events, unreachable("b", "a", 1)])
    assert actions == [Introduce(round=1)]
    assert (state.links[0].tried.way, state.links[0].tried.reasons) == (
        Way.RELAY,
        ("a to b: refused", "b to a: refused"),
    )
    later = [*events, unreachable("b", "a", 1), *met(*RING), *trained(*SITES, round=2)]
    state, _ = play(gossip(), later)
    assert [link.tried.way for link in state.links] == [Way.RELAY, *[Way.FIRST_CALLS] * 3]
    state, _ = play(gossip(), [*events, unreachable("b", "a", 1), *met(*RING), *joined("b"), *trained(*SITES, round=2)])
    assert {link.tried.way for link in state.links} == {Way.FIRST_CALLS}, "it may have moved"


def test_a_report_of_a_way_that_was_given_up_is_void() -> None:
    """A caller that is introduced twice reports twice; the second report may come when the server relays already."""
    events = [*BEGUN, *trained(*SITES), unreachable("a", "b"), unreachable("b", "a", 1)]
    before, _ = play(gossip(), events)
    for late in (unreachable("a", "b"), unreachable("b", "a", 1)):
        assert play(gossip(), [*events, late])[0] == before


def test_where_the_relay_fails_too_the_pair_is_over() -> None:
    events = [unreachable("a", "b"), unreachable("b", "a", 1), unreachable("a", "b", 2), *met("bc", "cd", "ad")]
    state, _ = play(gossip(), [*BEGUN, *trained(*SITES), *events])
    assert state.round == 2
    start = state.start_of("a")
    assert start is not None
    assert [site for site, _ in start.shares] == ["a", "d"]


def test_the_graph_is_drawn_over_those_that_trained() -> None:
    state, actions = play(gossip(), [*BEGUN, *trained("a", "b", "c"), fired("training/1")])
    assert [link.pair for link in state.links] == [("a", "b"), ("a", "c"), ("b", "c")]
    assert Cancel(round=1, sites=("d",), reason="round 1 goes on with 3 sites") in actions


def test_a_late_site_goes_on_from_what_it_had() -> None:
    first = [*BEGUN, *trained(*SITES), *met(*RING)]
    second = [*trained("a", "b", "c", round=2), fired("training/2"), *met("ab", "ac", "bc", round=2)]
    state, actions = play(gossip(), [*first, *second], num_rounds=3)
    assert actions[1] == TrainOwn(round=3, base_version=0, sites=SITES)
    starts = {site: state.start_of(site) for site in SITES}
    assert {site: start.round for site, start in starts.items() if start} == {"a": 2, "b": 2, "c": 2, "d": 1}


def test_too_few_trained_models_end_the_run_and_name_who_is_missing() -> None:
    failed = Failed(site="d", round=1, reason="out of memory")
    state, actions = play(gossip(min=4), [*BEGUN, *trained("a", "b", "c"), failed])
    assert isinstance(actions[0], GiveUp)
    assert "d: failed (out of memory)" in actions[0].reason
    assert "lower min" in actions[0].reason
    assert state.phase is Phase.OVER


def test_a_site_that_left_is_waited_for_while_it_is_needed() -> None:
    gone = [*BEGUN, *trained("a", "b", "c"), Left(site="d", reason="silent")]
    state, _ = play(gossip(min=4), gone)
    assert state.phase is Phase.TRAINING
    state, _ = play(gossip(min=4), [*gone, *joined("d"), *trained("d")])
    assert state.phase is Phase.EXCHANGING
    state, _ = play(gossip(min=3), gone)
    assert state.phase is Phase.EXCHANGING


def test_a_site_that_leaves_in_the_exchange_keeps_nobody_waiting() -> None:
    left = Left(site="d", reason="silent")
    state, _ = play(gossip(), [*BEGUN, *trained(*SITES), *met("ab", "bc"), left])
    assert state.round == 2
    assert state.members == ("a", "b", "c")


def test_a_model_that_is_lost_in_the_exchange_is_mixed_by_nobody() -> None:
    lost = ModelLost(site="d", round=1, reason="disk")
    state, _ = play(gossip(), [*BEGUN, *trained(*SITES), *met("ab", "bc", "cd"), lost])
    assert state.round == 2
    assert state.start_of("d") is None
    start = state.start_of("c")
    assert start is not None
    assert [site for site, _ in start.shares] == ["b", "c"]


def test_a_lost_update_is_asked_for_again() -> None:
    events = [*BEGUN, *trained(*SITES), *met(*RING), *accepted(*SITES)]
    again = Failed(site="b", round=1, reason="lost")
    state, actions = play(gossip(), [*events, again], num_rounds=1)
    assert actions == [
        Dispatch(round=1, base_version=0, sites=("b",), max_weight=1),
        SetTimer(name="collecting/1", after_s=600.0),
    ]
    assert state.phase is Phase.COLLECTING


def test_too_few_members_between_rounds_are_waited_for_once() -> None:
    events = [*BEGUN, *trained(*SITES), *(Left(site=site, reason="silent") for site in "bcd")]
    state, actions = play(gossip(), events)
    assert state.phase is Phase.GATHERING
    assert actions[-1] == SetTimer(name="members/2", after_s=600.0)
    state, actions = play(gossip(), [*events, *joined("c")])
    assert state.phase is Phase.TRAINING
    state, actions = play(gossip(), [*events, fired("members/2")])
    assert isinstance(actions[0], GiveUp)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"zone": ""}, "strategy.schedule.zone"),
        ({"graph": "star"}, "strategy.schedule.graph"),
        ({"graph": []}, "strategy.schedule.graph"),
        ({"graph": [["a", "a"]]}, "a is paired with itself"),
        ({"every": 0}, "strategy.schedule.every"),
        ({"min": 1}, "strategy.schedule.min"),
        ({"deadline": 0}, "strategy.schedule.deadline"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        gossip(**options)


def test_a_zone_has_to_be_said() -> None:
    with pytest.raises(ConfigError, match=r"strategy\.schedule\.zone is missing"):
        build("schedule", "gossip", {})
