"""A region's server as what does the work of an upper server's tasks: without processes, sites are played here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from atoll.aggregation.schedule import Asked
from atoll.cluster.messages import Evaluate, Prepare, Train
from atoll.server.authority import Authority
from atoll.server.coordinator import Coordinator
from atoll.server.events import decode_event
from atoll.server.main import Server
from atoll.server.models import place_file
from atoll.server.records import RunRow
from atoll.server.security import Caller
from atoll.server.sessions import Session
from atoll.server.settings import ServerFolder, ServerSettings, UpstreamSection
from atoll.server.setup import init_server
from atoll.server.store import Store
from atoll.server.upstream import RegionWorker, Upstream
from atoll.transport.hello import make_hello
from atoll.wire import control_pb2 as pb
from atoll.wire.errors import AppFailed, ConfigError, Incompatible, Malformed, NotAllowed, TooFewSites, to_detail
from atoll.wire.job import parse_job
from atoll.wire.manifest import Manifest
from atoll.wire.members_pb2 import ACTIVE, Member, MemberList, SignedMemberList
from atoll.wire.model_file import create
from atoll.wire.names import new_run_id

MANIFEST = Manifest.build([("w", "float32", (8,), "parameter")])
SITES = ("a", "b")


class Site:
    """One site of the region: what it is told, and what it says."""

    def __init__(self, region: Region, name: str) -> None:
        self.region, self.name = region, name
        self.session = Session(name, make_hello(pb.Capacity(runs_at_once=1)))

    async def attach(self) -> None:
        await self.region.coordinator.attach(self.session)

    async def told(self, body: str) -> pb.ServerMessage:
        """The next message of this kind."""
        async with asyncio.timeout(20):
            while True:
                message = await self.session.next()
                assert message is not None
                if message.WhichOneof("body") == body:
                    return message

    async def say(self, **body: object) -> None:
        await self.region.coordinator.hear(self.session, pb.SiteMessage(**body))  # type: ignore[arg-type]

    async def join(self, max_weight: int = 10) -> None:
        offer = (await self.told("run_offer")).run_offer
        await self.say(offer_reply=pb.OfferReply(run=offer.run, accept=pb.Accept(max_weight=max_weight)))


class Region:
    """A server that is a region; what the agent would tell it is told by the tests."""

    def __init__(self, folder: Path) -> None:
        settings = ServerSettings(federation="isles", address="127.0.0.1:1", enrolment_address="127.0.0.1:2")
        self.folder = folder
        self.store = Store.open(f"sqlite:///{folder}/state.sqlite")
        members = [Member(site=site, status=ACTIVE) for site in SITES]
        signed = SignedMemberList(member_list=MemberList(version=1, members=members).SerializeToString())
        self.store.save_member_list(1, signed.SerializeToString())
        self.coordinator = Coordinator(settings=settings, folder=ServerFolder(root=folder), store=self.store)
        self.upstream = Upstream(UpstreamSection(home=folder / "upstream"), self.coordinator, self.store)
        self.sites = {name: Site(self, name) for name in SITES}
        self.run = new_run_id()
        (folder / "manifest").write_bytes(MANIFEST.encode())
        with create(self.base, MANIFEST, {}) as out:
            out[:] = bytes(MANIFEST.num_bytes)

    @property
    def base(self) -> Path:
        return self.folder / "base.safetensors"

    def worker(self) -> RegionWorker:
        return self.upstream.new_worker(self.folder, self.folder / "log")

    def prepare(self, wait: str = "20s", rounds: int = 3) -> Prepare:
        job = parse_job({"job": {"name": "trial", "app": "trial", "rounds": rounds, "wait_for_sites": wait}})
        return Prepare(
            run=self.run,
            site="north",
            app_name="trial",
            distribution="",
            entry_point="",
            app_hash="ab" * 32,
            data={},
            job=job.canonical().decode(),
            manifest_path=str(self.folder / "manifest"),
            state_folder="",
            submitted_by="ada",
        )

    def train(self, number: int = 1, num_sites: int = 4, max_weight: int = 50) -> Train:
        return Train(
            key=f"{self.run}/r{number}.north#1",
            round=number,
            base_version=number - 1,
            base_path=str(self.base),
            out_path=str(self.folder / "sum"),
            num_sites=num_sites,
            max_weight=max_weight,
        )

    async def joined(self) -> RegionWorker:
        """A worker whose run both sites have joined."""
        worker = self.worker()
        preparing = asyncio.create_task(worker.prepare(self.prepare()))
        for number, site in enumerate(self.sites.values(), start=1):
            await site.attach()
            await site.join(10 * number)
        prepared = await preparing
        assert (prepared.num_sites, prepared.max_weight, prepared.sum_weights) == (2, 20, 30)
        await self.upstream.joined(self.run)
        return worker


@pytest.fixture
async def region(tmp_path: Path) -> AsyncIterator[Region]:
    region = Region(tmp_path)
    await region.coordinator.start()
    yield region
    await region.coordinator.drain()
    region.store.close()


async def test_the_run_is_offered_below_under_the_same_id_and_in_the_researchers_name(region: Region) -> None:
    worker = await region.joined()
    assert worker.pid is not None
    row = region.store.run(region.run)
    assert (row.submitted_by, row.status) == ("ada", "queued")
    assert (await region.worker().prepare(region.prepare())).num_sites == 2, "a worker anew finds it as it was"


async def test_too_few_sites_are_named_within_the_jobs_wait(region: Region) -> None:
    await region.sites["a"].attach()
    preparing = asyncio.create_task(region.worker().prepare(region.prepare(wait="1s")))
    await region.sites["a"].join()
    with pytest.raises(TooFewSites, match=r"1 of at least 2 joined .*b is not connected"):
        await preparing
    with pytest.raises(NotAllowed, match="over in this region: failed"):
        await region.worker().prepare(region.prepare(wait="1s"))


async def test_a_failed_round_is_told_with_the_reason_and_the_next_one_starts(region: Region) -> None:
    worker = await region.joined()
    training = asyncio.create_task(worker.train(region.train()))
    for site in region.sites.values():
        task = (await site.told("task")).task
        error = to_detail(AppFailed("out of memory", site=site.name))
        await site.say(task_failed=pb.TaskFailed(key=task.key, error=error))
    with pytest.raises(TooFewSites, match=r"region north has no part in round 1: .*a: failed \(out of memory\)"):
        await training
    training = asyncio.create_task(worker.train(region.train(2)))
    assert (await region.sites["a"].told("task")).task.round == 2
    training.cancel()


async def test_what_is_cancelled_above_is_cancelled_below(region: Region) -> None:
    worker = await region.joined()
    training = asyncio.create_task(worker.train(region.train()))
    await region.sites["a"].told("task")
    await region.upstream.cancelled(region.train().key)
    assert (await region.sites["a"].told("cancel_task")).cancel_task.key.task == "r1.a"
    with pytest.raises(TooFewSites, match="closed above"):
        await training


async def test_the_last_round_that_counted_above_is_journalled_with_the_next_one(region: Region) -> None:
    worker = await region.joined()
    training = asyncio.create_task(worker.train(replace(region.train(2), counted_round=1)))
    await region.sites["a"].told("task")
    events = [decode_event(entry) for entry in region.store.events(region.run)]
    assert [event.counted_round for event in events if isinstance(event, Asked)] == [1]
    training.cancel()


async def test_commit_and_end_are_handed_down(region: Region) -> None:
    await region.joined()
    await region.upstream.committed(region.run, 1, 1)
    committed = (await region.sites["b"].told("committed")).committed
    assert (committed.round, committed.version) == (1, 1)
    await region.upstream.ended(region.run, "failed", "round 2 has too few sites")
    ended = (await region.sites["b"].told("run_ended")).run_ended
    assert (ended.status, ended.reason.message) == ("failed", "round 2 has too few sites")
    assert region.store.run(region.run).status == "failed"


async def test_metric_sums_of_the_sites_are_added(region: Region) -> None:
    worker = await region.joined()
    request = Evaluate(key=f"{region.run}/e1.north#1", round=1, base_version=1, base_path=str(region.base))
    evaluating = asyncio.create_task(worker.evaluate(request))
    for number, site in enumerate(region.sites.values(), start=1):
        task = (await site.told("task")).task
        metrics = {"accuracy": pb.MetricSum(sum=number, count=10)}
        await site.say(result=pb.Result(key=task.key, round=1, metrics=metrics))
    assert (await evaluating).metrics == {"accuracy": (3.0, 20.0)}


async def test_only_an_operator_stops_the_run_here_and_the_region_then_leaves_it(region: Region) -> None:
    worker = await region.joined()
    training = asyncio.create_task(worker.train(region.train()))
    await region.sites["a"].told("task")
    with pytest.raises(NotAllowed):  # a researcher of this region who happens to have that name
        await region.coordinator.runs.stop(Caller(name="ada", role="researcher"), region.run)
    await region.coordinator.runs.stop(Caller(name="olga", role="operator"), region.run)
    with pytest.raises(NotAllowed, match="over in region north: stopped by olga"):
        await training
    assert worker.pid is None


@pytest.mark.parametrize(
    ("terms", "kind", "field"),
    [
        ({"num_sites": 0, "max_weight": 0}, Incompatible, "sum"),
        ({"num_sites": 1}, Malformed, "sum.num_sites"),
        ({"max_weight": 19}, Malformed, "sum.max_weight"),
    ],
)
async def test_terms_that_have_no_room_for_the_region(
    region: Region, terms: dict[str, int], kind: type[Malformed | Incompatible], field: str
) -> None:
    worker = await region.joined()
    with pytest.raises(kind) as caught:
        await worker.train(region.train(1, **terms))
    assert caught.value.field == field


async def test_an_upper_server_cannot_take_a_run_of_the_regions_own(region: Region) -> None:
    own = RunRow(
        run=region.run,
        name="own",
        job=region.prepare().job.encode(),
        app_hash="cd" * 32,
        submitted_by="olga",
        crc32=1,
        status="finished",
        reason=None,
        submitted_at=datetime.now(UTC),
    )
    region.store.create_run(own, manifest=MANIFEST.encode(), request="own")
    with pytest.raises(Malformed, match="one of this region's own"):
        await region.worker().prepare(region.prepare())


def test_a_base_is_once_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "base"
    source.write_bytes(b"model")
    place_file(source, tmp_path / "0.safetensors")
    assert (tmp_path / "0.safetensors").samefile(source)

    def refuse(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr("os.link", refuse)
    place_file(source, tmp_path / "1.safetensors")
    assert (tmp_path / "1.safetensors").read_bytes() == b"model"
    assert not (tmp_path / "1.safetensors").samefile(source)


def test_settings_name_the_nearest_key_and_the_quorum_can_be_met() -> None:
    table = {"federation": "isles", "address": "h:1", "enrolment_address": "h:2"}
    made = ServerSettings.model_validate({**table, "upstream": {"home": "up", "min_sites": 3, "quorum": 2}})
    assert made.upstream is not None
    assert made.upstream.deadline_share == 0.9
    for wrong in ({"home": "up", "quorum": 3}, {"home": "up", "min": 2}, {"min_sites": 2}):
        with pytest.raises(ValueError, match=r"quorum|min|home"):
            ServerSettings.model_validate({**table, "upstream": wrong})


async def test_a_server_without_an_agent_says_so(tmp_path: Path) -> None:
    init_server(tmp_path / "server", federation="isles", key_folder=tmp_path / "key", address="127.0.0.1:7443")
    place = ServerFolder(root=tmp_path / "server")
    settings = ServerSettings(
        federation="isles", address="h:1", enrolment_address="h:2", upstream=UpstreamSection(home=tmp_path)
    )
    store = Store.open(place.database_url(settings))
    try:
        with pytest.raises(ConfigError, match="without an agent"):
            Server(place=place, settings=settings, store=store, authority=Authority.load(place.authority))
    finally:
        store.close()
