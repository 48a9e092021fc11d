"""What a server asks of a site that is a region: its declaration, its results, and the state of its run."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from contracts.updates import SMALL, encoded, random_state

from atoll.aggregation.partial import PARTIAL_HEADER_BYTES
from atoll.aggregation.schedule import Asked, Committed, Joined, Left, Ready, Withdrawn
from atoll.aggregation.strategy import Strategy, resolve
from atoll.server.events import (
    Delegated,
    EndedAbove,
    EvaluationAsked,
    RunEvent,
    SiteEvaluated,
    TaskLost,
    UpdateAccepted,
    decode_event,
    encode_event,
)
from atoll.server.messages import task_message
from atoll.server.models import RunModels
from atoll.server.pipeline import Pipeline
from atoll.server.plan import delegated_plan
from atoll.server.regions import is_region, joined_event, require_sessions
from atoll.server.round import Round, Update
from atoll.server.run import advance, begin, outstanding, replay
from atoll.server.run_state import (
    AnnounceCommit,
    CommitRound,
    EndRun,
    Outcome,
    Phase,
    RunAction,
    RunState,
    SendTask,
    WithdrawTask,
)
from atoll.server.sessions import Session
from atoll.server.validate import Standing, standing_of
from atoll.transport.hello import OF_A_SITE, OURS, make_hello
from atoll.wire import control_pb2 as pb
from atoll.wire.errors import BadUpdate, ConfigError, Malformed
from atoll.wire.job import Job, parse_job
from atoll.wire.manifest import Manifest
from atoll.wire.tensors import write_state

RUN = "01JDQ3T4V8Z6K1M2N3P4Q5R6S7"
MANIFEST = Manifest.build(SMALL)
DELEGATED = Delegated(min_sites=2, quorum=None, deadline_s=60.0)


def job(**strategy: Any) -> Job:
    return parse_job({"job": {"name": "trial", "app": "trial", "rounds": 3}, "strategy": strategy})


# --- declarations ---------------------------------------------------------------------------------------------------


def session(*, region: bool = True) -> Session:
    return Session("north", make_hello(pb.Capacity(runs_at_once=1), ours=OURS if region else OF_A_SITE))


def accept(max_weight: int, num_sites: int, sum_weights: int) -> pb.Accept:
    return pb.Accept(max_weight=max_weight, region=pb.Region(num_sites=num_sites, sum_weights=sum_weights))


def test_a_region_joins_with_its_sites_and_weights() -> None:
    assert is_region(session())
    assert not is_region(session(region=False))
    event = joined_event(session(), accept(30, 3, 70))
    assert (event.site, event.max_weight, event.num_sites, event.sum_weights) == ("north", 30, 3, 70)
    plain = joined_event(session(region=False), pb.Accept(max_weight=30))
    assert (plain.num_sites, plain.sum_weights) == (0, 0)
    assert decode_event(encode_event(event)) == event


def test_a_member_in_a_journal_of_before_is_a_site() -> None:
    old = b'{"event": "Joined", "labels": {}, "max_weight": 5, "site": "a"}'
    assert decode_event(old) == Joined(site="a", max_weight=5, labels={})


@pytest.mark.parametrize(
    ("declared", "field"),
    [
        (accept(30, 0, 70), "num_sites"),
        (accept(30, 2**32 + 1, 70), "num_sites"),
        (accept(2**53 + 1, 2, 2**53), "max_weight"),
        (accept(30, 3, 91), "sum_weights"),
        (accept(30, 3, 29), "sum_weights"),
        (accept(1, 3, 2), "sum_weights"),
        (accept(2**53, 3, 2**53 + 1), "sum_weights"),
        (pb.Accept(max_weight=30), "region"),
    ],
)
def test_what_a_region_cannot_be_is_refused(declared: pb.Accept, field: str) -> None:
    with pytest.raises(Malformed) as caught:
        joined_event(session(), declared)
    assert (caught.value.field, caught.value.site) == (field, "north")


@pytest.mark.parametrize("max_weight", [0, 2**53 + 1, 2**64 - 1])
def test_a_site_of_an_impossible_weight_takes_no_part(max_weight: int) -> None:
    """One that declared more than a sum can hold would end the round of all others."""
    joined_event(session(region=False), pb.Accept(max_weight=2**53))
    with pytest.raises(Malformed, match=r"wanted 1 to 9007199254740992; .*atoll doctor") as caught:
        joined_event(session(region=False), pb.Accept(max_weight=max_weight))
    assert (caught.value.field, caught.value.site, caught.value.value) == ("max_weight", "north", str(max_weight))


def test_a_site_that_never_said_so_is_no_region() -> None:
    with pytest.raises(Malformed, match="in only one of"):
        joined_event(session(region=False), accept(30, 3, 70))


# --- results --------------------------------------------------------------------------------------------------------


def result(weight: int = 50, name: str = "sum", num_bytes: int = 800) -> pb.Result:
    return pb.Result(
        key=pb.TaskKey(run=RUN, task="r1.north", attempt=1),
        round=1,
        weight=weight,
        payloads=[pb.Payload(name=name, num_bytes=num_bytes, crc32=1)],
    )


def upper_state() -> RunState:
    plan = delegated_plan(job(), DELEGATED)
    state = replay(
        plan,
        [
            Joined(site="north", max_weight=30, labels={}, num_sites=3, sum_weights=70),
            Joined(site="alone", max_weight=40, labels={}),
            Ready(),
            Asked(round=1, base_version=0, num_sites=9, max_weight=40),
        ],
    )
    assert state.rounds[1].regions == {"north": 3}
    return state


def test_the_sum_of_a_region_may_weigh_what_it_declared() -> None:
    standing = standing_of(upper_state(), "north", result(70), run=RUN, update_bytes=100, partial_bytes=800)
    assert standing is Standing.NEW


@pytest.mark.parametrize(
    ("hostile", "field"),
    [
        (result(weight=71), "weight"),
        (result(weight=0), "weight"),
        (result(name="update"), "payloads"),
        (result(num_bytes=100), "num_bytes"),
    ],
)
def test_a_result_that_is_none_of_a_region(hostile: pb.Result, field: str) -> None:
    with pytest.raises(BadUpdate) as caught:
        standing_of(upper_state(), "north", hostile, run=RUN, update_bytes=100, partial_bytes=800)
    assert caught.value.field == field


def test_a_site_sends_no_sums() -> None:
    theirs = result(30)
    theirs.key.task = "r1.alone"
    with pytest.raises(BadUpdate, match="payloads is sum, wanted update"):
        standing_of(upper_state(), "alone", theirs, run=RUN, update_bytes=100, partial_bytes=800)


def test_the_terms_of_the_sum_go_down_as_they_are() -> None:
    state = upper_state()
    task = state.tasks["r1.north"]
    message = task_message(RUN, task, state)
    assert (message.sum.num_sites, message.sum.max_weight) == (9, 40)


def test_the_sum_of_a_round_has_room_for_the_sites_of_its_regions() -> None:
    round_ = Round(number=1, base_version=0, asked={}, max_weight=1).extended(("a", "north"), 9, {"north": 3})
    assert (round_.num_sites, round_.max_weight) == (4, 9)


# --- sums -----------------------------------------------------------------------------------------------------------

WEIGHTS = {"site-1": 7, "site-2": 120, "site-3": 33, "site-4": 119}
REGIONS = {"north": ("site-1", "site-3"), "south": ("site-2", "site-4")}


class Sums:
    """Pipelines of one run at several servers."""

    def __init__(self, folder: Path, **strategy: Any) -> None:
        self.folder = folder
        self.strategy: Strategy = resolve(job(**strategy))
        self.base = random_state(MANIFEST, 0)

    def pipeline(self, name: str) -> Pipeline:
        models = RunModels(self.folder / name, RUN, MANIFEST)
        models.prepare()
        with models.create(0, {}) as out:
            write_state(MANIFEST, self.base, out)
        return Pipeline(run=RUN, strategy=self.strategy, seed=0, manifest=MANIFEST, models=models)

    def update(self, pipeline: Pipeline, site: str) -> bytes:
        return encoded(pipeline._layout, self.base, random_state(MANIFEST, WEIGHTS[site]), site=site)

    def round(self, members: Sequence[str], regions: dict[str, int], room: int = 0) -> Round:
        weights = WEIGHTS | {name: sum(WEIGHTS[site] for site in sites) for name, sites in REGIONS.items()}
        updates = {m: Update(task=f"r1.{m}", attempt=1, weight=weights[m], metrics={}) for m in members}
        return Round(
            number=1,
            base_version=0,
            asked=dict.fromkeys(members, 1),
            max_weight=max(WEIGHTS.values()),
            regions=regions,
            room=room,
            updates=updates,
            closing=tuple(members),
        )

    def partial(self, name: str) -> tuple[int, Path]:
        """Weight and file of a region's sum."""
        pipeline, round_ = self.pipeline(name), self.round(REGIONS[name], {}, room=len(WEIGHTS))
        pipeline.open_round(round_)
        for site in REGIONS[name]:
            self.add(pipeline, round_, site, memoryview(self.update(pipeline, site)), WEIGHTS[site])
        path = self.folder / f"{name}.sum"
        num_bytes, _ = pipeline.write_partial(round_, path)
        assert num_bytes == path.stat().st_size == pipeline.partial_bytes(1)
        return round_.sum_weights, path

    def add(self, pipeline: Pipeline, round_: Round, site: str, payload: memoryview, weight: int) -> None:
        pipeline.check(round_, site, weight, payload)
        pipeline.fold(round_, site, weight, payload)

    def flat(self) -> int:
        """The checksum of version 1 of a flat federation."""
        pipeline, round_ = self.pipeline("flat"), self.round(tuple(WEIGHTS), {})
        pipeline.open_round(round_)
        for site, weight in WEIGHTS.items():
            self.add(pipeline, round_, site, memoryview(self.update(pipeline, site)), weight)
        return pipeline.make_version(round_, 0).crc32


@pytest.mark.parametrize(
    "strategy",
    [{}, {"codec": {"kind": "int8"}}, {"kind": "fedadam", "buffers": "first"}, {"buffers": "local"}],
    ids=["fedavg", "int8", "fedadam-first", "local"],
)
def test_a_version_made_of_sums_is_that_of_the_updates(tmp_path: Path, strategy: dict[str, Any]) -> None:
    sums = Sums(tmp_path, **strategy)
    top, round_ = sums.pipeline("top"), sums.round(("south", "north"), {"north": 2, "south": 2})
    top.open_round(round_)
    assert top.lacks(round_) == ("north", "south")
    for name in ("south", "north"):
        weight, path = sums.partial(name)
        sums.add(top, round_, name, memoryview(path.read_bytes()), weight)
    assert top.lacks(round_) == ()
    assert top.make_version(round_, 0).crc32 == sums.flat()


def test_a_hostile_sum_names_region_run_and_round_and_changes_nothing(tmp_path: Path) -> None:
    sums = Sums(tmp_path)
    top, round_ = sums.pipeline("top"), sums.round(("north", "south"), {"north": 2, "south": 2})
    top.open_round(round_)
    weight, path = sums.partial("north")
    hostile = bytearray(path.read_bytes())
    struct.pack_into("<q", hostile, PARTIAL_HEADER_BYTES, 2**62)
    with pytest.raises(BadUpdate, match=r"update from north, round 1: partial sum: .* quanta") as caught:
        top.check(round_, "north", weight, memoryview(hostile))
    assert (caught.value.site, caught.value.run, caught.value.round) == ("north", RUN, 1)
    assert "north" in top.lacks(round_)


def test_a_round_that_is_asked_for_again_begins_a_new_sum(tmp_path: Path) -> None:
    sums = Sums(tmp_path)
    pipeline, first = sums.pipeline("north"), sums.round(REGIONS["north"], {}, room=4)
    pipeline.open_round(first)
    sums.add(pipeline, first, "site-1", memoryview(sums.update(pipeline, "site-1")), 7)
    pipeline.open_round(first)
    assert pipeline.lacks(first) == ("site-3",)
    again = Round(number=1, base_version=0, asked=first.asked, max_weight=first.max_weight, room=4)
    pipeline.open_round(again)
    assert pipeline.lacks(first) == ("site-1", "site-3")


# --- the run of a region --------------------------------------------------------------------------------------------


class Run:
    """A delegated run; after each event its journal replays to the same state."""

    def __init__(self) -> None:
        self.plan = delegated_plan(job(), DELEGATED)
        self.state = begin(self.plan)
        self.events: list[RunEvent] = []
        self.tell(DELEGATED)
        for site in ("b", "a"):
            self.tell(Joined(site=site, max_weight=100, labels={}))
        self.tell(Ready())

    def tell(self, event: RunEvent) -> tuple[RunAction, ...]:
        before = self.state
        self.state, actions = advance(self.plan, self.state, event)
        if self.state is not before:
            self.events.append(decode_event(encode_event(event)))
        assert replay(self.plan, self.events) == self.state
        return actions

    def ask(self, number: int = 1) -> list[tuple[str, int]]:
        actions = self.tell(Asked(round=number, base_version=number - 1, num_sites=4, max_weight=200))
        return [(a.task.task, a.task.attempt) for a in actions if isinstance(a, SendTask)]

    def accept(self, site: str, number: int = 1, attempt: int = 1) -> tuple[RunAction, ...]:
        task = f"r{number}.{site}"
        return self.tell(UpdateAccepted(task=task, attempt=attempt, site=site, round=number, weight=10, metrics={}))


def test_nothing_starts_until_it_is_asked_for() -> None:
    run = Run()
    assert run.state.phase is Phase.WAITING
    assert outstanding(run.plan, run.state) == ()
    assert run.ask() == [("r1.a", 1), ("r1.b", 1)]
    assert (run.state.rounds[1].num_sites, run.state.rounds[1].max_weight) == (4, 200)
    assert run.ask() == []


def test_a_round_closes_here_and_is_committed_above() -> None:
    run = Run()
    run.ask()
    run.accept("a")
    assert CommitRound in [type(action) for action in run.accept("b")]
    assert run.state.rounds[1].closing == ("a", "b")
    assert run.state.version == 0
    assert run.tell(Committed(round=1, version=1))[0] == AnnounceCommit(round=1, version=1)
    assert (run.state.version, dict(run.state.rounds), dict(run.state.tasks)) == (1, {}, {})
    assert run.ask(2) == [("r2.a", 1), ("r2.b", 1)]


def test_a_commit_without_this_region_is_handed_down_once() -> None:
    run = Run()
    run.ask()
    run.tell(Withdrawn(round=1, reason="closed"))
    assert run.tell(Committed(round=1, version=1))[0] == AnnounceCommit(round=1, version=1)
    assert run.tell(Committed(round=1, version=1)) == ()


def test_a_round_that_came_to_nothing_is_no_end_and_may_be_asked_for_again() -> None:
    run = Run()
    run.ask()
    actions = run.tell(TaskLost(task="r1.a", attempt=1, site="a", reason="out of memory"))
    assert actions == (), "b is still waited for"
    actions = run.tell(TaskLost(task="r1.b", attempt=1, site="b", reason="disk full"))
    assert dict(run.state.rounds) == {}
    assert "out of memory" in run.state.abandoned_reason
    assert run.state.phase is Phase.RUNNING
    assert run.ask() == [("r1.a", 2), ("r1.b", 2)]


def test_what_is_withdrawn_above_is_withdrawn_below() -> None:
    run = Run()
    run.ask()
    run.accept("a")
    actions = run.tell(Withdrawn(round=1, reason="round 1 is closed above"))
    assert [a.task.task for a in actions if isinstance(a, WithdrawTask)] == ["r1.b"]
    assert run.ask(2) == [("r2.a", 1), ("r2.b", 1)]


def test_an_evaluation_is_asked_for_once() -> None:
    run = Run()
    actions = run.tell(EvaluationAsked(version=1, round=1))
    assert [a.task.task for a in actions if isinstance(a, SendTask)] == ["e1.a", "e1.b"]
    assert run.tell(EvaluationAsked(version=1, round=1)) == ()
    run.tell(SiteEvaluated(task="e1.a", attempt=1, site="a", metrics={"accuracy": (9.0, 10.0)}))
    run.tell(Left(site="b", reason="gone"))
    assert dict(run.state.tasks) == {}
    assert run.state.evaluations[1].by_site == {"a": {"accuracy": (9.0, 10.0)}}


@pytest.mark.parametrize("outcome", ["finished", "failed", "stopped"])
def test_the_end_comes_from_above(outcome: str) -> None:
    run = Run()
    run.ask()
    actions = run.tell(EndedAbove(outcome=outcome, reason="" if outcome == "finished" else "as it is"))
    assert [a.outcome for a in actions if isinstance(a, EndRun)] == [Outcome(outcome)]
    assert run.state.phase is Phase.ENDED


def test_a_region_whose_rounds_may_be_smaller_than_a_masked_sum_declines() -> None:
    table = {"job": {"name": "a", "app": "a", "rounds": 1}, "privacy": {"secure_aggregation": {}}}
    manifest = Manifest.build([("w", "float32", (8,), "parameter")])
    require_sessions(parse_job(table), manifest, fewest=5)
    with pytest.raises(ConfigError, match=r"upstream\.min_sites .*close with 4 updates.*no sum of fewer than 5"):
        require_sessions(parse_job(table), manifest, fewest=4)
    integers = Manifest.build([("w", "float32", (8,), "parameter"), ("n", "int64", (), "buffer")])
    with pytest.raises(ConfigError, match="buffers = local"):
        require_sessions(parse_job(table), integers, fewest=5)
    del table["privacy"]
    require_sessions(parse_job(table), integers, fewest=1)
