"""Results that a run must not take: each is refused by name, with what it was and what was wanted."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from atoll.aggregation.schedule import Committed, Joined, Ready
from atoll.aggregation.schedules.rounds import Rounds
from atoll.server.events import RunEvent, StopAsked, UpdateAccepted
from atoll.server.run import advance, begin
from atoll.server.run_state import Plan, RunState
from atoll.server.validate import MAX_METRICS, Standing, standing_of
from atoll.wire import control_pb2 as pb
from atoll.wire.errors import BadUpdate, NotAllowed, RemoteError, Stale, TooLarge

UPDATE_BYTES = 100
MAX_WEIGHT = 50  # as the sites declared
PLAN = Plan(
    schedule=Rounds(Rounds.Options(min=2, fraction=0.5)),
    num_rounds=3,
    seed=1,
    evaluate_every=1,
    evaluate_at_sites=True,
    evaluate_at_server=False,
)


def after(*events: RunEvent) -> RunState:
    """A run of four sites, two of which are asked in each round, after `events`."""
    state = begin(PLAN)
    joined = [Joined(site=site, max_weight=MAX_WEIGHT, labels={}) for site in ("a", "b", "c", "d")]
    for event in (*joined, Ready(), *events):
        state, _ = advance(PLAN, state, event)
    return state


COHORT = sorted(task.site for task in after().tasks.values())
FIRST = COHORT[0]
OTHER = next(site for site in "abcd" if site not in COHORT)


def accepted(site: str) -> UpdateAccepted:
    return UpdateAccepted(task=f"r1.{site}", attempt=1, site=site, round=1, weight=7, metrics={})


def of_second_round() -> RunState:
    return after(*(accepted(site) for site in COHORT), Committed(round=1, version=1))


def result(site: str, *, round: int = 1, attempt: int = 1, **fields: Any) -> pb.Result:
    told: dict[str, Any] = {
        "key": pb.TaskKey(run="run", task=f"r{round}.{site}", attempt=attempt),
        "round": round,
        "weight": 7,
        "payloads": [pb.Payload(name="update", num_bytes=UPDATE_BYTES)],
    }
    return pb.Result(**(told | fields))


def standing(state: RunState, site: str, told: pb.Result) -> Standing:
    return standing_of(state, site, told, run="run", update_bytes=UPDATE_BYTES, partial_bytes=900)


def test_the_update_of_an_open_task_is_wanted() -> None:
    assert standing(after(), FIRST, result(FIRST)) is Standing.NEW


def test_the_same_update_twice_counts_once() -> None:
    once = after(accepted(FIRST))
    assert standing(once, FIRST, result(FIRST)) is Standing.KNOWN
    again, actions = advance(PLAN, once, accepted(FIRST))
    assert again is once
    assert actions == ()


def test_what_is_committed_or_of_an_ended_run_may_be_dropped() -> None:
    assert standing(of_second_round(), FIRST, result(FIRST)) is Standing.RELEASED
    assert standing(after(StopAsked(by="ada")), OTHER, result(OTHER)) is Standing.RELEASED


@pytest.mark.parametrize(
    ("site", "told", "kind", "words"),
    [
        (OTHER, result(OTHER), NotAllowed, "not in the cohort"),
        (OTHER, result(FIRST), NotAllowed, "given to another site"),
        (FIRST, result(FIRST, round=9), NotAllowed, "not in the cohort"),
        (FIRST, result(FIRST, attempt=2), Stale, r"another attempt .*attempt is 2, wanted 1"),
        (FIRST, result(FIRST, weight=0), BadUpdate, "weight is 0, wanted 1 to 50.*restart the site's agent"),
        (FIRST, result(FIRST, weight=MAX_WEIGHT + 1), BadUpdate, "weight is 51, wanted 1 to 50, as declared"),
        (FIRST, result(FIRST, payloads=[]), BadUpdate, "payloads is none, wanted update"),
        (FIRST, result(FIRST, payloads=[pb.Payload(name="model", num_bytes=100)]), BadUpdate, "payloads is model"),
        (FIRST, result(FIRST, payloads=[pb.Payload(name="update")] * 2), BadUpdate, "payloads is update, update"),
        (
            FIRST,
            result(FIRST, payloads=[pb.Payload(name="update", num_bytes=99)]),
            BadUpdate,
            "is 99, wanted 100.*install the server's version",
        ),
        (FIRST, result(FIRST, metrics={"loss": pb.MetricSum(sum=math.nan, count=1)}), BadUpdate, "'loss' is not"),
        (FIRST, result(FIRST, metrics={"loss": pb.MetricSum(sum=1, count=-1)}), BadUpdate, "count >= 0"),
        *(
            (
                FIRST,
                result(FIRST, metrics={"loss": pb.MetricSum(sum=1, count=1), name: pb.MetricSum(sum=1, count=1)}),
                BadUpdate,
                rf"metrics is '{shown}', wanted 1 to 64 printable characters\); have the app's metrics\(\) return such",
            )
            for name, shown in (
                ("", ""),
                ("m" * 65, "m" * 64),
                ("loss\n2026-01-01 INFO", r"loss\\n2026-01-01 INFO"),
                ("\x1b[2J", r"\\x1b\[2J"),
                ("\u202eloss", r"\\u202eloss"),
            )
        ),
        (
            FIRST,
            result(FIRST, metrics={f"m{i}": pb.MetricSum() for i in range(MAX_METRICS + 1)}),
            TooLarge,
            "257, wanted at most 256",
        ),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) and " " in value else "",
)
def test_what_cannot_be_taken_is_named(site: str, told: pb.Result, kind: type[RemoteError], words: str) -> None:
    state = after()
    with pytest.raises(kind, match=words) as refused:
        standing(state, site, told)
    assert (refused.value.site, refused.value.run, refused.value.round) == (site, "run", told.round)
    assert refused.value.field
    assert re.search(r"wanted .+\); (restart|nothing is|if this|install|have the app)", str(refused.value)), (
        "what to do"
    )


def test_an_update_for_an_old_round_is_stale() -> None:
    with pytest.raises(Stale, match=r"round 1 is closed .*wanted 2.*longer deadline"):
        standing(of_second_round(), OTHER, result(OTHER))


def negative(told: pb.Result) -> pb.Result:
    """The same with a weight of -1, as a peer that takes the field for a signed one writes it."""
    weight = pb.Result.DESCRIPTOR.fields_by_name["weight"].number
    return pb.Result.FromString(told.SerializeToString() + bytes([weight << 3, *[0xFF] * 9, 0x01]))


@pytest.mark.parametrize(
    "told",
    [
        result(FIRST, weight=0),
        negative(result(FIRST)),
        result(FIRST, weight=MAX_WEIGHT + 1),
        result(FIRST, weight=2**53 + 1),
        result(FIRST, weight=2**64 - 1),
    ],
    ids=lambda told: str(told.weight),
)
def test_a_weight_that_was_not_declared_is_refused(told: pb.Result) -> None:
    with pytest.raises(BadUpdate, match="1 to 50, as declared") as refused:
        standing(after(), FIRST, told)
    assert (refused.value.field, refused.value.value) == ("weight", str(told.weight))


def test_whatever_was_declared_no_weight_is_beyond_what_a_float64_counts() -> None:
    state = begin(PLAN)
    joined: list[RunEvent] = [Joined(site=site, max_weight=2**60, labels={}) for site in ("a", "b", "c", "d")]
    for event in (*joined, Ready()):
        state, _ = advance(PLAN, state, event)
    assert standing(state, FIRST, result(FIRST, weight=2**53)) is Standing.NEW
    with pytest.raises(BadUpdate, match="weight is"):
        standing(state, FIRST, result(FIRST, weight=2**53 + 1))


@pytest.mark.parametrize("count", [-1.0, -0.25, -5e-324, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("round_", ["open", "closed"])
def test_a_metric_over_an_impossible_count_is_refused(count: float, round_: str) -> None:
    """A count is the weight of a site's metric in the mean over all sites."""
    state = after() if round_ == "open" else of_second_round()
    told = result(FIRST, metrics={"loss": pb.MetricSum(sum=1.0, count=4.0), "auc": pb.MetricSum(sum=1.0, count=count)})
    with pytest.raises(BadUpdate, match="count >= 0") as refused:
        standing(state, FIRST, told)
    assert (refused.value.field, refused.value.value) == ("auc", f"1.0 / {count}")


@pytest.mark.parametrize("count", [0.0, 0.5, 1e300])
def test_a_count_may_be_zero_or_a_fraction(count: float) -> None:
    told = result(FIRST, metrics={"loss": pb.MetricSum(sum=-2.0, count=count)})
    assert standing(after(), FIRST, told) is Standing.NEW


@pytest.mark.parametrize("total", [math.nan, math.inf, -math.inf])
def test_a_metric_of_an_impossible_sum_is_refused(total: float) -> None:
    with pytest.raises(BadUpdate, match="'loss' is not a finite sum"):
        standing(after(), FIRST, result(FIRST, metrics={"loss": pb.MetricSum(sum=total, count=1)}))
