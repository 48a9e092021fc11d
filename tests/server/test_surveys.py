"""Runs that train nothing: what a site's answer must be, what people are told of them, and lists of payloads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from atoll.aggregation.reducers.append import Append
from atoll.aggregation.schedule import Committed, Joined, Ready
from atoll.aggregation.strategy import resolve
from atoll.server.events import RunEvent, ServerEvaluated, UpdateAccepted, decode_event, encode_event
from atoll.server.messages import task_message
from atoll.server.models import RunModels
from atoll.server.payload_rounds import PayloadRounds
from atoll.server.plan import plan_of
from atoll.server.round import Metrics, Round, Update
from atoll.server.run import advance, begin, replay
from atoll.server.run_state import CommitRound, EndRun, EvaluateHere, Outcome, RunAction, SendTask
from atoll.server.surveys import Survey, answer_of, pack_statistics
from atoll.wire import control_pb2 as pb
from atoll.wire import runs_pb2
from atoll.wire.errors import BadUpdate, ConfigError, RemoteError, TooLarge
from atoll.wire.job import Job, parse_job
from atoll.wire.model_file import open_model
from atoll.wire.payload_list import MAGIC, manifest_of, payloads_in

SITES = ("a", "b", "c")


def job(**tables: Any) -> Job:
    schedule = {"kind": "rounds", "min": 3, "quorum": 2}
    return parse_job({"job": {"name": "x", "app": "x", "rounds": 1}, "strategy": {"schedule": schedule}, **tables})


def result(**fields: Any) -> pb.Result:
    return pb.Result(key=pb.TaskKey(run="run", task="r1.a", attempt=1), round=1, **fields)


def told(name: str = "age", count: int = 20, **fields: Any) -> pb.FeatureStatistics:
    return pb.FeatureStatistics(**{"name": name, "count": count, "sum": 2.0 * count, "squares": 5.0, **fields})


def record_of(job_: Job, answers: dict[str, Metrics | pb.FeatureStatistics | None]) -> runs_pb2.RoundRecord:
    survey = Survey(job=job_, fewest=2, crc32=7, num_bytes=8)
    round_ = Round(number=1, base_version=0, asked=dict.fromkeys(answers, 1), max_weight=1)
    for site, answer in answers.items():
        metrics = answer if isinstance(answer, dict) else {}
        features = [answer] if isinstance(answer, pb.FeatureStatistics) else []
        packed = pack_statistics(result(statistics=features))
        update = Update(task=f"r1.{site}", attempt=1, weight=0, metrics=metrics, statistics=packed)
        round_ = round_.accepted(site, update)
    assert survey.lacks(round_) == ()
    record = runs_pb2.RoundRecord()
    survey.complete(record, round_.closed(tuple(sorted(answers))))
    return record


def test_a_metric_that_fewer_sites_sent_than_the_run_combines_is_not_told() -> None:
    answers: Any = {"a": {"accuracy": (3.0, 4.0), "recall": (1.0, 2.0)}, "b": {"accuracy": (1.0, 4.0)}, "c": {}}
    record = record_of(job(evaluation={"only": True}), answers)
    assert {name: (m.sum, m.count) for name, m in record.evaluate_metrics.items()} == {"accuracy": (4.0, 8.0)}
    assert not record.by_site
    record = record_of(job(evaluation={"only": True, "by_site": True}), answers)
    assert [(answer.site, set(answer.metrics)) for answer in record.by_site] == [
        ("a", {"accuracy", "recall"}), ("b", {"accuracy"}), ("c", set()),
    ]  # fmt: skip


def test_features_over_sites_and_of_each_where_the_job_says_so() -> None:
    answers: Any = {"a": told(), "b": told(count=30), "c": told("size")}
    record = record_of(job(statistics={}), answers)
    age, size = record.features
    assert (age.count, age.mean, age.num_sites, age.num_withheld) == (50, 2.0, 2, 1)
    assert (size.count, size.HasField("mean"), size.num_sites) == (0, False, 1)
    record = record_of(job(statistics={"by_site": True}), answers)
    assert [(a.site, [(f.name, f.count) for f in a.features]) for a in record.by_site] == [
        ("a", [("age", 20)]), ("b", [("age", 30)]), ("c", [("size", 20)]),
    ]  # fmt: skip


def test_sites_are_promised_what_people_are_shown() -> None:
    for tables, mixed in (
        ({"statistics": {}}, 2),
        ({"statistics": {"by_site": True}}, 1),
        ({"evaluation": {"only": True, "by_site": True}}, 1),
    ):
        assert Survey(job=job(**tables), fewest=2, crc32=0, num_bytes=0).mixed(2) == mixed


@pytest.mark.parametrize(
    ("tables", "answer", "kind", "words"),
    [
        ({"evaluation": {"only": True}}, result(statistics=[told()]), BadUpdate, "asks for no statistics"),
        ({}, result(statistics=[told()]), BadUpdate, "asks for no statistics"),
        ({"statistics": {}}, result(metrics={"a": pb.MetricSum(sum=1, count=1)}), BadUpdate, "statistics alone"),
        ({"statistics": {}}, result(statistics=[told(), told()]), BadUpdate, "each feature once"),
        ({"statistics": {}}, result(statistics=[told(count=0)]), BadUpdate, "count is not as wanted, 1 to"),
        ({"statistics": {"min_cell_count": 21}}, result(statistics=[told()]), BadUpdate, "21 to"),
        ({"statistics": {}}, result(statistics=[told(sum=float("nan"))]), BadUpdate, "finite"),
        ({"statistics": {}}, result(statistics=[told(stops=[1], counts=[20])]), BadUpdate, "a partition of 0 bins"),
        ({"statistics": {}}, result(statistics=[told(str(n)) for n in range(257)]), TooLarge, "257 features"),
    ],
)
def test_an_answer_that_is_none_is_refused_by_name(
    tables: dict[str, Any], answer: pb.Result, kind: type[RemoteError], words: str
) -> None:
    with pytest.raises(kind, match=words) as refused:
        answer_of(answer, job(**tables), site="a", run="run")
    assert (refused.value.site, refused.value.run, refused.value.round) == ("a", "run", 1)


# --- the state table ------------------------------------------------------------------------------------------------


def accepted(site: str, statistics: str = "") -> UpdateAccepted:
    return UpdateAccepted(
        task=f"r1.{site}", attempt=1, site=site, round=1, weight=0, metrics={"loss": (1.0, 2.0)}, statistics=statistics
    )


def run_through(job_: Job, *events: RunEvent) -> list[tuple[RunAction, ...]]:
    """What is to be done after each event; at each, a replay of the journal gives the same state."""
    plan, history, done = plan_of(job_), [], []
    state = begin(plan)
    joined = [Joined(site=site, max_weight=1, labels={}) for site in SITES]
    for event in (*joined, Ready(), *events):
        state, actions = advance(plan, state, event)
        history.append(decode_event(encode_event(event)))
        assert replay(plan, history) == state
        done.append(actions)
    return done


@pytest.mark.parametrize(
    "schedule",
    [
        {"kind": "buffered", "k": 1},
        {"kind": "cyclic"},
        {"kind": "every_steps", "steps": 4},
        {"kind": "hierarchical", "label": "region", "groups": ["north", "south"], "rounds": 1},
        {"kind": "gossip", "zone": "reef"},
    ],
    ids=lambda schedule: schedule["kind"],
)
@pytest.mark.parametrize(
    "tables", [{"statistics": {}}, {"evaluation": {"only": True}}], ids=["statistics", "evaluation"]
)
def test_what_trains_nothing_is_asked_in_one_round_of_all(tables: dict[str, Any], schedule: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="asks in one round; take rounds") as caught:
        resolve(job(**tables, strategy={"schedule": schedule}))
    assert (caught.value.key, caught.value.value) == ("strategy.schedule.kind", schedule["kind"])


def test_a_run_of_statistics_asks_once_commits_and_ends() -> None:
    packed = pack_statistics(result(statistics=[told()]))
    asking = job(statistics={})
    done = run_through(asking, *(accepted(site, packed) for site in SITES), Committed(round=1, version=0))
    sent = [action.task for action in done[3] if isinstance(action, SendTask)]
    state = begin(plan_of(asking))
    assert [task_message("run", task, state, "statistics").kind for task in sent] == [pb.STATISTICS] * 3
    [commit] = [action for action in done[-2] if isinstance(action, CommitRound)]
    assert [commit.round.updates[site].statistics for site in SITES] == [packed] * 3
    [end] = [action for action in done[-1] if isinstance(action, EndRun)]
    assert end.outcome is Outcome.FINISHED


def test_the_server_judges_the_same_model_after_the_sites() -> None:
    tables = {"evaluation": {"only": True, "server": True}}
    judged = ServerEvaluated(version=0, metrics={"loss": (1.0, 1.0)})
    done = run_through(job(**tables), *(accepted(site) for site in SITES), Committed(round=1, version=0), judged)
    assert [action for action in done[-2] if isinstance(action, EvaluateHere)] == [EvaluateHere(version=0)]
    assert not any(isinstance(action, SendTask | EndRun) for action in done[-2])
    assert any(isinstance(action, EndRun) for action in done[-1])


# --- lists of payloads ----------------------------------------------------------------------------------------------


def test_a_list_grows_by_what_the_sites_sent_and_a_restart_wants_it_again(tmp_path: Path) -> None:
    strategy = resolve(parse_job({"job": {"name": "x", "app": "x", "rounds": 2}, "strategy": {"kind": "bagging"}}))
    assert isinstance(strategy.reducer, Append)
    manifest = manifest_of(len(MAGIC))
    models = RunModels(tmp_path, "run", manifest)
    models.prepare()
    with models.create(0, {}) as out:
        out[:] = MAGIC
    parts: dict[str, Any] = {"run": "run", "strategy": strategy, "reducer": strategy.reducer, "manifest": manifest}
    round_ = Round(number=1, base_version=0, asked=dict.fromkeys(SITES, 1), max_weight=1)
    for site in SITES:
        round_ = round_.accepted(site, Update(task=f"r1.{site}", attempt=1, weight=1, metrics={}))
    before = PayloadRounds(**parts, models=models)
    before.fold(round_, "b", 1, memoryview(b"second"))
    assert before.lacks(round_) == ("a", "c")

    rounds = PayloadRounds(**parts, models=models)  # as after a restart
    rounds.open_round(round_)
    assert rounds.lacks(round_) == SITES
    with pytest.raises(TooLarge, match="payload of a, round 1, has 1048577 bytes") as refused:
        rounds.check(round_, "a", 1, memoryview(bytes((1 << 20) + 1)))
    assert refused.value.run == "run"
    for site, payload in (("c", b"third"), ("a", b"first"), ("b", b"second"), ("a", b"first")):
        rounds.check(round_, site, 1, memoryview(payload))
        rounds.fold(round_, site, 1, memoryview(payload))
    assert rounds.lacks(round_) == ()
    made = rounds.make_version(round_.closed(SITES), 0)
    assert rounds.make_version(round_.closed(SITES), 0) == made  # tried again, as when the disk was full
    with open_model(models.path(1)) as version:
        assert payloads_in(version.map) == [b"first", b"second", b"third"]
        assert version.num_bytes == made.num_bytes == models.outgoing(1).num_bytes
    rounds.drop(1)
    assert rounds.lacks(round_) == SITES
