"""A full disk at a site in a session: it says nothing, waits, and goes on when there is room, or in the next session."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from samples.secure_sites import Server, Site, federation, make_opening, sent, serve

from atoll.client import secure_tasks
from atoll.client.party import Agreed
from atoll.client.sealed import Sealer
from atoll.client.secure_tasks import SecureTasks
from atoll.cluster.messages import Mask, Masked
from atoll.wire import control_pb2 as pb
from atoll.wire.errors import DiskFull

PHASES = ["plan", "keys", "shares", "survivors", "confirmations"]


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("phase", PHASES)
def test_a_step_is_taken_again_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str, nth: int
) -> None:
    sites = federation(tmp_path)
    names = sorted(sites)
    victim, server, write = sites[names[1]], serve(sites), Sealer.write
    for other in PHASES[: PHASES.index(phase)]:
        server.go(other)
    left = nth

    def full(self: Sealer, path: Path, data: bytes) -> None:
        nonlocal left
        left -= victim.name in str(path)
        if left == 0:
            raise DiskFull(f"{path}: no room")
        write(self, path, data)

    monkeypatch.setattr(Sealer, "write", full)
    if phase == "survivors":
        server.go(phase, names[:1])
    step = getattr(server, f"{phase}_step")(victim.name) if phase != "survivors" else None
    if step is not None:
        try:
            victim.hear(step)
        except DiskFull:
            assert left == 0
        else:
            assert left > 0, "the step writes less often than that"
    monkeypatch.setattr(Sealer, "write", write)
    if phase == "survivors":
        confirm_rest(server, names[1:])
    else:
        server.go(phase)
    for other in PHASES[PHASES.index(phase) + 1 :]:
        server.go(other)
    levels = [sum(column) for column in zip(*(sent(site, server) for site in sites.values()), strict=True)]
    assert server.sums()[1].tolist() == levels


def confirm_rest(server: Server, names: list[str]) -> None:
    for name in names:
        answer = server.sites[name].hear(server.survivors_step(name))
        assert answer is not None
        server.take(name, answer)


class Work:
    """A run's worker, whose disk is full for so many tries."""

    def __init__(self, site: Site, full: float) -> None:
        self.site, self.full, self.tries = site, full, 0

    async def agreed(self) -> Agreed:
        return self.site.agreed

    async def mask(self, request: Mask) -> Masked:
        self.tries += 1
        if self.tries <= self.full:
            raise DiskFull(f"{request.out_path}: no room for the update")
        return self.site.mask(request)


class Tasks:
    """`SecureTasks` of one site over its folder, and what it says."""

    def __init__(self, site: Site, work: Work) -> None:
        self.said: list[pb.SecureAnswer] = []
        self.held_up: list[str] = []

        async def kept(key: object) -> None:
            return None

        place: Any = SimpleNamespace(
            home=SimpleNamespace(policy=site.root / "policy", revealed=site.root / "revealed"),
            settings=SimpleNamespace(site=SimpleNamespace(name=site.name)),
            sealer=site.sealer,
            outbox=SimpleNamespace(result=lambda key: pb.Result(), folder=lambda key: site.folder, attach=self.attach),
            deliveries=SimpleNamespace(until_kept=kept, on_broken=None),
            mailbox=SimpleNamespace(post=lambda secure_answer: self.said.append(secure_answer)),
            spawn=asyncio.ensure_future,
            board=SimpleNamespace(
                held_up=lambda run, why: self.held_up.append(why), idle=lambda run: self.held_up.append("")
            ),
        )
        self.tasks = SecureTasks(place, None, lambda: site.members, work_of=lambda run: work)
        self.tasks._sessions[site.key] = site.session

    def attach(self, key: object, payload: str) -> None:
        self.attached = payload

    async def answers(self, number: int) -> None:
        async with asyncio.timeout(10):
            while len(self.said) < number:
                await asyncio.sleep(0.005)


async def test_masking_waits_for_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secure_tasks, "DISK_PATIENCE_S", 0.01)
    sites = federation(tmp_path)
    site, server = sites[sorted(sites)[1]], serve(sites)
    server.go("plan")
    server.go("keys")
    work = Work(site, full=2)
    tasks = Tasks(site, work)
    tasks.tasks.take(server.shares_step(site.name))
    await tasks.answers(1)
    assert work.tries == 3
    assert [line.startswith("waits for disk space: ") for line in tasks.held_up] == [True, True, False]
    assert tasks.said[0].WhichOneof("answer") == "input"
    assert tasks.attached == "masked-1"
    server.take(site.name, tasks.said[0])


async def test_a_site_without_room_is_in_the_next_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secure_tasks, "DISK_PATIENCE_S", 0.01)
    sites = federation(tmp_path)
    site, server = sites[sorted(sites)[1]], serve(sites)
    server.go("plan")
    server.go("keys")
    work = Work(site, full=float("inf"))
    tasks = Tasks(site, work)
    tasks.tasks.take(server.shares_step(site.name))
    while work.tries < 3:
        await asyncio.sleep(0.005)
    assert not tasks.said, "as long as the server has not gone on, the site may still be in time"
    tasks.tasks.take(server.end_step(site.name, version=0, reason="too few"))
    later = Server(sites, make_opening(sites, session=2), site.members, site.job)
    tasks.tasks.take(later.plan_step(site.name))
    await tasks.answers(2)
    assert (tasks.said[0].session, tasks.said[0].WhichOneof("answer")) == (1, "refused")
    assert (tasks.said[1].session, tasks.said[1].WhichOneof("answer")) == (2, "advertised")
    work.full = 0
    for name in sites:
        if name != site.name:
            later.go("plan", [name])
    later.take(site.name, tasks.said[1])
    later.go("keys", [name for name in sites if name != site.name])
    tasks.tasks.take(later.keys_step(site.name))
    await tasks.answers(3)
    later.take(site.name, tasks.said[2])
    tasks.tasks.take(later.shares_step(site.name))
    await tasks.answers(4)
    assert tasks.said[3].WhichOneof("answer") == "input", tasks.said[3].refused.message
