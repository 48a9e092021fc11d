"""Random histories of every schedule, with a server that is killed at any moment: a replay goes on exactly.

Sites take their time, fail, leave, come back and lose updates. What a schedule must keep, whatever happens: one task a
site, terms of a sum that has something in it, results that may still be asked for, and an end that says why.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from atoll.aggregation import parts
from atoll.aggregation.parts import build
from atoll.aggregation.schedule import Committed, Joined, Left, Ready, TimerFired
from atoll.server.events import RunEvent, TaskLost, UpdateAccepted, decode_event, encode_event
from atoll.server.run import advance, begin, outstanding, replay
from atoll.server.run_state import (
    AnnounceCommit,
    CommitRound,
    Outcome,
    Plan,
    RunAction,
    RunState,
    SendTask,
    WithdrawTask,
)

SCHEDULES: dict[str, dict[str, Any]] = {
    "rounds": {"min": 2, "quorum": 1, "fraction": 0.5, "over": 1.5, "sample": "available"},
    "buffered": {"k": 2, "max_staleness": 3},
    "cyclic": {"order": "random"},
    "every_steps": {"steps": 6, "fragments": 3, "quorum": 2},
    "hierarchical": {
        "label": "region",
        "groups": ["north", "south"],
        "rounds": 2,
        "inner": {"kind": "rounds", "min": 1, "quorum": 1, "over": 2.0, "fraction": 0.5},
    },
}
NUM_ROUNDS = 6
SITES = {f"site-{number}": ("north", "south")[number % 2] for number in range(6)}


def test_every_schedule_is_here() -> None:
    beside = {"gossip"}  # whose models stay at the sites: test_gossip.py and tests/server/test_gossip_run.py
    assert SCHEDULES.keys() == parts.BUILT_IN["schedule"].keys() - beside


class World:
    """Sites, and the run that they make."""

    def __init__(self, kind: str, seed: int) -> None:
        self.random = random.Random(seed)
        self.plan = Plan(
            schedule=build("schedule", kind, SCHEDULES[kind]),
            num_rounds=NUM_ROUNDS,
            seed=seed,
            evaluate_every=1,
            evaluate_at_sites=False,
            evaluate_at_server=False,
        )
        self.state: RunState = begin(self.plan)
        self.journal: list[RunEvent] = []
        self.doing: dict[str, tuple[str, int]] = {}  # by site: task and attempt
        self.away: set[str] = set()
        self.terms: dict[tuple[int, int | None], tuple[int, int]] = {}  # of sums in which something is

    def tell(self, event: RunEvent) -> None:
        state, actions = advance(self.plan, self.state, event)
        if state is not self.state:
            self.journal.append(decode_event(encode_event(event)))
        self.state = state
        self._same_terms()
        for action in actions:
            self._do(action)
        for action in actions:
            if isinstance(action, CommitRound):
                self._commit()

    def _same_terms(self) -> None:
        for number, round_ in self.state.rounds.items():
            for branch in round_.sums:
                if round_.in_branch(branch):
                    terms = round_.terms_of(branch)
                    assert self.terms.setdefault((number, branch), terms) == terms
                    assert len(round_.in_branch(branch)) <= terms[0]

    def _do(self, action: RunAction) -> None:
        match action:
            case SendTask(task=task):
                known = self.doing.get(task.site)
                assert known is None or known[0] == task.task, f"{task.site} does {known} and is asked for {task}"
                self.doing[task.site] = (task.task, task.attempt)
                assert task.base_version <= self.state.version
            case WithdrawTask(task=task):
                assert self.doing.pop(task.site) == (task.task, task.attempt)
            case AnnounceCommit():
                for site in self.state.members:
                    upto = self.state.settled_upto(site)
                    assert all(t.site != site or t.given_in > upto for t in self.state.tasks.values())

    def _commit(self) -> None:
        round_ = self.state.first_closing()
        if round_ is None:
            return
        assert len(round_.closing) >= self.plan.schedule.fewest_updates
        if self.random.random() < 0.2:  # as after a restart: bytes are lacking, and one site has lost them
            site = self.random.choice(round_.closing)
            update = round_.updates[site]
            self.tell(TaskLost(task=update.task, attempt=update.attempt, site=site, reason="lost"))
            return
        self.tell(Committed(round=round_.number, version=self.state.version + 1))

    def killed(self) -> None:
        """What a server that comes back knows, and does again."""
        state = replay(self.plan, self.journal)
        assert state == self.state
        self.state = state
        open_tasks = {task.site: (task.task, task.attempt) for task in state.tasks.values()}
        for site, doing in self.doing.items():
            assert open_tasks.get(site) == doing
        for action in outstanding(self.plan, state):
            if isinstance(action, SendTask):
                self.doing[action.task.site] = (action.task.task, action.task.attempt)

    def step(self) -> None:
        luck = self.random.random()
        present = sorted(set(SITES) - self.away)
        if luck < 0.05:
            self.killed()
        elif luck < 0.12 and len(present) > 4:
            site = self.random.choice(present)
            self.away.add(site)
            self.tell(Left(site=site, reason="lease ran out"))
        elif luck < 0.3 and self.away:
            site = self.random.choice(sorted(self.away))
            self.away.discard(site)
            self.tell(self._joined(site))
        elif luck > 0.99 and self.state.timers:
            self.tell(TimerFired(name=self.random.choice(sorted(self.state.timers))))
        elif able := sorted(set(self.doing) - self.away):
            self._deliver(self.random.choice(able))
        elif self.away:
            self.tell(self._joined(site := self.random.choice(sorted(self.away))))
            self.away.discard(site)
        else:
            self.tell(TimerFired(name=self.random.choice(sorted(self.state.timers))))

    def _joined(self, site: str) -> Joined:
        return Joined(site=site, max_weight=10, labels={"region": SITES[site]})

    def _deliver(self, site: str) -> None:
        task, attempt = self.doing.pop(site)
        if self.random.random() < 0.03:
            self.tell(TaskLost(task=task, attempt=attempt, site=site, reason="out of memory"))
            return
        number = self.state.tasks[task].round
        self.tell(UpdateAccepted(task=task, attempt=attempt, site=site, round=number, weight=5, metrics={}))


@pytest.mark.parametrize("kind", SCHEDULES)
def test_whatever_happens_the_run_replays_and_comes_to_an_end(kind: str) -> None:
    outcomes: list[Outcome] = []
    for seed in range(40):
        world = World(kind, seed)
        for site in SITES:
            world.tell(world._joined(site))
        world.tell(Ready())
        for _ in range(400):
            if world.state.outcome is not Outcome.NONE:
                break
            world.step()
        assert world.state.outcome is not Outcome.NONE, f"seed {seed} hangs in {world.state}"
        assert (world.state.version == NUM_ROUNDS) == (world.state.outcome is Outcome.FINISHED)
        assert world.state.outcome is Outcome.FINISHED or world.state.reason
        assert replay(world.plan, world.journal) == world.state
        outcomes.append(world.state.outcome)
    assert outcomes.count(Outcome.FINISHED) > 10
