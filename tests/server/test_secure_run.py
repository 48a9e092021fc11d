"""Rounds of masked updates from the closing of a round to its version: who drops out when, who lies, and who is killed."""

from __future__ import annotations

import asyncio
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from samples.masked_run import MANIFEST, LightSite, Server, expected, job_of, make_sites, plain

from atoll.server.events import decode_event
from atoll.server.run import replay
from atoll.server.run_state import Outcome
from atoll.server.secure_events import SurvivorsFixed
from atoll.server.steps import Step
from atoll.wire import control_pb2 as pb
from atoll.wire.job import Job
from atoll.wire.members_pb2 import MemberList, SignedMemberList

PHASES = ["plan", "keys", "shares", "survivors", "confirmations"]


def names(sites: dict[str, LightSite], *without: str) -> list[str]:
    return sorted(sites.keys() - set(without))


def require_model(server: Server, sites: dict[str, LightSite], survivors: list[str], round_: int = 1) -> None:
    """The version is that of the levels' exact sum, and plain fedavg's within what rounding may cost."""
    before = server.model(round_ - 1)
    rounded = rounded_like_the_model(before + expected(sites, survivors, round_))
    np.testing.assert_array_equal(server.model(round_), rounded)
    terms = sites[survivors[0]].terms
    assert terms is not None
    weight = sum(sites[name].weight for name in survivors)
    most = len(survivors) * terms.quantum * terms.max_weight / weight
    assert np.abs(server.model(round_) - before - plain(sites, survivors, round_)).max() <= most + 1e-6


def rounded_like_the_model(values: NDArray[np.float64]) -> NDArray[np.float64]:
    found, start = [], 0
    for spec in MANIFEST:
        part = values[start : start + spec.num_elements]
        found.append(part.astype(spec.dtype).astype(np.float64))
        start += spec.num_elements
    return np.concatenate(found)


def play(tmp_path: Path, job: Job, sites: dict[str, LightSite]) -> Server:
    server = Server(tmp_path, job, sites)
    asyncio.run(server.run())
    return server


def test_nobody_drops_out(tmp_path: Path) -> None:
    job = job_of(rounds=2)
    sites = make_sites(job)
    server = play(tmp_path, job, sites)
    assert server.driver.state.outcome is Outcome.FINISHED
    require_model(server, sites, names(sites), 2)
    record = server.record
    assert (record.num_sites, record.weight, list(record.missing)) == (5, 85, [])
    assert (record.train_metrics["loss"].sum, record.train_metrics["loss"].count) == (42.5, 85)
    assert record.secure.threshold == 3
    assert (record.secure.threat, record.secure.num_sites, record.secure.sessions) == ("active", 5, 1)
    assert all([end.version for end in site.ended] == [1, 2] for site in sites.values())


@pytest.mark.parametrize("threat", ["active", "semi-honest"])
@pytest.mark.parametrize("phase", PHASES)
def test_a_site_drops_out_in_a_phase(tmp_path: Path, phase: str, threat: str) -> None:
    job = job_of(threat=threat)
    sites = make_sites(job)
    sites["site-001"].stops_at = {0: phase}
    server = play(tmp_path, job, sites)
    in_sum = phase in ("survivors", "confirmations")
    survivors = names(sites) if in_sum else names(sites, "site-001")
    require_model(server, sites, survivors)
    assert list(server.record.secure.dropped) == ([] if in_sum else ["site-001"])
    assert server.record.num_sites == len(survivors)
    assert list(server.record.missing) == list(server.record.secure.dropped)


def test_two_drop_out_and_16_bits_are_enough(tmp_path: Path) -> None:
    job = job_of(bits=16)
    sites = make_sites(job)
    sites["site-001"].stops_at = {0: "shares"}
    sites["site-003"].stops_at = {0: "shares"}
    server = play(tmp_path, job, sites)
    require_model(server, sites, names(sites, "site-001", "site-003"))


def test_with_too_few_survivors_nothing_is_published_and_the_run_says_who_is_missing(tmp_path: Path) -> None:
    job = job_of(attempts=2)
    sites = make_sites(job)
    for number in range(3):
        sites[f"site-00{number}"].stops_at = {0: "shares"}
    server = play(tmp_path, job, sites)
    state = server.driver.state
    assert state.outcome is Outcome.FAILED
    assert "none of 2 sessions" in state.reason
    assert "of 2 of 5 sites" in state.reason
    assert "site-001 (silent for 1 s)" in state.reason
    assert "wanted those of 3 sites" in state.reason
    assert not server.models.has(1)
    assert [end.version for end in sites["site-004"].ended] == [0, 0]


def test_a_session_that_came_to_nothing_is_followed_by_one_with_new_keys(tmp_path: Path) -> None:
    job = job_of()
    sites = make_sites(job)
    for number in range(3):
        sites[f"site-00{number}"].stops_at = {1: "keys"}
    server = play(tmp_path, job, sites)
    require_model(server, sites, names(sites))
    assert server.record.secure.sessions == 2
    assert [end.version for end in sites["site-004"].ended] == [0, 1]


def test_who_sends_what_does_not_hold_is_left_out_and_the_others_go_on(tmp_path: Path) -> None:
    def forged(answer: pb.SecureAnswer) -> pb.SecureAnswer:
        if answer.WhichOneof("answer") == "advertised":
            answer.advertised = answer.advertised[:-1] + bytes([answer.advertised[-1] ^ 1])
        return answer

    job = job_of()
    sites = make_sites(job)
    sites["site-002"].lies = forged
    server = play(tmp_path, job, sites)
    require_model(server, sites, names(sites, "site-002"))


def test_bytes_that_are_not_the_declared_ones_are_not_added(tmp_path: Path) -> None:
    job = job_of()
    sites = make_sites(job)
    liar = sites["site-002"]

    def another(answer: pb.SecureAnswer) -> pb.SecureAnswer:
        if answer.WhichOneof("answer") == "input":
            liar.masked = bytes([liar.masked[0] ^ 1]) + liar.masked[1:]
            answer.input.crc32 = zlib.crc32(liar.masked)
        return answer

    liar.lies = another
    server = play(tmp_path, job, sites)
    require_model(server, sites, names(sites, "site-002"))


class Killed(BaseException):
    """The server's process is gone."""


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("dropped", ["", "site-001"])
def test_a_server_killed_in_a_phase_ends_with_the_same_model(tmp_path: Path, phase: str, dropped: str) -> None:
    job = job_of()
    sites = make_sites(job)
    if dropped:
        sites[dropped].stops_at = {0: "shares"}
    first = Server(tmp_path, job, sites)

    async def killed() -> None:
        running = asyncio.ensure_future(first.run())
        while phase not in sites["site-000"].heard:
            await asyncio.sleep(0.001)
        first.dead = True
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(killed())
    first.store.close()
    for site in sites.values():
        site.heard.clear()
    second = play(tmp_path, job, sites)
    survivors = names(sites, dropped)
    require_model(second, sites, survivors)
    fixed = phase in ("survivors", "confirmations")
    assert second.record.secure.sessions == (1 if fixed else 2)
    assert list(second.record.secure.dropped) == ([dropped] if dropped else [])
    if fixed:
        assert "plan" not in sites["site-000"].heard  # the same session, whose masked inputs are asked for again


def test_a_survivor_that_is_gone_with_the_killed_server_leads_to_another_session(tmp_path: Path) -> None:
    job = job_of()
    sites = make_sites(job)
    first = Server(tmp_path, job, sites)

    async def killed() -> None:
        running = asyncio.ensure_future(first.run())
        while "survivors" not in sites["site-000"].heard:
            await asyncio.sleep(0.001)
        first.dead = True
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(killed())
    first.store.close()
    sites["site-003"].stops_at = {1: "shares"}
    second = play(tmp_path, job, sites)
    require_model(second, sites, names(sites))
    assert second.record.secure.sessions == 2


def test_the_journal_replays_to_the_same_state(tmp_path: Path) -> None:
    job = job_of(rounds=2)
    sites = make_sites(job)
    sites["site-001"].stops_at = {0: "shares"}
    server = play(tmp_path, job, sites)
    events = [decode_event(entry) for entry in server.store.events(server.driver.run)]
    assert any(isinstance(event, SurvivorsFixed) for event in events)
    assert replay(server.driver.plan, events) == server.driver.state


def test_survivors_are_in_the_journal_before_they_are_told(tmp_path: Path) -> None:
    job = job_of()
    sites = make_sites(job)
    seen: list[str] = []
    server = Server(tmp_path, job, sites, on_step=lambda step, run: seen.append(str(step)))
    site = sites["site-000"]
    told = site.step

    def step(message: pb.SecureStep) -> None:
        if message.WhichOneof("step") == "survivors":
            kinds = [type(decode_event(entry)) for entry in server.store.events(server.driver.run)]
            assert SurvivorsFixed in kinds
            seen.append("told")
        told(message)

    site.step = step  # type: ignore[method-assign,assignment]
    asyncio.run(server.run())
    assert "told" in seen
    assert str(Step.COMMITTED) in seen


def test_sites_of_one_organisation_are_no_cohort(tmp_path: Path) -> None:
    job = job_of(attempts=1)
    sites = make_sites(job)
    server = Server(tmp_path, job, sites)
    listed = server.store.member_list()
    assert listed is not None
    table = MemberList.FromString(SignedMemberList.FromString(listed).member_list)
    table.version = 4
    for member in table.members:
        member.organisation = "one"
    server.store.save_member_list(4, SignedMemberList(member_list=table.SerializeToString()).SerializeToString())
    own = replace(sites["site-000"].own(), members=table)
    for site in sites.values():
        site.own = lambda: own
    asyncio.run(server.run())
    assert server.driver.state.outcome is Outcome.FAILED
    assert "of 1 organisations" in server.driver.state.reason
