"""Which connected sites a run has no use for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from atoll.aggregation.parts import build
from atoll.server.unfit import unfit
from atoll.transport.hello import SECAGG
from atoll.wire import control_pb2 as pb

NORTH = {"region": "north"}


def session(site: str, labels: dict[str, str], *, ended: bool = False, features: tuple[str, ...] = ()) -> Any:
    hello = pb.Hello(capacity=pb.Capacity(labels=labels), features=features)
    return SimpleNamespace(site=site, hello=hello, ended=ended)


def driver(schedule: Any, *, members: tuple[str, ...] = (), only: tuple[str, ...] = (), masked: bool = False) -> Any:
    return SimpleNamespace(
        plan=SimpleNamespace(schedule=schedule, masked=masked),
        state=SimpleNamespace(members=dict.fromkeys(members)),
        only=frozenset(only),
    )


SESSIONS = [session("a", NORTH), session("b", {"region": "south"}), session("c", {}), session("d", {}, ended=True)]


def reasons(schedule: Any, **driver_: Any) -> dict[str, str]:
    return dict(unfit(driver(schedule, **driver_), SESSIONS))


def test_sites_are_told_which_labels_they_have() -> None:
    found = reasons(build("schedule", "rounds", {"where": NORTH}))
    assert found.keys() == {"b", "c"}
    assert "labels than this one's (region = south)" in found["b"]
    assert "labels than this one's (none); see [capacity] of site.toml" in found["c"]


@pytest.mark.parametrize("kind", ["rounds", "buffered", "cyclic"])
def test_a_schedule_without_a_choice_takes_all(kind: str) -> None:
    assert reasons(build("schedule", kind, {"k": 1} if kind == "buffered" else {})) == {}


def test_groups_and_names_choose_too() -> None:
    options = {"label": "region", "groups": ["north", "east"], "rounds": 1}
    assert reasons(build("schedule", "hierarchical", options)).keys() == {"b", "c"}
    assert reasons(build("schedule", "cyclic", {"sites": ["a", "b"]})).keys() == {"c"}


def test_members_and_sites_that_the_job_does_not_name_are_left_alone() -> None:
    schedule = build("schedule", "rounds", {"where": NORTH})
    assert reasons(schedule, members=("b",)).keys() == {"c"}
    assert reasons(schedule, only=("a", "b")).keys() == {"b"}


def test_a_site_that_cannot_mask_is_not_asked_to() -> None:
    new = session("e", NORTH, features=(SECAGG,))
    found = dict(unfit(driver(build("schedule", "rounds", {}), masked=True), [*SESSIONS, new]))
    assert found.keys() == {"a", "b", "c"}
    assert all("knows no secure aggregation" in reason for reason in found.values())
