"""The agent of a region: the agent of a site, with a server behind it in place of a worker."""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from samples.dialogue import MODEL, eventually, held
from samples.scripted_server import Line, ScriptedServer
from samples.trial_site import SITE, TrialSite, make_offer, make_task

from atoll.client.region import RegionSite
from atoll.cluster.messages import (
    Describe,
    Described,
    Evaluate,
    Evaluated,
    Mask,
    Masked,
    Prepare,
    Prepared,
    Train,
    Trained,
)
from atoll.transport.hello import BULK, REGION
from atoll.wire import control_pb2 as pb
from atoll.wire.errors import TooFewSites

SUM = b"sum of two" * 100


class Region:
    """Stands for a server with two sites; keeps what it is asked and told."""

    def __init__(self) -> None:
        self.pid: int | None = 1
        self.asked: list[Prepare | Train | Evaluate] = []
        self.told: list[tuple[str, ...]] = []
        self.fails = False

    def new_worker(self, folder: Path, log_path: Path) -> Region:
        return self

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def prepare(self, request: Prepare, timeout_s: float | None = None) -> Prepared:
        self.asked.append(request)
        return Prepared(max_weight=20, update_bytes=len(SUM), device="region of 2", num_sites=2, sum_weights=30)

    async def train(self, request: Train, on_progress: Callable[[int, int], None] | None = None) -> Trained:
        self.asked.append(request)
        if self.fails:
            raise TooFewSites("region north has no part in round 1: too few", site=SITE)
        Path(request.out_path).write_bytes(SUM)
        return Trained(key=request.key, weight=30, metrics={}, num_bytes=len(SUM), crc32=zlib.crc32(SUM))

    async def evaluate(self, request: Evaluate) -> Evaluated:
        self.asked.append(request)
        return Evaluated(key=request.key, metrics={"accuracy": (3.0, 20.0)})

    async def mask(self, request: Mask) -> Masked:
        raise AssertionError("a region masks nothing")

    async def describe(self, request: Describe) -> Described:
        raise AssertionError("a region is asked for no statistics")

    async def joined(self, run: str) -> None:
        self.told.append(("joined", run))

    async def committed(self, run: str, round_: int, version: int) -> None:
        self.told.append(("committed", run, str(round_), str(version)))

    async def cancelled(self, key: str) -> None:
        self.told.append(("cancelled", key))

    async def ended(self, run: str, status: str, reason: str) -> None:
        self.told.append(("ended", run, status, reason))


@pytest.fixture
def region() -> Region:
    return Region()


@pytest.fixture
async def joined(site: TrialSite, server: ScriptedServer, region: Region) -> AsyncIterator[RegionSite]:
    """The agent, running towards a server that takes regions; no app is installed beside it."""
    server.features = (REGION,)
    member = RegionSite(site.home.root, region)
    member.start()
    yield member
    await member.stop()


async def accepted(server: ScriptedServer) -> tuple[Line, str]:
    line = await server.attached()
    offer = make_offer(app="unheard")  # the policy allows it, and nothing here is installed under that name
    line.say(run_offer=offer)
    reply = await line.hear("offer_reply")
    assert reply.accept == pb.Accept(max_weight=20, region=pb.Region(num_sites=2, sum_weights=30)), reply
    return line, offer.run


async def test_a_run_of_a_region_from_offer_to_end(
    server: ScriptedServer, site: TrialSite, region: Region, joined: RegionSite
) -> None:
    line, run = await accepted(server)
    assert list(line.hello.features) == sorted([BULK, REGION])
    prepared = region.asked[0]
    assert isinstance(prepared, Prepare)
    assert (prepared.submitted_by, prepared.app_name, prepared.distribution) == ("ada", "unheard", "")

    task = make_task(run)
    task.sum.CopyFrom(pb.SumTerms(num_sites=5, max_weight=99))
    line.say(task=task)
    server.grant_download(line, await line.hear("fetch"), MODEL)
    result = await line.hear("result")
    assert (result.weight, [payload.name for payload in result.payloads]) == (30, ["sum"])
    trained = region.asked[1]
    assert isinstance(trained, Train)
    assert (trained.num_sites, trained.max_weight, trained.round) == (5, 99, 1)
    assert await server.whole(server.grant_upload(line, result)) == SUM

    line.say(committed=pb.Committed(run=run, round=1, version=1))
    await eventually(lambda: not held(site))
    line.say(task=make_task(run, kind=pb.EVALUATE))
    server.grant_download(line, await line.hear("fetch"), MODEL)
    assert (await line.hear("result")).metrics["accuracy"].count == 20.0
    line.say(run_ended=pb.RunEnded(run=run, status="finished"))
    ended = ("ended", run, "finished", "")
    await eventually(lambda: ended in region.told)
    assert region.told == [("joined", run), ("committed", run, "1", "1"), ended]


async def test_what_comes_to_nothing_in_the_region_is_its_failure(
    server: ScriptedServer, region: Region, joined: RegionSite
) -> None:
    line, run = await accepted(server)
    region.fails = True
    line.say(task=make_task(run))
    server.grant_download(line, await line.hear("fetch"), MODEL)
    failed = await line.hear("task_failed")
    assert (failed.error.kind, failed.error.message) == (
        "TooFewSites",
        "region north has no part in round 1: too few",
    )
    line.say(cancel_task=pb.CancelTask(key=make_task(run, 2).key))
    await eventually(lambda: ("cancelled", f"{run}/r2.{SITE}#1") in region.told)


async def test_the_policy_of_a_region_is_looked_at_as_a_sites(
    server: ScriptedServer, region: Region, joined: RegionSite
) -> None:
    line = await server.attached()
    line.say(run_offer=make_offer(app="forbidden"))
    reply = await line.hear("offer_reply")
    assert (reply.decline.kind, reply.decline.field) == ("PolicyRefused", "allowed_apps")
    assert region.asked == []


async def test_an_older_server_is_left_at_once_and_the_status_says_why(
    server: ScriptedServer, site: TrialSite, region: Region
) -> None:
    member = RegionSite(site.home.root, region)
    member.start()
    try:
        await server.attached()
        await eventually(lambda: site.home.status.exists() and "takes no regions" in site.home.status.read_text())
    finally:
        await member.stop()
    assert region.told == []


async def test_a_region_that_starts_again_is_told_what_it_has_joined(
    server: ScriptedServer, site: TrialSite, region: Region, joined: RegionSite
) -> None:
    _, run = await accepted(server)
    await joined.stop()
    region.told.clear()
    again = RegionSite(site.home.root, region)
    again.start()
    try:
        line = await server.attached()
        assert list(line.hello.joined_runs) == [run]
        assert region.told == [("joined", run)]
    finally:
        await again.stop()
