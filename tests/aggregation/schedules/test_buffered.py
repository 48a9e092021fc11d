"""Asynchronous rounds: who is asked, what is carried over, what is discounted, and when it ends."""

from __future__ import annotations

import dataclasses
import random
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
    Joined,
    Left,
    Ready,
    SetTimer,
    Stop,
    TimerFired,
)
from atoll.aggregation.schedules.buffered import Buffered, BufferedState
from atoll.server.events import RunEvent, TaskLost, UpdateAccepted, decode_event, encode_event
from atoll.server.run import advance, begin, replay
from atoll.server.run_state import AnnounceCommit, CommitRound, Outcome, Plan, RunState, SendTask, WithdrawTask
from atoll.wire.errors import ConfigError


def buffered(**options: Any) -> Buffered:
    made: Buffered = build("schedule", "buffered", options)
    return made


def joined(*sites: str, max_weight: int = 10) -> list[Event]:
    return [Joined(site=site, max_weight=max_weight, labels={}) for site in sites]


def accepted(site: str, round: int, base_version: int | None = None) -> Event:
    base = round - 1 if base_version is None else base_version
    return Accepted(site=site, round=round, base_version=base, weight=5)


def dispatch(round: int, *sites: str, carried: Sequence[str] = (), room: int = 3) -> Dispatch:
    return Dispatch(
        round=round, base_version=round - 1, sites=sites, max_weight=10, num_sites=room, carried=tuple(carried)
    )


def play(schedule: Buffered, events: Sequence[Event], *, num_rounds: int = 3) -> tuple[BufferedState, list[Action]]:
    """The last state, and what the last event led to, but for timers."""
    state = schedule.init(num_rounds=num_rounds, seed=0)
    actions: list[Action] = []
    for event in events:
        state, wanted = schedule.on(state, event)
        actions = [action for action in wanted if not isinstance(action, SetTimer)]
    return state, actions


START: list[Event] = [*joined("a", "b", "c"), Ready()]


def test_everybody_begins_at_once() -> None:
    _, actions = play(buffered(k=2), START)
    assert actions == [dispatch(1, "a", "b", "c")]


def test_the_first_k_close_the_round_and_the_others_go_on_in_the_next() -> None:
    events = [*START, accepted("c", 1), accepted("a", 1)]
    _, actions = play(buffered(k=2), events)
    assert actions == [Close(round=1, sites=("a", "c")), dispatch(2, carried=["b"])]
    _, actions = play(buffered(k=2), [*events, Committed(round=1, version=1)])
    assert actions == [dispatch(2, "a", "c")]


def test_a_carried_update_counts_in_the_round_that_is_open() -> None:
    events = [*START, accepted("c", 1), accepted("a", 1), Committed(round=1, version=1), accepted("b", 2, 0)]
    state, actions = play(buffered(k=2), events)
    assert (state.buffer, actions) == (("b",), [])
    _, actions = play(buffered(k=2), [*events, accepted("a", 2)])
    assert actions == [Close(round=2, sites=("a", "b")), dispatch(3, carried=["c"])]


def test_what_comes_while_a_round_is_being_closed_counts_in_the_next() -> None:
    events = [*joined("a", "b", "c", "d"), Ready(), accepted("a", 1), accepted("b", 1)]
    events += [accepted("c", 2, 0), accepted("d", 2, 0)]
    state, actions = play(buffered(k=2), events)
    assert (state.buffer, actions) == (("c", "d"), [])  # the next does not close before this one is committed
    _, actions = play(buffered(k=2), [*events, Committed(round=1, version=1)])
    # a and b begin with version 1, and are carried over at once: the buffer of round 2 is full already.
    close = Close(round=2, sites=("c", "d"))
    wanted = [dispatch(2, "a", "b", room=4), close, dispatch(3, carried=["a", "b"], room=4)]
    assert actions == wanted


def test_a_task_that_is_too_far_behind_is_taken_back() -> None:
    events = [*START, accepted("a", 1), Committed(round=1, version=1)]
    schedule = buffered(k=1, max_staleness=1)
    state, _ = play(schedule, events)
    assert {out.site for out in state.out} == {"a", "b", "c"}
    _, actions = play(schedule, [*events, accepted("a", 2)])
    late = Cancel(round=2, sites=("b", "c"), reason="it began more than 1 versions ago")
    assert actions == [late, Close(round=2, sites=("a",)), dispatch(3)]
    _, actions = play(schedule, [*events, accepted("a", 2), Committed(round=2, version=2)])
    assert actions == [dispatch(3, "a", "b", "c")]


def test_the_last_round_takes_back_what_is_out() -> None:
    events = [*START, accepted("a", 1)]
    _, actions = play(buffered(k=1), events, num_rounds=1)
    assert actions == [Cancel(round=1, sites=("b", "c"), reason="the run is over"), Close(round=1, sites=("a",))]
    _, actions = play(buffered(k=1), [*events, Committed(round=1, version=1)], num_rounds=1)
    assert actions == [Stop()]


def test_a_timer_that_was_set_anew_meanwhile_ends_nothing() -> None:
    """It may have waited behind whatever kept the run busy."""
    _, actions = play(buffered(k=2), [*START, accepted("a", 1), TimerFired(name="progress/1")])
    assert actions == []


def test_no_timer_runs_while_a_round_closes() -> None:
    schedule, state, armed = buffered(k=1), buffered(k=1).init(num_rounds=1, seed=0), set[str]()
    for event in [*START, accepted("a", 1)]:
        state, actions = schedule.on(state, event)
        for action in actions:
            if isinstance(action, SetTimer):
                (armed.add if action.after_s else armed.discard)(action.name)
    assert armed == set()


def test_who_joins_later_begins_with_the_newest_version() -> None:
    events = [*START, accepted("a", 1), accepted("b", 1), Committed(round=1, version=1), *joined("d")]
    _, actions = play(buffered(k=2), events)
    assert actions == [dispatch(2, "d", room=4)]


def test_nobody_joins_a_sum_that_has_begun_and_has_no_room() -> None:
    """The sum would begin anew, and what is in it be lost: who comes then begins with the next version."""
    events = [*START, accepted("a", 1), *joined("d"), *joined("e", max_weight=99)]
    state, actions = play(buffered(k=2), events)
    assert (state.room, state.max_weight, actions) == (3, 10, [])
    _, actions = play(buffered(k=2), [*events, accepted("b", 1)])
    wide = Dispatch(round=2, base_version=1, sites=(), max_weight=99, num_sites=5, carried=("c",))
    assert actions == [Close(round=1, sites=("a", "b")), wide]
    _, actions = play(buffered(k=2), [*events, accepted("b", 1), Committed(round=1, version=1)])
    assert actions == [Dispatch(round=2, base_version=1, sites=("a", "b", "d", "e"), max_weight=99, num_sites=5)]


def test_the_weight_of_a_site_that_left_with_its_task_still_fits() -> None:
    events = [*joined("a", max_weight=100), *joined("b", "c"), Ready(), Left(site="a", reason="lease ran out")]
    _, actions = play(buffered(k=2), [*events, accepted("b", 1), accepted("c", 1)])
    wanted = Dispatch(round=2, base_version=1, sites=(), max_weight=100, num_sites=3, carried=("a",))
    assert actions == [Close(round=1, sites=("b", "c")), wanted]


def test_a_site_that_failed_begins_anew_with_the_next_version() -> None:
    events = [*START, Failed(site="b", round=1, reason="out of memory"), accepted("a", 1), accepted("c", 1)]
    _, actions = play(buffered(k=2), [*events, Committed(round=1, version=1)])
    assert actions == [dispatch(2, "a", "b", "c")]


def test_a_run_that_cannot_go_on_says_who_is_missing() -> None:
    events = [*START, Failed(site="b", round=1, reason="out of memory"), Failed(site="c", round=1, reason="no disk")]
    _, actions = play(buffered(k=2), events)
    text = "round 1 has 0 of 2 updates and no more can come; missing: a (no update yet), b (out of memory), c (no disk)"
    advice = "; put right what keeps them and submit again, or lower k in the job's schedule"
    assert actions == [GiveUp(reason=text + advice)]


def test_a_run_in_which_nothing_comes_gives_up() -> None:
    _, actions = play(buffered(k=2), [*START, accepted("a", 1), TimerFired(name="progress/2")])
    text = "round 1 has 1 of 2 updates and nothing came for 600 s; missing: b (no update yet), c (no update yet)"
    advice = "; put right what keeps them and submit again, or raise deadline in the job's schedule"
    assert actions == [GiveUp(reason=text + advice)]


def test_too_few_to_begin_with() -> None:
    _, actions = play(buffered(k=2, min=4), START)
    (give_up,) = actions
    assert isinstance(give_up, GiveUp)
    assert "needs 4 sites, there are 3: a, b, c" in give_up.reason


def test_an_update_that_is_lost_while_its_round_closes_is_asked_for_again() -> None:
    """As after a restart of the server: the site does not have it any more."""
    events = [*START, accepted("a", 1), accepted("b", 1), Failed(site="b", round=1, reason="lost")]
    again = Dispatch(round=1, base_version=0, sites=("b",), max_weight=1)
    _, actions = play(buffered(k=2), events)
    assert actions == [again]
    _, actions = play(buffered(k=2), [*events, accepted("b", 1)])
    assert actions == [Close(round=1, sites=("a", "b"))]
    lost = Failed(site="b", round=1, reason="out of memory")
    _, actions = play(buffered(k=2), [*events, lost, lost])
    assert actions == [again]
    _, actions = play(buffered(k=2), [*events, lost, lost, lost])
    (give_up,) = actions
    assert isinstance(give_up, GiveUp)
    assert "round 1 lost the update of b" in give_up.reason
    assert give_up.reason.endswith("out of memory; put right what keeps it and submit again")


def test_a_closing_round_that_has_more_than_k_does_without_a_lost_one() -> None:
    events = [*joined("a", "b", "c"), Ready(), accepted("a", 1), accepted("b", 2, 0), accepted("c", 2, 0)]
    events += [Committed(round=1, version=1), Failed(site="c", round=2, reason="lost")]
    state, actions = play(buffered(k=1), events)
    assert actions == [Close(round=2, sites=("b",))]
    assert state.closing == ("b",)


def test_an_update_that_is_lost_in_the_open_round_is_asked_for_again() -> None:
    events = [*START, accepted("a", 1), Failed(site="a", round=1, reason="lost")]
    state, actions = play(buffered(k=2), events)
    assert (state.buffer, actions) == ((), [dispatch(1, "a")])


def test_the_discount() -> None:
    assert [buffered(k=1).discount(s) for s in (0, 3, 8)] == [1.0, 0.5, pytest.approx(1 / 3)]
    assert buffered(k=1, exponent=0.0).discount(7) == 1.0


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({}, "strategy.schedule.k"),
        ({"k": 0}, "strategy.schedule.k"),
        ({"k": 3, "min": 2}, "strategy.schedule"),
        ({"k": 1, "max_staleness": -1}, "strategy.schedule.max_staleness"),
        ({"k": 1, "exponent": -0.5}, "strategy.schedule.exponent"),
        ({"k": 1, "exponent": 1.5}, "strategy.schedule.exponent"),
        ({"k": 1, "deadline": 0}, "strategy.schedule.deadline"),
    ],
)
def test_bad_options_name_their_key(options: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        buffered(**options)
    assert caught.value.key == key


# --- with the state of a run ----------------------------------------------------------------------------------------


class World:
    """Sites that take their time, fail, leave, come back and lose updates at random; the run that they make."""

    def __init__(self, seed: int, *, k: int, num_rounds: int) -> None:
        self.random = random.Random(seed)
        self.max_staleness = self.random.choice([0, 1, 3, 50])
        schedule = buffered(k=k, min=k, max_staleness=self.max_staleness)
        self.plan = Plan(
            schedule=schedule,
            num_rounds=num_rounds,
            seed=0,
            evaluate_every=1,
            evaluate_at_sites=False,
            evaluate_at_server=False,
        )
        self.state: RunState = begin(self.plan)
        self.journal: list[RunEvent] = []
        self.doing: dict[str, tuple[str, int]] = {}  # by site: task and attempt
        self.versions = 0
        self.staleness: list[int] = []
        self.terms: dict[int, tuple[int, int]] = {}  # of rounds in whose sum something is
        self.late = [f"late-{number}" for number in range(3)]

    def tell(self, event: RunEvent) -> None:
        self.journal.append(decode_event(encode_event(event)))
        self.state, actions = advance(self.plan, self.state, event)
        for number, round_ in self.state.rounds.items():
            if round_.updates:  # a sum in which something is never begins anew on other terms
                assert self.terms.setdefault(number, (round_.num_sites, round_.max_weight)) == (
                    round_.num_sites,
                    round_.max_weight,
                )
                assert all(update.weight <= round_.max_weight for update in round_.updates.values())
        for action in actions:
            match action:
                case SendTask(task=task):
                    assert task.site not in self.doing, f"{task.site} has {self.doing} and is asked for {task}"
                    self.doing[task.site] = (task.task, task.attempt)
                case WithdrawTask(task=task):
                    assert self.doing.pop(task.site) == (task.task, task.attempt)
                case AnnounceCommit(version=version):
                    assert version == self.versions + 1
                    self.versions = version
                    self._still_needed()
        for action in actions:
            if isinstance(action, CommitRound):
                self._commit(action.round.number)

    def _commit(self, number: int) -> None:
        round_ = self.state.rounds[number]
        self.staleness += [round_.staleness(site) for site in round_.closing]
        if self.random.random() < 0.2:  # as after a restart: bytes are lacking, and one site has lost them
            site = self.random.choice(round_.closing)
            update = round_.updates[site]
            self.tell(TaskLost(task=update.task, attempt=update.attempt, site=site, reason="lost"))
            return
        assert self.plan.schedule.fewest_updates <= len(round_.closing) <= round_.num_sites
        self.tell(Committed(round=number, version=self.state.version + 1))

    def _still_needed(self) -> None:
        """No site is told to drop a result that may still be asked of it."""
        for site in self.state.members:
            upto = self.state.settled_upto(site)
            for task in self.state.tasks.values():
                assert task.site != site or task.given_in > upto
            for round_ in self.state.rounds.values():
                if (update := round_.updates.get(site)) is not None:
                    assert (update.dispatched or round_.number) > upto

    def step(self) -> None:
        if not self.doing:
            (name,) = self.state.timers
            self.tell(TimerFired(name=name))
            return
        site = self.random.choice(sorted(self.doing))
        task, attempt = self.doing[site]
        luck = self.random.random()
        if luck < 0.04 and len(self.state.members) > 4:
            self.tell(Left(site=site, reason="lease ran out"))
        elif luck < 0.08:
            del self.doing[site]
            self.tell(TaskLost(task=task, attempt=attempt, site=site, reason="out of memory"))
        else:
            del self.doing[site]
            self.tell(
                UpdateAccepted(task=task, attempt=attempt, site=site, round=0, weight=1, metrics={"loss": (1.0, 1.0)})
            )
        if self.late and self.random.random() < 0.1:
            self.tell(Joined(site=self.late.pop(), max_weight=self.random.choice([5, 10, 40]), labels={}))
        for gone in sorted(self.state.former):
            if self.random.random() < 0.5:
                self.tell(self.state.former[gone])


@pytest.mark.parametrize("seed", range(200))
def test_whatever_happens_the_run_ends_and_replays(seed: int) -> None:
    world = World(seed, k=seed % 4 + 1, num_rounds=seed % 7 + 1)
    for number in range(6):
        world.tell(Joined(site=f"s{number}", max_weight=10, labels={}))
    world.tell(Ready())
    for _ in range(1000):
        if world.state.outcome is not Outcome.NONE:
            break
        world.step()
    assert world.state.outcome in (Outcome.FINISHED, Outcome.FAILED)
    if world.state.outcome is Outcome.FINISHED:
        assert world.versions == world.plan.num_rounds
    else:
        assert "missing" in world.state.reason or "lost" in world.state.reason
    assert replay(world.plan, world.journal) == world.state
    assert all(0 <= staleness <= world.max_staleness for staleness in world.staleness)


def test_stale_updates_do_occur_in_those_histories() -> None:
    seen: set[int] = set()
    finished = 0
    for seed in range(0, 200, 5):
        world = World(seed, k=2, num_rounds=6)
        for number in range(6):
            world.tell(Joined(site=f"s{number}", max_weight=10, labels={}))
        world.tell(Ready())
        for _ in range(1000):
            if world.state.outcome is not Outcome.NONE:
                break
            world.step()
        seen |= set(world.staleness)
        finished += world.state.outcome is Outcome.FINISHED
    assert {0, 1, 2} <= seen
    assert finished > 20


def test_states_are_plain_values() -> None:
    state, _ = play(buffered(k=2), START)
    assert dataclasses.replace(state) == state
