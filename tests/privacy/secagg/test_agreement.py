"""The plan that both ends work out, and the lane of exact numbers."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.privacy.secagg.agreement import (
    FACTOR_UNIT,
    Counted,
    Opening,
    Own,
    Terms,
    agree,
    counted_factor,
    counters,
    read_counters,
)
from atoll.wire.errors import BadUpdate, ConfigError, Malformed, NotAllowed, Stale
from atoll.wire.job import parse_job
from atoll.wire.members_pb2 import ACTIVE, REVOKED, Member, MemberList

RUN = "01JDQ3T4V8Z6K1M2N3P4Q5R6S7"
SITES = tuple(f"site-{number}" for number in range(5))


def own(num_values: int = 100, version: int = 3, revoked: str = "", **terms: Any) -> Own:
    members = [
        Member(site=site, organisation=f"of {site}", signing_key=bytes([number]) * 32, status=ACTIVE)
        for number, site in enumerate((*SITES, "site-9"))
    ]
    for member in members:
        if member.site == revoked:
            member.status = REVOKED
    return Own(
        job=parse_job({"job": {"name": "a", "app": "a", "rounds": 3}, "privacy": {"secure_aggregation": terms}}),
        app_hash="ab" * 32,
        schema_hash="cd" * 32,
        num_values=num_values,
        members=MemberList(federation="reef", version=version, members=members),
    )


def opening(**changed: Any) -> Opening:
    fields: dict[str, Any] = {
        "run": RUN,
        "round": 7,
        "session": 1,
        "sites": SITES,
        "member_list_version": 3,
        "max_weight": 600,
        "base_version": 6,
        "bases": {"site-2": 4},
        "digests": {4: "04" * 32, 6: "06" * 32},
    }
    return Opening(**{**fields, **changed})


def terms(**changed: Any) -> Terms:
    return agree(opening(), own(**changed))


def test_what_travels_is_read_as_it_was() -> None:
    assert Opening.decode(opening().canonical()) == opening()
    assert (opening().base_of("site-2"), opening().staleness("site-2"), opening().staleness("site-0")) == (4, 2, 0)


@pytest.mark.parametrize(
    "changed",
    [
        {"sites": SITES[::-1]},
        {"sites": (*SITES, SITES[-1])},
        {"bases": {"site-9": 4}},
        {"bases": {"site-2": 6}},
        {"digests": {6: "06" * 32}},
        {"digests": {4: "04" * 32, 5: "05" * 32, 6: "06" * 32}},
        {"digests": {4: "04", 6: "06" * 32}},
        {"session": 0},
        {"max_weight": 0},
    ],
)
def test_an_opening_that_does_not_hold_together_is_refused(changed: dict[str, Any]) -> None:
    table = {**json.loads(opening().canonical()), **changed}
    with pytest.raises(Malformed):
        Opening.decode(json.dumps(table, sort_keys=True, separators=(",", ":")).encode())


@given(st.binary(max_size=200))
def test_bytes_that_are_no_opening_are_malformed(data: bytes) -> None:
    with pytest.raises(Malformed):
        Opening.decode(data)


def test_another_encoding_of_the_same_is_refused() -> None:
    with pytest.raises(Malformed):
        Opening.decode(opening().canonical() + b" ")


def test_both_ends_come_to_the_same_plan() -> None:
    assert agree(Opening.decode(opening().canonical()), own()).plan.hash == terms().plan.hash


@pytest.mark.parametrize(
    "changed",
    [
        {"round": 8},
        {"session": 2},
        {"sites": (*SITES, "site-9")},
        {"max_weight": 601},
        {"bases": {}, "digests": {6: "06" * 32}},
        {"digests": {4: "05" * 32, 6: "06" * 32}},
        {"run": RUN[:-1] + "8"},
    ],
)
def test_whatever_differs_of_the_opening_gives_another_plan(changed: dict[str, Any]) -> None:
    assert agree(opening(**changed), own()).plan.hash != terms().plan.hash


def test_whatever_differs_of_what_an_end_has_gives_another_plan() -> None:
    hashes = {
        terms().plan.hash,
        terms(num_values=101).plan.hash,
        terms(threat="semi-honest").plan.hash,
        terms(bound=4.0).plan.hash,
        terms(fewest_survivors=4).plan.hash,
        terms(metrics=["accuracy"]).plan.hash,
    }
    assert len(hashes) == 6


def test_a_member_list_of_another_version_or_without_a_site_is_refused() -> None:
    with pytest.raises(Stale):
        terms(version=4)
    with pytest.raises(NotAllowed, match="site-3"):
        terms(revoked="site-3")


def test_terms_that_hold_for_no_cohort_of_this_size_are_refused() -> None:
    with pytest.raises(ConfigError, match="shares are needed"):
        terms(corrupt=0.9)
    with pytest.raises(ConfigError, match="at least 6 sites"):
        terms(fewest_survivors=6)
    plain = parse_job({"job": {"name": "a", "app": "a", "rounds": 3}})
    with pytest.raises(ConfigError, match=r"\[privacy\]"):
        agree(opening(), replace(own(), job=plain))


METRICS = {"loss": (12.5, 8.0), "accuracy": (-3.0, 4.0)}


def test_exact_numbers_come_through_a_sum() -> None:
    found = terms(metrics=["accuracy", "loss", "other"], clipped=0.05)
    rows = [counters(found, weight, METRICS, clipped=2, site="site-0") for weight in (1, 600, 7)]
    total = [sum(column) % 2**64 for column in zip(*rows, strict=True)]
    assert read_counters(found, total) == Counted(
        weight=608, clipped=6, metrics={"accuracy": (-9.0, 12.0), "loss": (37.5, 24.0)}
    )


@pytest.mark.parametrize(
    ("weight", "clipped", "loss"),
    [(0, 0, 1.0), (601, 0, 1.0), (1, 6, 1.0), (1, -1, 1.0), (1, 0, float("nan")), (1, 0, 2.0**41), (1, 0, -(2.0**41))],
)
def test_numbers_out_of_bounds_are_an_error_at_the_site(weight: int, clipped: int, loss: float) -> None:
    with pytest.raises(BadUpdate, match="site-0"):
        counters(terms(clipped=0.05), weight, {"loss": (loss, 1.0)}, clipped=clipped, site="site-0")


@pytest.mark.parametrize("lane", [[2, 0, 0, 0], [3001, 0, 0, 0], [5, 1, 0, 0], [5, 2**64 - 1, 0, 0]])
def test_a_sum_that_no_such_inputs_make_is_refused(lane: list[int]) -> None:
    with pytest.raises(BadUpdate):
        read_counters(terms(), lane)


def test_the_quantum_is_that_of_the_scale() -> None:
    assert terms().scale * terms().quantum == pytest.approx(1)
    assert terms(bound=2.0).quantum * 4 == terms().quantum
    assert terms(bits=16).quantum > terms().quantum


def test_factors_stand_after_the_metrics_and_change_the_plan() -> None:
    plain = agree(opening(), own())
    found = agree(opening(), replace(own(), num_factors=2))
    assert found.plan.lanes[0].num_values == plain.plan.lanes[0].num_values + 2
    assert found.plan.hash != plain.plan.hash
    one = counters(found, 10, {"loss": (5.0, 10.0)})
    assert one[-2:] == [0, 0], "their worker puts them in"
    one[-2], one[-1] = (counted_factor(factor, 10, 5, name="steps") for factor in (0.75, -3.5))
    other = counters(found, 30, {"loss": (9.0, 30.0)})
    other[-2], other[-1] = (counted_factor(factor, 30, 5, name="steps") for factor in (1 / 3, 0.0))
    counted = read_counters(found, [(a + b) % 2**64 for a, b in zip(one, other, strict=True)])
    assert counted.factors[0] == pytest.approx(17.5, rel=1e-12)
    assert counted.factors[1] == -35.0
    assert (counted.weight, counted.metrics) == (40, {"loss": (14.0, 40.0)})


@pytest.mark.parametrize("factor", [float("nan"), float("inf"), -(2.0**23)])
def test_a_factor_that_could_overflow_is_refused(factor: float) -> None:
    with pytest.raises(BadUpdate, match=r"fednova\.steps is .*, wanted at most") as caught:
        counted_factor(factor, 600, 5, name="fednova.steps")
    assert caught.value.field == "fednova.steps"
    largest = ((2**63 - 1) // 5) * FACTOR_UNIT / 600
    assert counted_factor(largest / 2, 600, 5, name="fednova.steps") < 2**63
